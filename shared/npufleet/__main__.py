"""`python -m npufleet` is the command `npufleet`."""

from npufleet.cli import main

if __name__ == "__main__":
    main()
