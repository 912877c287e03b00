"""`python -m nmoe.data.cli VERB ...`: the same as `nmoe VERB ...`."""

import sys

from nmoe_core.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
