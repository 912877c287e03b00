"""Run one function over many items in this process, a process pool or a Ray cluster.

The results and their order are the same for each backend and any number of workers. The number of
items in flight is bounded, so memory is bounded for any length of input and number of workers. An
initializer opens an expensive object, such as a model, once per worker:

    map_shards(embed, batches, compute, initializer=partial(open_embedder, checkpoint))

    def embed(embedder: Embedder, batch: Batch) -> np.ndarray: ...
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from nmoe_core.base.bucket.paths import refresh_all
from nmoe_core.base.compute.pool import Initializer, Item, Map, Result, Worker, open_process_pool
from nmoe_core.base.compute.tables import ComputeTable

HERE = ComputeTable()


class _Kept(NamedTuple):
    """A pool of this machine that stays open between maps; `stack` closes it."""

    workers: int
    map: Map
    stack: ExitStack


# The idle pools of the outermost block of `kept_pools`; None outside of such a block.
_idle: list[_Kept] | None = None


@contextmanager
def kept_pools() -> Iterator[None]:
    """In this block, `map_shards` leaves the workers of a pool running for its next call, so each
    worker imports its packages once. The outermost block ends them."""
    global _idle
    if _idle is not None:
        yield
        return
    _idle = []
    try:
        yield
    finally:
        ended = _idle
        _idle = None
        for pool in ended:
            pool.stack.close()


def map_shards(
    fn: Callable[..., Result],
    items: Iterable[Item],
    compute: ComputeTable = HERE,
    *,
    initializer: Initializer = None,
    keep: bool = True,
) -> Generator[Result, None, None]:
    """Yield `fn(item)` for every item, in order; with an initializer, `fn(context, item)`.

    Args:
        fn: A module-level function; other processes receive it and the items as pickles.
        items: Read lazily: at most a bounded number of items ahead of the results.
        compute: The backend. One worker means this process; several workers are processes on this
            machine. On a `ray` cluster an item may run twice, so it must commit its files
            atomically, in a directory that all nodes share.
        initializer: Creates the context once per worker, before its first item; on Ray with GPUs it
            is created once per item, since a worker that holds a GPU ends after one item.
        keep: Whether a block of `kept_pools` may keep the workers, with all that they have loaded.
            After an error, and if not all results are read, they end. Workers with an initializer
            and those of Ray always end.

    Raises:
        NmoeError: A worker was lost, on Ray more often than `max_retries` (E-WORKER-LOST).
        ConfigError: For the reasons listed in `open_ray_pool`.
        Any error of `fn` or of the initializer, in place of the result of the item.
    """
    idle = _idle
    is_pool = compute.backend == "pool" and compute.workers > 1 and initializer is None
    if idle is None or not keep or not is_pool:
        with open_pool(compute, initializer) as pool:
            yield from pool(fn, items)
        if compute != HERE:
            refresh_all()
        return
    kept = next((one for one in idle if one.workers == compute.workers), None)
    if kept is None:
        stack = ExitStack()
        kept = _Kept(compute.workers, stack.enter_context(open_pool(compute, None)), stack)
    else:
        idle.remove(kept)  # a map that begins meanwhile opens its own pool
    with kept.stack:
        yield from kept.map(fn, items)
        refresh_all()
        if idle is _idle:
            idle.append(kept._replace(stack=kept.stack.pop_all()))


@contextmanager
def open_pool(compute: ComputeTable, initializer: Initializer) -> Iterator[Map]:
    """A pool that runs several maps, one after the other. Processes of this machine start
    immediately, so they do not inherit files and locks that are opened later."""
    if compute.backend == "ray":
        from nmoe_core.base.compute.ray import open_ray_pool

        with open_ray_pool(compute.ray, initializer) as pool:
            yield pool
    elif compute.workers == 1:
        yield Worker(initializer).map
    else:
        with open_process_pool(compute.workers, initializer) as pool:
            yield pool
