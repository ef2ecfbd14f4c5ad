from qat.cli.verify import main

if __name__ == "__main__":
    raise SystemExit(main())
