from qat.cli.sensitivity import main

if __name__ == "__main__":
    raise SystemExit(main())
