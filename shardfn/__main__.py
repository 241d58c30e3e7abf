"""`python -m shardfn`: the same as the program `shardfn`."""

import sys

from shardfn.cli import main

if __name__ == "__main__":
    sys.exit(main())
