"""Settings that the configuration shares with the packages that read it.

They are in this module because the configuration is a lower layer than these packages and must not
import them.
"""

from pathlib import Path
from typing import Literal, NamedTuple

from loader.plan.settings import DEFAULT_TOKENIZER, TOKENIZER_FILES

DEFAULT_TOKENS_PER_SHARD = 500_000_000
ExpertChoice = Literal["auto", "decoded", "packed", "grouped", "hub", "int8"]
Dtype = Literal["auto", "uint32", "uint16"]
Engine = Literal["auto", "gigatoken", "quicktok", "reference"]
GraderKind = Literal["hydra", "student", "stacked"]
"""`hydra`: the judge, behind the probe; `student`; `stacked`: the mean of student and probe."""
TargetUnit = Literal["documents", "tokens"]
TargetBy = Literal["all", "source", "language"]
THRESHOLDS = ("tau_student", "tau_probe", "tau_drop", "tau_keep")
"""Fields of the thresholds of a calibration; older calibrations have no `tau_student`."""
GRADER_NAMES = {
    "hydra": "probe and judge",
    "student": "the student",
    "stacked": "student and probe together",
}


def last_grader(kind: object) -> str:
    """The name of the score that decides, for the `grader` of a summary; older summaries name
    none."""
    return {"student": "student", "stacked": "student and probe"}.get(str(kind), "judge")


def expert_fingerprints(choice: str) -> dict[str, str]:
    """Fingerprints of the MoE backend: empty for the model's default backends, which differ only in
    memory."""
    # The earlier name of the key `moe_backend`, which existing outputs contain.
    return {"experts": choice} if choice in ("grouped", "hub", "int8") else {}


class TokenizerSettings(NamedTuple):
    """The tokenizer, its tokens for the start and end of a document, and its engine."""

    name: str = DEFAULT_TOKENIZER
    """An encoding of tiktoken, a `tokenizer.json` or SentencePiece `.model` file, a directory with
    such a file, or a repository on the hub."""
    engine: Engine = "auto"
    eos_token: str | int = "auto"
    """The token that ends each document, by name or id; `auto`: the tokenizer's EOS."""
    bos_token: str | int = "none"
    """The token that starts each document; `auto`: the tokenizer's BOS; `none`: no token."""
    needs_eos: bool = True
    """Whether a tokenizer without an EOS is refused; a model that only reads text needs none."""

    @property
    def is_file(self) -> bool:
        """Whether the name is a file, a directory or a repository, not an encoding."""
        path = Path(self.name)
        is_named_so = "/" in self.name or Path(self.name).is_file()
        is_named_so = is_named_so or path.suffix in (".json", ".model")
        if is_named_so or not path.is_dir():
            return is_named_so
        return any((path / file).is_file() for file in TOKENIZER_FILES)

    @property
    def encoding(self) -> str:
        """The name of the encoding. A tokenizer file is named by the hash of its content."""
        return "file" if self.is_file else self.name
