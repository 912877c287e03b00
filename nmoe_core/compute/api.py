"""Run one function over many items, here, in a pool or on a Ray cluster: same results, same order.

Results come back in the order of the items whatever the number of workers, and a bounded number of
items is in flight, so memory stays bounded however long the input is and however many the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from nmoe_core.base.settings import RayOptions
from nmoe_core.compute.pool import InlinePool, Item, Pool, Result, open_process_pool

Backend = Literal["inline", "pool", "ray"]


def map_shards(
    fn: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    backend: Backend = "inline",
    workers: int = 1,
    initializer: Callable[..., None] | None = None,
    initargs: tuple = (),
    ray: RayOptions | None = None,
) -> Generator[Result, None, None]:
    """Yield `fn(item)` for every item, in order.

    Args:
        fn: A module-level function; with `pool` and `ray` it and the items are pickled.
        items: Consumed lazily, a bounded number ahead of the results.
        backend: `inline` runs here, `pool` in `workers` processes on this machine, `ray` on a
            cluster, as many items at once as it has room for. An item may run twice there: what it
            writes must be committed atomically, and lie where all nodes see it.
        workers: Processes of the pool.
        initializer: Called once in each process that runs `fn`.
        initargs: Arguments of `initializer`.
        ray: For `ray`: the cluster, and what an item holds of it.

    Raises:
        NmoeError: A worker was lost, on Ray more often than `max_retries` (E-WORKER-LOST).
        ConfigError: Ray is not installed, cannot be reached, or has no such resources
            (E-CONFIG-RAY).
        Whatever `fn` raises, at the place of its item.
    """
    with open_pool(backend, workers, initializer, initargs, ray) as pool:
        yield from pool.map(fn, items)


@contextmanager
def open_pool(
    backend: Backend = "inline",
    workers: int = 1,
    initializer: Callable[..., None] | None = None,
    initargs: tuple = (),
    ray: RayOptions | None = None,
) -> Iterator[Pool]:
    """Workers that several maps use one after the other.

    Processes of this machine are started at once: files and locks that are opened later are not
    theirs too.
    """
    if backend == "ray":
        from nmoe_core.compute.ray import open_ray_pool

        with open_ray_pool(ray or RayOptions(), initializer, initargs) as pool:
            yield pool
        return
    if backend == "inline" or workers <= 1:
        if initializer is not None:
            initializer(*initargs)
        yield InlinePool()
        return
    with open_process_pool(workers, initializer, initargs) as pool:
        yield pool
