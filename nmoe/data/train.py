"""`python -m nmoe.data.train VERB ...`: the same as `nmoe train VERB ...`."""

import sys

from nmoe_core.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    sys.exit(main())
