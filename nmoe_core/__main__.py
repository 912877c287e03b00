"""`python -m nmoe_core` is the same as `nmoe`."""

from __future__ import annotations

import sys

from nmoe_core.cli import main

sys.exit(main())
