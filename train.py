from qat.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
