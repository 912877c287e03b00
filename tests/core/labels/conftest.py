from pathlib import Path

import pytest

from tests.core.labels.labelling import Labelling


@pytest.fixture
def labelling(tmp_path: Path, data_root: Path) -> Labelling:
    return Labelling(tmp_path, data_root)
