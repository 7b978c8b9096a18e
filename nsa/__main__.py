"""`python -m nsa`: the same as the `nsa` command."""

import sys

from nsa.cli import main

if __name__ == "__main__":
    sys.exit(main())
