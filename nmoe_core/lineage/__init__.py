"""One lineage, both ways: what a training step read, and what became of a document.

Nothing is computed anew: every fact is read from what the tasks committed, and checked to belong
to what it is told of. What a task has not made yet is None.
"""

from nmoe_core.lineage.document import explain_document
from nmoe_core.lineage.step import explain_step

__all__ = ["explain_document", "explain_step"]
