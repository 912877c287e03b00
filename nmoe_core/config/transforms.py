"""`[[transforms]]`: how the text of documents is changed before it is tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from nmoe_core.base.strict import StrictModel
from nmoe_core.config.functions import FunctionKeys

# How a transform is applied does not change the text: these keys are no part of its identity.
_NOT_IN_TEXT = ("sources", "presets")


class _Transform(StrictModel):
    """Keys of every transform."""

    sources: tuple[str, ...] | None = None
    """Sources whose documents are changed. Not set: all sources."""
    keep_removed: bool = True
    """Keep the removed text beside the shard, so that `nmoe explain` shows the text before; the
    file is neither curated, exported nor published."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Packages whose versions may change the text, beside those that are always installed."""
        return ()

    def at(self, base: Path) -> Self:
        """The same with its paths resolved against a directory."""
        return self

    def identity(self) -> dict[str, Any]:
        """The values that decide what is changed and recorded."""
        return self.model_dump(mode="json", exclude=set(_NOT_IN_TEXT))

    @property
    def reads_corpus(self) -> bool:
        """Whether a change depends on other documents of the source."""
        return False

    @property
    def reads_columns(self) -> tuple[str, ...]:
        """Columns of the documents that decide."""
        return ()


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
    def libraries(self) -> tuple[str, ...]:
        return ("phonenumbers",) if "phone" in self.kinds else ()


class FixTextTable(_Transform):
    """`[[transforms]] of kind fix_text`: repairs text that was decoded with a wrong encoding."""

    kind: Literal["fix_text"]
    mojibake: bool = True
    """Repair characters that were read in a wrong encoding: `cafÃ©` becomes `café`."""
    entities: bool = True
    """Replace HTML entities, such as `&amp;`, in texts without `<`."""

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("ftfy",)


class LicenceHeaderTable(_Transform):
    """`[[transforms]] of kind licence_header`: removes copyright and licence notices from the
    comments at the start of source code. Name the sources that have code."""

    kind: Literal["licence_header"]
    keep_spdx: bool = True
    """Keep lines with SPDX-License-Identifier."""


def _require_phrase(text: str) -> str:
    if not text.strip() or "\n" in text:
        raise ValueError("a phrase must be a part of one line, and not blank")
    return text.strip()


Phrase = Annotated[str, AfterValidator(_require_phrase)]
_C4 = {
    "c4_max_word_chars": 1000,
    "c4_citations": True,
    "c4_min_words": 5,
    "c4_javascript": True,
    "c4_policy": True,
}
LINE_PRESETS: dict[str, dict[str, Any]] = {
    "c4": _C4 | {"c4_end_punctuation": True},
    "fineweb": _C4 | {"c4_min_words": 3},
    "refinedweb": {
        "refinedweb_max_upper": 0.5,
        "refinedweb_digits": True,
        "refinedweb_counter": True,
        "refinedweb_min_words": 2,
        "refinedweb_short_words": 10,
        "refinedweb_starts": ("sign-in", "sign in", "log in"),
        "refinedweb_ends": ("read more", "read more...", "read more…"),
        "refinedweb_anywhere": ("items in cart",),
    },
}


class LinesTable(_Transform):
    """`[[transforms]] of kind lines`: removes lines by rules. A rule is recorded under the name of
    its key. Blank lines are no lines."""

    kind: Literal["lines"]
    presets: tuple[Literal["c4", "fineweb", "refinedweb"], ...] = ()
    """Published rules: they set the keys below that are not set."""
    c4_max_word_chars: int = Field(default=0, ge=0)
    """Remove lines with a longer word. 0: keep them."""
    c4_citations: bool = False
    """Remove marks such as `[1]`, `[edit]` and `[citation needed]`; other rules do not see them."""
    c4_end_punctuation: bool = False
    """Remove lines that do not end a sentence or a quotation, or end with an ellipsis."""
    c4_min_words: int = Field(default=0, ge=0)
    """Remove lines of fewer words."""
    c4_javascript: bool = False
    """Remove lines that contain "javascript"."""
    c4_policy: bool = False
    """Remove lines that contain "terms of use", "privacy policy", "cookie policy", "uses cookies",
    "use of cookies" or "use cookies"."""
    refinedweb_max_upper: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Remove lines with a larger share of upper case among their characters. 0: keep them."""
    refinedweb_digits: bool = False
    """Remove lines of digits only."""
    refinedweb_counter: bool = False
    """Remove counters, such as "3 likes"."""
    refinedweb_min_words: int = Field(default=0, ge=0)
    """Remove lines of fewer words."""
    refinedweb_short_words: int = Field(default=10, ge=1)
    """Lines of at most so many words lose the phrases of the next three keys."""
    refinedweb_starts: tuple[Phrase, ...] = ()
    """Phrases at the start of a short line, such as "sign in"."""
    refinedweb_ends: tuple[Phrase, ...] = ()
    """Phrases at the end of a short line, such as "read more..."."""
    refinedweb_anywhere: tuple[Phrase, ...] = ()
    """Phrases anywhere in a short line, such as "items in cart"."""
    bad_starts: tuple[Phrase, ...] = ()
    """Remove lines that start with one of these phrases."""
    boilerplate_documents: int = Field(default=0, ge=0)
    """Remove lines that at least so many documents of a site have. 0: keep them."""
    site_column: str | None = None
    """A column with URLs: documents of one host are a site. Not set: the source is one site. The
    column must be among those of `[attributes]`."""

    @model_validator(mode="before")
    @classmethod
    def _with_presets(cls, values: Any) -> Any:
        """The keys of the presets below those that are set."""
        if not isinstance(values, dict) or not isinstance(values.get("presets", ()), (list, tuple)):
            return values
        shared: dict[str, Any] = {}
        for name in values.get("presets", ()):
            shared |= LINE_PRESETS.get(name, {})
        return shared | values

    @property
    def reads_corpus(self) -> bool:
        return self.boilerplate_documents > 0

    @property
    def reads_columns(self) -> tuple[str, ...]:
        is_by_site = self.reads_corpus and self.site_column is not None
        return (str(self.site_column),) if is_by_site else ()


class ParagraphsTable(_Transform):
    """`[[transforms]] of kind paragraphs`: of equal paragraphs in a split, the first is kept."""

    kind: Literal["paragraphs"]
    min_chars: int = Field(default=200, ge=1)
    """Shorter paragraphs are kept."""
    separator: Literal["blank_line", "line_end"] = "blank_line"
    """What separates paragraphs."""

    @property
    def reads_corpus(self) -> bool:
        return True


class PassagesTable(_Transform):
    """`[[transforms]] of kind passages`: of equal passages in a split, the first is kept."""

    kind: Literal["passages"]
    min_words: int = Field(default=50, ge=10)
    """Minimum number of equal consecutive words of a passage; shorter ones are kept."""

    @property
    def reads_corpus(self) -> bool:
        return True


class OwnTable(FunctionKeys, _Transform):
    """`[[transforms]] of kind function`: a change by a function of your own."""

    kind: Literal["function"]

    def identity(self) -> dict[str, Any]:
        return {key: value for key, value in self.made_with.items() if key not in _NOT_IN_TEXT}

    @property
    def reads_columns(self) -> tuple[str, ...]:
        return self.reads


TransformTable = Annotated[
    Base64Table
    | RedactTable
    | FixTextTable
    | LicenceHeaderTable
    | LinesTable
    | ParagraphsTable
    | PassagesTable
    | OwnTable,
    Field(discriminator="kind"),
]
