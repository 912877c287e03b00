"""`nmoe publish`, `nmoe gc` and `nmoe explain --plan`: publish to an object store, remove what a
run in a bucket does not need, and explain a published plan."""

import argparse
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.flags import add_run_flags, path_or_url, run_of
from nmoe_core.cli.output import add_verb, size


def register(verbs: Any) -> None:
    text = "copy a loader plan or a manifest, and all its files, to a store"
    publish = add_verb(verbs, "publish", run_publish, text, _show_published)
    publish.description = (
        "Send changed files, then manifests, then the plan; run it again to resume an interrupted "
        "upload. The loader, verify, info and explain accept the URL."
    )
    publish.add_argument("path", type=path_or_url, metavar="PLAN|MANIFEST")
    publish.add_argument("url", metavar="URL", help="s3://, gs://, az://, http(s):// or file://")
    publish.add_argument(
        "--dry-run", action="store_true", help="only print which files would be sent"
    )

    text = "remove what the run's bucket does not need: earlier versions of files"
    collect = add_verb(verbs, "gc", run_gc, text, _show_collected)
    collect.description = (
        "Removes objects that no file of the run has any more, if they are older than a day. "
        "Without --apply it only counts them. Run it when no task is running."
    )
    collect.add_argument("--apply", action="store_true", help="remove them")
    add_run_flags(collect, is_required=True)


def run_gc(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect the objects of the run's bucket; return the facts. Raises ConfigError if the root is
    not a bucket (E-CONFIG-ROOT)."""
    from nmoe_core.base.bucket.gc import collect

    bucket = run_of(arguments).bucket
    if bucket is None:
        raise ConfigError(
            "the run's root is not a bucket",
            where="gc",
            expected='root = "s3://..."',
            do="nothing: a run on a disk keeps no objects that it does not need",
            code="E-CONFIG-ROOT",
        )
    return collect(bucket, is_dry=not arguments.apply)


def _show_collected(facts: dict[str, Any]) -> None:
    word = "would be removed (--apply removes them)" if facts["is_dry_run"] else "removed"
    print(
        f"{facts['root']}: {facts['objects']:,} objects, {size(facts['bytes'])}, {word};"
        f" {facts['kept_objects']:,} are kept"
    )


def run_publish(arguments: argparse.Namespace) -> dict[str, Any]:
    """Publish a plan or manifest; return the facts."""
    from nmoe_core.shards.publish.send import publish
    from nmoe_core.tasks.takedown.left import require_none_left

    require_none_left(arguments.path)
    made = publish(arguments.path, arguments.url, is_dry=arguments.dry_run)
    return {"is_dry_run": arguments.dry_run, "digest": made.digest, **made.facts}


def _show_published(facts: dict[str, Any]) -> None:
    sent = f"{facts['files_sent']:,} files, {size(facts['bytes_sent'])}"
    whole = f"{facts['files']:,} files, {size(facts['bytes'])}"
    replaced = f", {facts['files_replaced']:,} replaced" * bool(facts["files_replaced"])
    word = "to send" if facts["is_dry_run"] else "sent"
    print(f"{facts['url']}: {sent} {word}{replaced}, of {whole}")


def explain_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Explain a step of a plan, without the run's configuration."""
    from nmoe_core.audit.published import explain_step_of

    if arguments.step is None or arguments.settings:
        do = "give --step; or give --config instead of --plan to trace a document"
        raise ConfigError("with --plan only steps can be explained", where="--plan", do=do)
    return explain_step_of(arguments.plan, arguments.cache_dir, arguments.step, arguments.row)
