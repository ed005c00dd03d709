"""`python -m acnml` is the command `acnml`."""

from acnml.cli import main

if __name__ == "__main__":
    main()
