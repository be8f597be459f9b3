"""`python -m blockdraft` is the command `blockdraft`."""

from blockdraft.cli import main

if __name__ == "__main__":
    main()
