"""Fits the student on merged labels, and reads and writes `hydra_student.safetensors`.

The file is built like a head file: a checksummed header, float16 weights (2.6 MB), and the
student's scores of val and test, with which heads are compared. It holds no token ids: scoring
needs only the file and the bytes of the tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nmoe_core.base.atomic import replacing
from nmoe_core.base.errors import HeadError
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.tree import STUDENT_NAME
from nmoe_core.labels.label_files import Labels
from nmoe_core.labels.slices import source_manifest
from nmoe_core.quality.few_labels import Curve, samples
from nmoe_core.quality.heads import STUDENT_CODE
from nmoe_core.quality.heads.head_files import (
    CONTENTS_KEY,
    HEAD_FORMAT,
    HEADER_KEY,
    Header,
    bad_format,
    current_header,
    read_head,
    result_of,
    scale_of_head,
    write_tensors,
)
from nmoe_core.quality.heads.labelled import Labelled
from nmoe_core.quality.heads.ngrams import NUM_COLUMNS, NUM_SCALARS, TokenTable
from nmoe_core.quality.heads.scores import Corpus, DocumentTokens
from nmoe_core.quality.heads.student import Student, fit_student
from nmoe_core.text.tokenizer import Tokenizer

FEATURES = "1- and 2-grams of BLAKE2b-8 of token bytes by SplitMix64, roots of counts; 4 scalars"
_SCALARS = ("scalar_mean", "scalar_deviation")
_SHAPES = {"weights": (NUM_COLUMNS + NUM_SCALARS,), "bias": ()}  # and the number of scores
_SHAPES |= dict.fromkeys(_SCALARS, (NUM_SCALARS,))


class LoadedStudent(NamedTuple):
    """A student, the header of its file, the digests of its training documents, its scores of val
    and test by split, and the scores of val by students of fewer labels, by their number."""

    student: Student
    header: Header
    train_contents: np.ndarray
    scores: dict[str, np.ndarray]
    curve: dict[int, np.ndarray]


def token_table(tokenizer: Tokenizer) -> TokenTable:
    """The table of a tokenizer's tokens that the student reads."""
    return TokenTable.of(tokenizer.reference.spellings(), tokenizer.vocab_size)


def student_fingerprints(labelled: Labelled, corpus: Corpus, tokenizer: Tokenizer) -> Fingerprints:
    """Fingerprints of the student that these labels give."""
    return {
        "code": STUDENT_CODE,
        **labelled.fingerprints(corpus),
        "tokenizer": tokenizer.fingerprint,
        "settings": sha256_json({"max_ctx": corpus.max_ctx}),
    }


def make_student(
    labels: Mapping[str, Path | None],
    corpus: Corpus,
    tokenizer: Tokenizer,
    heads_dir: Path,
    use_salvaged: bool = False,
) -> Result:
    """Fit the student and write it with its card, unless the existing student is current.

    `labels` are merged files by split. The student reads `corpus.max_ctx` tokens per document,
    which should be as many as the oracle read. The facts of the result are the same as for a head's
    training. Raises as `Labelled`, and HeadError if the shards have another tokenizer
    (E-HEAD-TOKENIZER).
    """
    labelled = Labelled(labels, use_salvaged)
    path = heads_dir / STUDENT_NAME
    require_tokenizer(corpus.data_root, labelled.sources, tokenizer)
    fingerprints = student_fingerprints(labelled, corpus, tokenizer)
    header = current_header(path, fingerprints)
    if header is not None:
        return result_of(path, header)
    train = labelled.train
    table = token_table(tokenizer)
    with replacing(path, path.with_suffix(".md")):
        documents = corpus.read(train.doc_ids)
        student = fit_student(documents.tokens, train.scores, table, train.scale)
        scores: dict[str, np.ndarray] = {}

        def predict(split: str, labels: Labels, documents: DocumentTokens) -> np.ndarray:
            scores[split] = student.predict(documents.tokens, table)
            return scores[split]

        curve: dict[int, np.ndarray] = {}

        def fit_few(val: DocumentTokens) -> Curve:
            for num, rows in samples(len(train.doc_ids)).items():
                tokens = [documents.tokens[i] for i in rows.tolist()]
                fitted = fit_student(tokens, train.scores[rows], table, train.scale)
                curve[num] = fitted.predict(val.tokens, table)
            every = {**curve, len(train.doc_ids): scores["val"]}
            return {num: {"student": given} for num, given in every.items()}

        reported = labelled.report(corpus, documents, predict, curve=fit_few)
        header = {
            "format": HEAD_FORMAT,
            "arch": {"kind": "student", "features": FEATURES},
            "max_ctx": corpus.max_ctx,
            "tokenizer": tokenizer.name,
            "labels_digest": train.digest,
            "labels": labelled.digests,
            **train.scorer._asdict(),
            **train.scale.in_file(),
            "settings": {"penalty": student.penalty},
            **reported.figures,
            "training": {
                "num_documents": len(train.doc_ids),
                "num_salvaged_left_out": train.num_salvaged,
                "use_salvaged": use_salvaged,
            },
            "fingerprints": fingerprints,
        }
        arrays = {f"scores/{split}": values for split, values in scores.items()}
        arrays |= {f"curve/{num}": values for num, values in curve.items()}
        _write(path, student, header, reported.contents, arrays)
    return result_of(path, header)


def load_student(path: Path) -> LoadedStudent:
    """Read a student's file. Raises HeadError as `read_head`, and if the tensors are not the
    tensors of a student (E-HEAD-FORMAT) or not finite (E-HEAD-NONFINITE)."""
    header, arrays = read_head(path)
    kind = header["arch"].get("kind") if isinstance(header.get("arch"), dict) else None
    shapes = {name: arrays[name].shape for name in _SHAPES if name in arrays}
    wanted = {name: (*shape, *shapes.get("bias", ())) for name, shape in _SHAPES.items()}
    if kind != "student" or shapes != wanted | {n: _SHAPES[n] for n in _SCALARS}:
        raise bad_format(path, f"kind {kind}, tensors {shapes}")
    own = [np.ascontiguousarray(arrays[name], np.float64) for name in _SHAPES]
    if not all(np.isfinite(values).all() for values in own):
        raise HeadError("weights are not finite", where=path, code="E-HEAD-NONFINITE")
    scale = scale_of_head(path, header, len(own[1]))
    student = Student(*own, penalty=float(header["settings"]["penalty"]), scale=scale)
    parts = [(*name.partition("/"), value) for name, value in arrays.items()]
    splits = {name: value for kind, _, name, value in parts if kind == "scores"}
    curve = {int(name): value for kind, _, name, value in parts if kind == "curve"}
    return LoadedStudent(student, header, arrays[CONTENTS_KEY], splits, curve)


def student_beside(heads_dir: Path, digests: Fingerprints) -> LoadedStudent | None:
    """The student in a directory of heads, if it was fitted and reported on the labels with these
    digests."""
    path = heads_dir / STUDENT_NAME
    found = load_student(path) if path.is_file() else None
    return found if found is not None and found.header.get("labels") == digests else None


def require_tokenizer(data_root: Path, sources: list[str], tokenizer: Tokenizer) -> None:
    """Check that the shards were made with this tokenizer: ids of another tokenizer mean other
    tokens. Raises HeadError (E-HEAD-TOKENIZER)."""
    for source in sources:
        found = source_manifest(data_root, source).extra.get("tokenizer_fingerprint")
        if found and found != tokenizer.fingerprint:
            raise HeadError(
                "the shards have another tokenizer than the run",
                where=data_root / source,
                found=f"tokenizer {found}",
                expected=f"{tokenizer.fingerprint} ({tokenizer.name})",
                do="set the tokenizer of the shards: key tokenizer, or --tokenizer",
                code="E-HEAD-TOKENIZER",
            )


def _write(
    path: Path,
    student: Student,
    header: Header,
    contents: np.ndarray,
    scores: Mapping[str, np.ndarray],
) -> None:
    arrays = {"weights": student.weights.astype(np.float16), "bias": student.bias}
    arrays |= {name: getattr(student, name) for name in _SCALARS}
    arrays |= {CONTENTS_KEY: np.unique(contents)}
    write_tensors(path, arrays | dict(scores), HEADER_KEY, header, has_card=True)
