"""`python -m workbench` is the command line, also from a source tree that was never installed."""

import sys

from workbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
