"""What prep reads."""

from nmoe_core.prep.pipeline import ArrowSource, HuggingFaceSource, JSONLSource

__all__ = ["ArrowSource", "HuggingFaceSource", "JSONLSource"]
