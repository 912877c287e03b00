"""`[[transforms]]`: how the text of documents is changed before it is tokenised."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nmoe_core.base.strict import StrictModel

# How a transform is applied does not change the text: these keys are no part of its identity.
_NOT_IN_TEXT = ("sources",)


class _Transform(StrictModel):
    """Keys of every transform."""

    sources: tuple[str, ...] | None = None
    """Sources whose documents are changed. Not set: all sources."""
    keep_removed: bool = True
    """Keep the removed text beside the shard, so that `nmoe explain` shows the text before; the
    file is neither curated, exported nor published."""

    def identity(self) -> dict[str, Any]:
        """The values that decide what is changed and recorded."""
        return self.model_dump(mode="json", exclude=set(_NOT_IN_TEXT))


class Base64Table(_Transform):
    """`[[transforms]] of kind base64_blobs`: replaces long runs of base64, such as images."""

    kind: Literal["base64_blobs"]
    min_chars: int = Field(default=512, ge=64)
    """Minimum length of a run that is replaced."""
    replacement: str = "<blob>"
    """Text that takes the place of a run; may be empty."""


TransformTable = Annotated[Base64Table, Field(discriminator="kind")]
