"""Twin plans: one corpus in two tokenizers, read in the same order by two runs, step by step."""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from loader.errors import ConfigError, PlanError
from loader.plan import check as preflight
from loader.plan.build import source_data
from loader.plan.datasets import locate, split_dirs, valid_manifests
from loader.plan.records import LoaderPlan, PlanSource, TwinData
from loader.plan.settings import Vocabulary
from loader.rows.stream import Stream


def twin(plan: LoaderPlan, sources: Mapping[str, str | Path], seq_len: int) -> LoaderPlan:
    """The plan that reads the text of `plan` in another tokenizer: each row holds the text of the
    same row of `plan`, cut inside a document in proportion to its tokens, and then padding.

    So weights, order, shuffles, steps and ranks are those of `plan`, and both runs have read the
    same documents after any number of sequences, to within one window. sources: for each source of
    the plan its directory or manifest in the other tokenizer: the same documents in the same order.
    seq_len: tokens of a row, at least those of the longest text of a window. A source's valid split
    is that beside it. Writes nothing.

    Raises:
        ConfigError: Sources are not those of the plan, or the plan packs, masks, follows another
            run, or wraps in the middle of a window.
        PlanError: The documents are others (E-PLAN-DATA), or `seq_len` is too small (E-PLAN-TWIN).
        FormatError: A source has no index.
    """
    where = f"twin of {plan.plan_id}"
    names = [source.name for source in plan.sources]
    if set(names) != set(sources):
        found = ", ".join(sorted(sources))
        raise ConfigError("not the plan's sources", where=where, found=found, expected=str(names))
    if plan.packing != "concat" or plan.masked or plan.consumed or plan.wraps_tokens:
        raise ConfigError(
            "a plan of this kind has no twin",
            where=where,
            expected="packing = 'concat', no mask, no counts of another run, and no on_exhaust ="
            " 'wrap' without shuffle",
        )
    splits = {name: split_dirs(Path(os.path.abspath(path))) for name, path in sources.items()}
    paths = {name: locate(train, False) for name, (train, _) in splits.items()}
    valids = valid_manifests({name: valid for name, (_, valid) in splits.items() if valid})
    base = os.path.commonpath([plan.base, *(path.parent for path in paths.values())])
    moved = plan.moved_to(Path(base))
    loaded = {
        path: preflight.read_data(path, Vocabulary())
        for path in (*paths.values(), *valids.values())
    }
    named = [(name, loaded[path]) for name, path in (*paths.items(), *valids.items())]
    agreed = preflight.agreed_vocabulary(named, Vocabulary())
    own = {name: source_data(name, moved.base, path, loaded[path]) for name, path in paths.items()}

    def of_stage(source: PlanSource) -> PlanSource:
        new = own[source.name]
        return replace(
            source, manifest=new.manifest, content_hash=new.content_hash, num_tokens=new.num_tokens
        )

    after = replace(
        moved,
        **agreed._asdict(),
        packing="twin",
        seq_len=seq_len,
        stages=tuple(replace(s, sources=tuple(map(of_stage, s.sources))) for s in moved.stages),
        valid=tuple(source_data(n, moved.base, p, loaded[p]) for n, p in valids.items()),
        twins=tuple(
            TwinData(s.name, s.manifest, s.content_hash, s.num_tokens, plan.seq_len, plan.stride)
            for s in moved.sources
        ),
    )
    preflight.check_plan(after, where)
    with closing(Stream(after, "train")) as stream, closing(Stream(plan, "train")) as other:
        if stream.capacities != other.capacities:
            raise PlanError("the twin has other windows", where=where, code="E-PLAN-DATA")
    return after
