from qat.cli.coverage import main

if __name__ == "__main__":
    raise SystemExit(main())
