from qat.cli.quantize import main

if __name__ == "__main__":
    raise SystemExit(main())
