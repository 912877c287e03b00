"""Removes the objects of a bucket that no list names: earlier versions of files, and what killed
writers sent. Nothing younger than a day is removed, since its writer may still be working."""

from datetime import UTC, datetime, timedelta
from typing import Any

from loader.files.addresses import join
from loader.files.stores import store
from loader.files.stores.objects import LIST_NAME, LISTS, OWN, is_version, read_list
from nmoe_core.base.bucket.bucket import LEASES, Bucket
from nmoe_core.base.bucket.lease import EXPIRE_S
from nmoe_core.base.bucket.pieces import DRAFTS
from nmoe_core.base.errors import LockedError

LEAST_AGE = timedelta(days=1)


def collect(bucket: Bucket, *, is_dry: bool = True) -> dict[str, Any]:
    """Remove objects that no list names, drafts of files that nobody continued, and leases of dead
    writers, all older than a day. Other objects below the URL stay, such as published plans.

    Returns `objects` and `bytes` (with `is_dry`: of what would be removed), `kept_objects`, and
    `is_dry_run`. Raises LockedError if a writer holds a lease (E-LOCKED), FormatError if a list is
    damaged (E-LIST), and PlanError if the store does not answer (E-STORE).
    """
    _refuse_writers(bucket)
    now = datetime.now(UTC)
    named, directories = _named(bucket)
    found: list[store.Listed] = []
    num_kept = 0
    for one in store.listing(bucket.url):
        is_own = one.path.startswith((f"{DRAFTS}/", f"{LEASES}/"))
        is_object = not one.path.startswith(f"{OWN}/") and _is_ours(one.path, directories)
        if (is_own or (is_object and one.path not in named)) and now - one.modified >= LEAST_AGE:
            found.append(one)
        else:
            num_kept += is_object
    if not is_dry:
        _refuse_writers(bucket)
        named, _ = _named(bucket)  # a writer may have named an object again
        found = [one for one in found if one.path not in named]
        for one in found:
            store.remove(join(bucket.url, one.path))
    return {
        "is_dry_run": is_dry,
        "objects": len(found),
        "bytes": sum(one.size_bytes for one in found),
        "kept_objects": num_kept,
        "root": bucket.url,
    }


def _named(bucket: Bucket) -> tuple[set[str], set[str]]:
    """The objects that lists name, and the directories that have a list."""
    named: set[str] = set()
    directories: set[str] = set()
    for one in store.listing(join(bucket.url, LISTS)):
        if not one.path.endswith(LIST_NAME):
            continue
        url = join(bucket.url, f"{LISTS}/{one.path}")
        content = store.read_bytes(url)
        if content is not None:
            named.update(entry.object for entry in read_list(content, url).files.values())
            directories.add(one.path.rpartition("/")[0])
    return named, directories


def _is_ours(path: str, directories: set[str]) -> bool:
    """Whether an object has the name of a file's version, in a directory that has a list."""
    return path.rpartition("/")[0] in directories and is_version(path)


def _refuse_writers(bucket: Bucket) -> None:
    now = datetime.now(UTC)
    for lease in store.listing(join(bucket.url, LEASES)):
        if (now - lease.modified).total_seconds() < EXPIRE_S:
            raise LockedError(
                "a process is writing to this run",
                where=bucket.url,
                found=f"lease of {lease.path.removesuffix('.json')}",
                do="run this command again when no task is running",
            )
