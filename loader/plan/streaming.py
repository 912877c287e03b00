"""Plans in a store: copies the files that are needed before the first step.

If the tokens stay in the store, these files are the plan, its manifests and the checksums of the
tokens' blocks; `loader.files.block_files` reads the tokens.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from loader.errors import ConfigError, FormatError
from loader.files.addresses import join
from loader.files.block_files import StoreData
from loader.files.blocks import blocks_name, read_blocks
from loader.files.format import Manifest, load_manifest, resolve_inside
from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from loader.plan.remote import fetch_manifests, fetch_plan, fetch_whole, in_parallel
from loader.plan.schedule import SHUFFLED_TOKENS


def open_stored(url: str, cache_dir: str | Path | None, cache_bytes: int | None) -> LoaderPlan:
    """The plan at a URL, with its files in the cache. cache_bytes: None to copy all tokens first;
    else tokens are read in blocks, through a cache of at most this size. Raises as `fetch_plan` and
    `load_plan`; with `cache_bytes` also ConfigError if windows are shuffled and the cache is too
    small for all of them, and FormatError if a manifest has no blocks (E-BLOCKS)."""
    if cache_bytes is None:
        return load_plan(fetch_plan(url, cache_dir))
    fetch = partial(in_parallel, _fetch_blocks)
    local, root, cache = fetch_manifests(url, cache_dir, fetch)
    plan = load_plan(local)
    _require_room(plan, cache_bytes)
    readers = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return replace(plan, store=StoreData(root, cache / "blocks", cache_bytes, readers))


def _require_room(plan: LoaderPlan, cache_bytes: int) -> None:
    num_bytes = 0
    for source in plan.sources:
        num_bytes += load_manifest(resolve_inside(plan.base, source.manifest)).total_tokens * 4
    if plan.shuffle_blocks:  # the current block and the next one
        num_bytes = min(num_bytes, 2 * 4 * SHUFFLED_TOKENS * len(plan.sources))
    if plan.shuffles and cache_bytes < num_bytes:
        raise ConfigError(
            "the cache is too small for a shuffled source, which is read at random",
            where="cache_bytes",
            found=cache_bytes,
            expected=f"at least {num_bytes}",
            do="set shuffle_blocks instead of shuffle, or omit cache_bytes to copy all data first",
        )


def _fetch_blocks(place: tuple[str, Manifest]) -> None:
    """Copy `blocks.json`, unless the local copy belongs to this manifest."""
    directory, manifest = place
    local = manifest.path.with_name(blocks_name(manifest.path))
    url = join(directory, blocks_name(manifest.path))
    try:
        read_blocks(local, manifest, url)
    except FormatError:
        if not fetch_whole(url, local):
            raise FormatError(
                "blocks.json is missing, so the data cannot be read in parts",
                where=url,
                do="run `nmoe publish`, which writes and uploads it, or `python -m loader blocks"
                " PLAN`, which writes it; or omit cache_bytes",
                code="E-BLOCKS",
            ) from None
        read_blocks(local, manifest, url)
