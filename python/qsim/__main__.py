"""``python -m qsim``: the command line."""

import sys

from qsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
