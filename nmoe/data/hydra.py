"""`python -m nmoe.data.hydra VERB ...`: what `nmoe hydra VERB ...` does."""

import sys

from nmoe_core.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "hydra")
    sys.exit(main())
