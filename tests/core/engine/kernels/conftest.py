"""Kernels run on the CPU here: the variable must be set before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
