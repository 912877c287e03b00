"""Plans whose tokens stay in a store: copies the files that are needed before the first step.

These are the plan, its manifests and the checksums of their blocks; `loader.files.block_files`
reads the tokens.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from loader.errors import ConfigError, FormatError
from loader.files.addresses import join
from loader.files.block_files import StoreData
from loader.files.blocks import BLOCKS_NAME, read_blocks
from loader.files.format import Manifest, load_manifest, resolve_inside
from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from loader.plan.remote import fetch_manifests, fetch_whole, in_parallel
from loader.plan.schedule import SHUFFLED_TOKENS


def streamed_plan(url: str, cache_dir: str | Path | None, cache_bytes: int) -> LoaderPlan:
    """A plan whose tokens are read from the store in blocks, with a cache of at most `cache_bytes`.
    Raises as `fetch_plan`, ConfigError if windows are shuffled and the cache is too small for all
    tokens, and FormatError if a manifest has no blocks (E-BLOCKS)."""
    local, root, cache = fetch_manifests(url, cache_dir, partial(in_parallel, _fetch_blocks))
    plan = load_plan(local)
    num_bytes = sum(
        load_manifest(resolve_inside(plan.base, s.manifest)).total_tokens * 4 for s in plan.sources
    )
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
    readers = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    store = StoreData(root, cache / "blocks", cache_bytes, readers)
    return replace(plan, store=store)


def _fetch_blocks(place: tuple[str, Manifest]) -> None:
    """Copy `blocks.json`, unless the local copy belongs to this manifest."""
    directory, manifest = place
    local = manifest.path.with_name(BLOCKS_NAME)
    url = join(directory, BLOCKS_NAME)
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
