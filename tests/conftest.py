"""Hypothesis draws the same examples at every run, so that a green suite stays green.

`HYPOTHESIS_PROFILE=random` draws others, as `make test-all` does.
"""

import os

from hypothesis import settings

# No deadline: the first example may import or compile, and machines are shared.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
