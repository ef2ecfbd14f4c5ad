from qat.cli.compare import main

if __name__ == "__main__":
    raise SystemExit(main())
