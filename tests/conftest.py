"""Tests draw the same examples and weights at every run, so that a green suite stays green.

`HYPOTHESIS_PROFILE=random` draws others, as `make test-all` does.
"""

import os
import sys

import pytest
from hypothesis import settings

# No deadline: the first example may import or compile, and machines are shared.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
settings.load_profile(PROFILE)


@pytest.fixture(autouse=True)
def _fixed_weights() -> None:
    """Weights that a test draws without a seed of its own."""
    if PROFILE == "fixed" and "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
