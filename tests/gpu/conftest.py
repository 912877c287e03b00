"""Skips everything here where there is no CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _exact_float32():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
