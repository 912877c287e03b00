"""All writers of the suite by their names: a command of `nmoe` and its flags, or another work."""

from tests.crash.command_writers import COMMAND_WRITERS, SENT_WRITERS
from tests.crash.other_writers import OTHER_WRITERS
from tests.crash.transform_writers import KIND_WRITERS, SEVERAL_WRITERS
from tests.crash.writers import HEAD_WRITERS, TASK_WRITERS

DISTURBED = TASK_WRITERS | OTHER_WRITERS | COMMAND_WRITERS | SEVERAL_WRITERS
"""Those that change files through Python, in a project whose grader is the student."""
SIGNALLED = DISTURBED | SENT_WRITERS | KIND_WRITERS
"""Those that signals end."""
ALL_WRITERS = SIGNALLED | HEAD_WRITERS
