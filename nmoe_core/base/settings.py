"""Settings that the configuration shares with the rooms that read it.

They are here because the configuration is a lower layer than those rooms and must not import them.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from loader.plan.settings import DEFAULT_TOKENIZER, TOKENIZER_FILES

DEFAULT_TOKENS_PER_SHARD = 500_000_000
ExpertChoice = Literal["auto", "decoded", "packed", "grouped", "hub"]
Dtype = Literal["auto", "uint32", "uint16"]
Engine = Literal["auto", "gigatoken", "quicktok", "reference"]
GraderKind = Literal["hydra", "student"]
TargetUnit = Literal["documents", "tokens"]
TargetBy = Literal["all", "source", "language"]
THRESHOLDS = ("tau_student", "tau_probe", "tau_drop", "tau_keep")
"""Fields of the thresholds of a calibration; older calibrations have no `tau_student`."""


def expert_fingerprints(choice: str) -> dict[str, str]:
    """Fingerprints of the way experts are multiplied: none for the model's own ways, which differ
    in memory alone."""
    # The first name of `moe_backend`, which outputs hold.
    return {"experts": choice} if choice in ("grouped", "hub") else {}


class TokenizerSettings(NamedTuple):
    """The tokenizer, its tokens at the ends of a document, and the engine that runs it."""

    name: str = DEFAULT_TOKENIZER
    """An encoding of tiktoken; or a `tokenizer.json`, a SentencePiece `.model`, the directory of
    one of them, or its repository on the hub."""
    engine: Engine = "auto"
    eos_token: str | int = "auto"
    """The token that ends each document, by name or id; `auto`: the tokenizer's own."""
    bos_token: str | int = "none"
    """The token that starts each document; `auto`: the tokenizer's own; `none`: there is none."""
    needs_eos: bool = True
    """Whether one that names no EOS is refused; a model reads text without."""

    @property
    def is_file(self) -> bool:
        """Whether the name is of a file, a directory or a repository, and not of an encoding."""
        path = Path(self.name)
        is_named_so = "/" in self.name or Path(self.name).is_file()
        is_named_so = is_named_so or path.suffix in (".json", ".model")
        if is_named_so or not path.is_dir():
            return is_named_so
        return any((path / file).is_file() for file in TOKENIZER_FILES)

    @property
    def encoding(self) -> str:
        """The name of an encoding. A file has its content for a name, which fingerprints hold."""
        return "file" if self.is_file else self.name
