from qat.cli.export import main

if __name__ == "__main__":
    raise SystemExit(main())
