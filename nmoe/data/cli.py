"""`python -m nmoe.data.cli VERB ...`: what `nmoe VERB ...` does."""

import sys

from nmoe_core.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
