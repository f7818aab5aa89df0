"""`python -m ortgrad`"""

import sys

from ortgrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
