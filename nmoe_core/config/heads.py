"""`[heads]`: the tables of probe and judge."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from nmoe_core.base.strict import StrictModel


class ProbeTable(StrictModel):
    """`[heads.probe]`: the probe, by default a ridge regression on pooled states of several blocks.
    If `tap`, `batch_size`, `epochs` or `lr` is set, it has the published form instead: it reads one
    block and is trained in steps."""

    blocks: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Blocks whose pooled states are read side by side. Default: chosen by cross-validation on the
    train labels."""
    tap: int | None = Field(default=None, ge=1)
    """Block whose output states the published form reads. Default: at 18/24 of the depth."""
    batch_size: int | None = Field(default=None, ge=1)
    """Documents per training step of the published form. Default: 256."""
    epochs: int | None = Field(default=None, ge=1)
    """Number of passes over the labels, in the published form. Default: 1."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate of the published form. Default: 1e-3."""

    @property
    def is_published(self) -> bool:
        """Whether the probe has the published form."""
        steps = (self.tap, self.batch_size, self.epochs, self.lr)
        return any(value is not None for value in steps)

    @property
    def recorded(self) -> dict[str, Any]:
        """The values of all keys, with the defaults of the form."""
        steps = {"batch_size": 256, "epochs": 1, "lr": 1e-3} if self.is_published else {}
        given = self.model_dump(mode="json")
        return given | steps | {name: v for name, v in given.items() if v is not None}

    @model_validator(mode="after")
    def _has_one_form(self) -> ProbeTable:
        if self.is_published and self.blocks:
            raise ValueError(
                "blocks are of a ridge regression; tap, batch_size, epochs and lr of the published "
                "form: set either"
            )
        if sorted({*self.blocks}) != [*self.blocks]:
            raise ValueError(f"blocks {list(self.blocks)} are not ascending")
        return self


class JudgeTable(StrictModel):
    """`[heads.judge]`: the judge, a small transformer on the states of all tokens."""

    tap: int | None = Field(default=None, ge=1)
    """Block whose output states are read. Default: the last of gpt-oss, as the published judge
    does; of other models, the block at three fifths of the depth."""
    batch_size: int = Field(default=128, ge=1)
    """Documents per training step. The judge processes a step in passes of 32,768 tokens, of
    about 2 GB."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over the labels."""
    lr: float = Field(default=5e-4, gt=0)
    """Learning rate."""
    mid_dim: int = Field(default=512, ge=8)
    """Width of the judge."""
    num_heads: int = Field(default=8, ge=1)
    """Attention heads."""
    ffn_dim: int = Field(default=2048, ge=8)
    """Width of the feed-forward layer."""

    @model_validator(mode="after")
    def _heads_divide(self) -> JudgeTable:
        if self.mid_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide mid_dim {self.mid_dim}")
        return self


class HeadsTable(StrictModel):
    """`[heads]`: probe and judge over the backbone."""

    max_ctx: int = Field(default=4096, ge=8)
    """Maximum tokens of a document that heads read. Without --config, the value of the trained
    heads is used."""
    seed: int = 0
    """Seed of the initial weights and of the order of documents."""
    use_salvaged: bool = False
    """Also train on salvaged labels; calibration never uses them."""
    cache_gib: float = Field(default=4.0, ge=0)
    """Disk in GiB for the states of labelled documents, which both heads train on. States of tokens
    that do not fit are computed again in each epoch."""
    probe: ProbeTable = ProbeTable()
    judge: JudgeTable = JudgeTable()
