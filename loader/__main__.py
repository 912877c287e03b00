"""`python -m loader`: show a plan, check its data, and compare streams between machines.

`peek` prints how much of each source each stage reads, and the rows of one batch with their sources
(as text, if you give a vocabulary file); `fingerprint` prints a digest of the first batches:
machines that read the same stream print the same digest; `verify` reads every file, compares
checksums and looks for token ids outside the vocabulary; `blocks` writes the checksum of each MiB,
which streaming from a store needs; `verify-remix` recomputes the certificate of an edited plan from
both plans.

PLAN is a plan's JSON file, its URL with --cache-dir, or a run's TOML file. Exit status: 0 success,
1 error (one line), 2 wrong usage.
"""

import argparse
import base64
import binascii
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from loader.config import resolve_plan
from loader.edits.certificate import Certificate, verify_certificate
from loader.errors import ConfigError, FormatError, NmoeError, printable
from loader.files.addresses import PathParser
from loader.files.blocks import write_blocks
from loader.files.format import verify_shard
from loader.files.regular import read_file
from loader.files.shard import open_shard
from loader.loader import DeterministicLoader
from loader.plan import check as preflight
from loader.plan.records import LoaderPlan
from loader.plan.settings import CROPPED
from loader.rows.stream import Split, Stream


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        for line in arguments.command(arguments.open(arguments), arguments):
            print(printable(line), flush=True)
    except NmoeError as error:
        print(error.line(), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ERROR [E-IO]: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def fingerprint(plan: LoaderPlan, num_steps: int) -> tuple[str, int]:
    """SHA-256 over the first batches in global order, and the number of these batches.

    Each batch adds its inputs, then its targets, as little-endian int64. World size does not
    matter.
    """
    digest = hashlib.sha256()
    done = 0
    with DeterministicLoader(plan, 0, 1, backend="numpy") as loader:
        for batch in islice(loader, num_steps):
            for part in batch:
                digest.update(part.astype("<i8").tobytes())
            done += 1
    return digest.hexdigest(), done


def _peek(plan: LoaderPlan, arguments: argparse.Namespace) -> Iterator[str]:
    with closing(Stream(plan, "train")) as stream:
        num_steps = stream.num_sequences // plan.batch_size
        steps = min(arguments.steps, num_steps)
        first = dict(
            zip(stream.source_names, stream.schedule.counts_before(steps * plan.batch_size))
        )
        passes = dict(zip(stream.source_names, stream.schedule.passes))
        cropped = stream.cropped() if plan.packing == CROPPED else []
    yield f"plan {plan.plan_id} {plan.plan_hash}"
    yield (
        f"{plan.policy}, {num_steps} steps of {plan.batch_size} x {plan.seq_len} tokens,"
        f" stride {plan.window_stride}, on_exhaust {plan.on_exhaust}, {plan.tokenizer}"
    )
    read_as = "tokens with padding" if plan.twins else "tokens"
    rows = [("stage", "source", "weight %", "sequences", read_as, "epochs", f"in {steps} steps")]
    seen: Counter[str] = Counter()
    for stage in plan.stages:
        total = sum(source.weight for source in stage.sources)
        for source in stage.sources:
            taken = source.num_sequences
            # Over all stages so far, since a source continues from stage to stage.
            seen[source.name] += taken
            limit = plan.epoch_limit(source.max_epochs)
            epochs = f"{seen[source.name] * passes[source.name]:.3f}"
            epochs += f" of {limit}" * (limit > 1)
            weight = f"{100 * source.weight / total:.4f}"
            tokens = str(taken * plan.seq_len)
            read = str(first[source.name])
            rows.append((stage.name, source.name, weight, str(taken), tokens, epochs, read))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
        yield "  ".join(left + right)
    for source, tokens in zip(plan.sources, cropped):
        yield f"cropped: {tokens} of the {source.num_tokens} tokens of {source.name} are in no row"
    yield from (f"valid: {source.name}, {source.num_tokens} tokens" for source in plan.valid)
    if arguments.rows:
        yield from _batch(plan, arguments)


def _batch(plan: LoaderPlan, arguments: argparse.Namespace) -> Iterator[str]:
    """Rows of the batch after `--steps`, with one line per document."""
    vocabulary = None if arguments.vocab is None else read_vocabulary(arguments.vocab)
    with DeterministicLoader(plan, 0, 1, backend="numpy") as loader:
        if arguments.steps >= loader.num_steps:
            yield f"no batch after step {loader.num_steps}: the plan ends there"
            return
        loader.seek_step(arguments.steps)
        batch = loader.next_with_meta()
    yield f"step {arguments.steps}, lr_scale {batch.lr_scale:g}"
    for row in range(min(arguments.rows, len(batch.inputs))):
        name = batch.source_names[batch.source_index[row]]
        yield f"sequence {batch.sequence_index[row]} of {name}"
        spans = [(0, plan.seq_len)]
        if batch.document_spans is not None:
            spans = batch.document_spans[row].tolist()
        for start, end in spans:
            shown = batch.inputs[row, start:end][: arguments.tokens].tolist()
            text = " ".join(map(str, shown))
            if vocabulary is not None:
                text = repr(decode(shown, vocabulary))
            yield f"  {start}-{end}: {text}{' ...' * (len(shown) < end - start)}"


def _fingerprint(plan: LoaderPlan, arguments: argparse.Namespace) -> Iterator[str]:
    digest, done = fingerprint(plan, arguments.steps)
    yield f"{digest}  first {done} steps"


def _verify(plan: LoaderPlan, _: argparse.Namespace) -> Iterator[str]:
    splits: tuple[Split, ...] = ("train", "valid") if plan.valid else ("train",)
    for split in splits:
        DeterministicLoader(plan, 0, 1, split, backend="numpy").close()
        for source in plan.sources if split == "train" else plan.valid:
            manifest = preflight.open_data(plan, source)
            for entry in manifest.shards:
                verify_shard(manifest, entry)
                _verify_ids(plan, manifest.shard_path(entry))
            yield f"ok {split} {source.name}: {manifest.num_shards} shards"
    yield f"ok plan {plan.plan_hash}"


def _verify_ids(plan: LoaderPlan, path: Path) -> None:
    largest = int(open_shard(path).max(initial=0))
    if largest >= plan.vocab_size:
        raise FormatError(
            "a token id is not in the vocabulary",
            where=path,
            found=largest,
            expected=f"below vocab_size = {plan.vocab_size}",
            do="prepare this source again with the plan's tokenizer",
            code="E-SHARD-FORMAT",
        )


def _blocks(plan: LoaderPlan, _: argparse.Namespace) -> Iterator[str]:
    for source in {source.manifest: source for source in (*plan.sources, *plan.valid)}.values():
        yield f"wrote {write_blocks(preflight.open_data(plan, source))}"


def _verify_remix(certificate: Certificate, _: argparse.Namespace) -> Iterator[str]:
    before = certificate.before
    after = certificate.after
    for row in certificate.windows:
        read = row.edit - row.start
        to_read = row.stop - row.edit
        yield f"ok {row.source}: {read} windows before step {certificate.step}, {to_read} after"
    yield f"ok plan {after.plan_hash} continues {before.plan_hash} from step {certificate.step}"


def read_vocabulary(path: Path) -> dict[int, bytes]:
    """Bytes of each token id, from a file whose lines have a token in base64, a space and its id.
    Raises ConfigError."""
    found: dict[int, bytes] = {}
    try:
        lines = read_file(path).splitlines()
    except OSError as error:
        raise ConfigError(
            "cannot read the vocabulary file", where=path, found=error.strerror
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            token, token_id = line.split()
            found[int(token_id)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            raise ConfigError(
                "not a vocabulary file",
                where=f"{path}:{number}",
                found=repr(line[:40]),
                expected="a token in base64, a space and its id",
            ) from None
    return found


def decode(tokens: Iterable[int], vocabulary: Mapping[int, bytes]) -> str:
    """Text of tokens; an id that is not in the vocabulary is shown as `<|id|>`."""
    parts = (vocabulary.get(token, b"<|%d|>" % token) for token in tokens)
    return b"".join(parts).decode("utf-8", "replace")


def _parser() -> argparse.ArgumentParser:
    parser = PathParser(prog="python -m loader", description="Show and check a loader plan.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text, steps in (
        ("peek", _peek, "show how much of each source each stage reads, and rows of a batch", 0),
        ("fingerprint", _fingerprint, "print a digest of the first batches", 10),
        ("verify", _verify, "read every file and compare checksums", None),
        ("blocks", _blocks, "write the block checksums that streaming from a store needs", None),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("plan", metavar="PLAN", help="plan JSON, or a run's TOML")
        if steps is not None:
            sub.add_argument("--steps", type=_count, default=steps, metavar="N")
        sub.add_argument(
            "--cache-dir", metavar="DIR", help="directory for local copies, if PLAN is a URL"
        )
        sub.set_defaults(command=command, open=lambda own: resolve_plan(own.plan, own.cache_dir))
        if name == "peek":
            sub.add_argument(
                "--rows", type=_count, default=4, help="number of rows of the next batch to show"
            )
            sub.add_argument(
                "--tokens", type=_count, default=40, help="number of tokens to show per document"
            )
            sub.add_argument(
                "--vocab", type=Path, metavar="FILE", help="a .tiktoken file, to show text"
            )
    text = "recompute the certificate of a remix, and compare"
    sub = commands.add_parser("verify-remix", help=text, description=text)
    sub.add_argument("certificate", type=Path, metavar="CERT", help="file that `nmoe remix` wrote")
    sub.set_defaults(command=_verify_remix, open=lambda own: verify_certificate(own.certificate))
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
