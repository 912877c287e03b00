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

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose versions may change the text, beside those that are always installed."""
        return ()

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
    hex: bool = False
    """Replace long runs of hexadecimal digits too."""


_Personal = Literal["email", "phone", "ip", "iban", "card", "key"]


class RedactTable(_Transform):
    """`[[transforms]] of kind redact`: replaces personal data and keys."""

    kind: Literal["redact"]
    kinds: tuple[_Personal, ...] = Field(
        default=("email", "phone", "ip", "iban", "card", "key"), min_length=1
    )
    """What is replaced; `phone` needs the package phonenumbers."""
    placeholder: str = "<{KIND}>"
    """Text that takes its place; `{KIND}` or `{kind}` stands for the kind. Empty: it is removed."""
    regions: tuple[Annotated[str, Field(pattern="^[A-Z]{2}$")], ...] = ("US",)
    """Countries whose telephone numbers are found without a country code, as ISO 3166 codes."""
    keep_examples: bool = True
    """Keep what manuals show: e-mail at example.com, AKIAIOSFODNN7EXAMPLE, test numbers of
    cards."""

    @property
    def packages(self) -> tuple[str, ...]:
        return ("phonenumbers",) if "phone" in self.kinds else ()


class FixTextTable(_Transform):
    """`[[transforms]] of kind fix_text`: repairs text that was decoded with a wrong encoding."""

    kind: Literal["fix_text"]
    mojibake: bool = True
    """Repair characters that were read in a wrong encoding: `cafÃ©` becomes `café`."""
    entities: bool = True
    """Replace HTML entities, such as `&amp;`, in texts without `<`."""

    @property
    def packages(self) -> tuple[str, ...]:
        return ("ftfy",)


class LicenceHeaderTable(_Transform):
    """`[[transforms]] of kind licence_header`: removes copyright and licence notices from the
    comments at the start of source code. Name the sources that have code."""

    kind: Literal["licence_header"]
    keep_spdx: bool = True
    """Keep lines with SPDX-License-Identifier."""


TransformTable = Annotated[
    Base64Table | RedactTable | FixTextTable | LicenceHeaderTable, Field(discriminator="kind")
]
