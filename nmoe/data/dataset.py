"""Rows of a plan by number, and how far a source has been read."""

from loader.plan.records import Consumed as Cursor
from loader.torch_data import RowDataset as NumpyFSLDataset

__all__ = ["Cursor", "NumpyFSLDataset"]
