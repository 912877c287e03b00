"""The engine."""

from nmoe_core.engine.generation.generator import BatchedGenerator
from nmoe_core.engine.model import Transformer

__all__ = ["BatchedGenerator", "Transformer"]
