"""``python -m crisp``: the command line."""

from crisp.cli.main import main

if __name__ == "__main__":
    main()
