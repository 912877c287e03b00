"""`python -m nmoe_core` is the same as `nmoe`."""

import sys

from nmoe_core.cli import main

sys.exit(main())
