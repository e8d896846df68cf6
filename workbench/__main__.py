"""Command line as `python -m workbench`, also from a source tree that is not installed."""

import sys

from workbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
