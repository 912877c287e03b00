"""`nmoe init --update`: adds new files and sources to the configuration of a project."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from loader.files.regular import read_file
from loader.plan.mixture import resolve_stages
from loader.plan.tables import read_toml
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import ConfigError, SourceError
from nmoe_core.base.strict import validate
from nmoe_core.cli.project.config_text import source_text
from nmoe_core.cli.project.ledger import last_ledger
from nmoe_core.cli.project.survey import Survey, survey_all
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_stages
from nmoe_core.sources.discover import InputFile, Inputs, Use, discover, relative
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.sources.storage import is_url, path_text

_GONE = "no longer named by the configuration"
_EXCLUDED = "excluded by the configuration"


def new_inputs(run: Run, named: str, subset: str | None) -> Inputs:
    """The inputs at a path, limited to sources that the run lacks. Leaves out files that an earlier
    survey took but the user has since removed from the configuration."""
    tables = read_toml(run.required("mixture_toml"))["mixtures"]
    rows = [table for mixture in tables.values() for table in mixture["sources"]]
    specs = {table["id"]: validate(SourceSpec, table, run.path) for table in rows}
    known = {path: file for spec in specs.values() for path, file in _known(spec, run.base)}
    before = {row["path"]: row for row in last_ledger(run)["files"]}
    for name, row in before.items():
        path = Path(os.path.abspath(run.base / name))
        if row["use"] in ("train", "valid") and path not in known:
            known[path] = InputFile(path, name, 0, "left out", _GONE)
    found = discover(named, run.base, subset, known, specs)
    for file in found.files:
        if (other := known.get(file.path)) is not None:
            file.use = other.use
            file.source = other.source
            file.reason = other.reason
            row = before.get(path_text(Path(relative(file.path, run.base))), {})
            if row.get("use") == "left out" and row["size_bytes"] == file.size_bytes:
                file.leave_out(row["reason"])
    datasets = {(spec.hf_dataset, spec.hf_subset) for spec in specs.values() if spec.hf_dataset}
    new = [spec for spec in found.specs if (spec.hf_dataset, spec.hf_subset) not in datasets]
    return Inputs(new, found.files)


def _known(spec: SourceSpec, base: Path) -> Iterator[tuple[Path, InputFile]]:
    """Yield the local files that a source's patterns match, each with its use (training or held
    out)."""
    both: list[tuple[Use, tuple[str, ...]]] = [("train", spec.paths), ("valid", spec.valid_paths)]
    for use, patterns in both:
        patterns = [pattern for pattern in patterns if not is_url(pattern)]
        kept = None
        with suppress(SourceError):  # if a file is missing, keep the others
            files = find_files(patterns, base, spec.exclude)
            kept = {os.path.abspath(file.path) for file in files}
        for pattern in patterns:
            with suppress(SourceError):
                for found in find_files([pattern], base):
                    path = Path(os.path.abspath(found.path))
                    file = InputFile(path, found.name, 0, use, source=spec.id)
                    if kept is not None and os.fspath(path) not in kept:
                        file.leave_out(_EXCLUDED)
                    yield path, file


def add_sources(run: Run, inputs: Inputs, workers: int) -> list[Survey]:
    """Survey the sources of `inputs` and append the readable ones to the file with the run's
    mixture. Raises ConfigError (E-CONFIG) if that file does not belong to the project, or the
    sources cannot be added."""
    found = survey_all(inputs, run.base, workers)
    path = Path(run.required("mixture_toml"))
    mixture = run_stages(run)[0].mixture
    added = [source_text(one, mixture) for one in found if one.problem is None]
    if not added:
        return found
    old = read_file(path)
    new = old.rstrip(b"\n") + "\n".join(["", *added]).encode()
    with tempfile.TemporaryDirectory() as aside:
        tried = Path(aside, path.name)
        tried.write_bytes(new)
        flows = Path(run.required("flow_profiles_toml"))
        try:
            if not path.is_relative_to(run.base):
                raise ConfigError("the mixture is in another directory", where=path)
            flows = tried if flows == path else flows
            resolve_stages(tried, flows, run.required("flow_mode"), run.loader.active_params_b)
        except ConfigError as error:
            raise ConfigError(
                f"the new sources cannot be added: {error}".replace(str(tried), str(path)),
                found=", ".join(one.spec.id for one in found if one.problem is None),
                do=f"add them by hand:{''.join(added)}",
            ) from error
    write_bytes(path, new)
    return found
