"""`python -m tailrace.cli`: the command line without its script."""

from tailrace.cli.main import main

if __name__ == "__main__":
    main()
