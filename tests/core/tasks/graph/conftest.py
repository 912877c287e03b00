"""The run that the tests of the graph work on copies of."""

import pytest

from tests.core.tasks.graph.world import make_all, small_world
from tests.project import Project


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The whole run, made by its tasks."""
    project = small_world(tmp_path_factory.mktemp("made"))
    make_all(project.run)
    return project
