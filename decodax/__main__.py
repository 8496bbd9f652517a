"""`python -m decodax`."""

import sys

from decodax.cli import main

if __name__ == "__main__":
    sys.exit(main())
