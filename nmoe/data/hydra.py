"""`python -m nmoe.data.hydra VERB ...`: the same as `nmoe hydra VERB ...`."""

import sys

from nmoe_core.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "hydra")
    sys.exit(main())
