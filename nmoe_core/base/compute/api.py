"""Run one function over many items in this process, a process pool or a Ray cluster.

The results and their order are the same for each backend and any number of workers. The number of
items in flight is bounded, so memory is bounded for any length of input and number of workers. An
initializer opens an expensive object, such as a model, once per worker:

    map_shards(embed, batches, compute, initializer=partial(open_embedder, checkpoint))

    def embed(embedder: Embedder, batch: Batch) -> np.ndarray: ...
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from nmoe_core.base.compute.pool import Initializer, Item, Map, Result, Worker, open_process_pool
from nmoe_core.base.compute.tables import ComputeTable

HERE = ComputeTable()


def map_shards(
    fn: Callable[..., Result],
    items: Iterable[Item],
    compute: ComputeTable = HERE,
    *,
    initializer: Initializer = None,
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

    Raises:
        NmoeError: A worker was lost, on Ray more often than `max_retries` (E-WORKER-LOST).
        ConfigError: For the reasons listed in `open_ray_pool`.
        Any error of `fn` or of the initializer, in place of the result of the item.
    """
    with open_pool(compute, initializer) as pool:
        yield from pool(fn, items)


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
