"""The documents of a step of a plan that is given by path or URL, without the directory of the
run."""

import os
from pathlib import Path

from loader.files.addresses import address, is_url, join, parent
from loader.files.format import MANIFEST_NAME, check_digest, load_manifest, resolve_inside
from loader.files.locks import locked
from loader.files.nested import json_value
from loader.files.stores import objects
from loader.plan.file import PlanFile
from loader.plan.records import LoaderPlan
from loader.plan.remote import fetch_plan
from nmoe_core.audit.lineage import Facts, explain_step
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import local_digest
from nmoe_core.config.run import Run
from nmoe_core.shards.publish.pieces import manifest_files


def explain_step_of(plan: str, cache_dir: str | None, step: int, row: int | None) -> Facts:
    """`explain_step` of a plan by its path or URL, without a run: labels are left out. For a URL,
    the ids and lineage of the shards that the step reads are downloaded beside the data. Raises as
    `explain_step` and `fetch_plan`."""
    if not is_url(plan):
        path = Path(plan).absolute()
        return explain_step(Run(None, {"root": str(path.parent)}, {"plan": path}), step, row)
    path = fetch_plan(plan, cache_dir)
    url = address(plan)
    root = path.parent
    base = join(parent(url), _plan_at(url).root)

    def at_hand(directory: Path) -> None:
        beside = join(base, directory.relative_to(root).as_posix())
        _fetch(beside, directory / MANIFEST_NAME, None)
        for name, checksum in manifest_files(load_manifest(directory / MANIFEST_NAME)).items():
            _fetch(beside, resolve_inside(directory, name), checksum)

    return explain_step(Run(None, {"root": str(root)}, {"plan": path}), step, row, at_hand)


def _plan_at(url: str) -> LoaderPlan:
    try:
        value = json_value(objects.read_bytes(url) or b"null")
    except ValueError:
        value = None
    return PlanFile(value, url).plan()


def _fetch(directory: str, local: Path, checksum: str | None) -> None:
    """Copy a file from a store to its local path, unless it exists there with this checksum."""
    with locked(local.with_name(".lock")):
        if checksum is not None and local.is_file() and local_digest(local) == checksum:
            return
        url = join(directory, local.name)
        part = local.with_name(f"{local.name}.part")
        if not objects.copy(url, part):
            do = "publish the run again"
            raise FormatError("file is missing", where=url, do=do, code="E-SHARD-MISSING")
        if checksum is not None:
            check_digest(part, checksum, "E-SHARD-CHECKSUM", url)
        os.replace(part, local)
