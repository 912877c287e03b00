"""Run one function over many items, here, in a pool or on a Ray cluster: same results, same order.

Results come back in the order of the items whatever the number of workers, and a bounded number of
items is in flight, so memory stays bounded however long the input is and however many the workers.
What is expensive to open (a model, a tokenizer) is opened once per worker by an initializer:

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
        fn: A module-level function; for other processes it and the items are pickled.
        items: Consumed lazily, a bounded number ahead of the results.
        compute: One worker is this process, several are processes of this machine; `ray` is a
            cluster, where an item may run twice: it must commit its files atomically, in a
            directory that all nodes see.
        initializer: Makes the context, once in each worker, before its first item; on Ray with
            GPUs once per item, since a worker that holds a GPU ends after its item.

    Raises:
        NmoeError: A worker was lost, on Ray more often than `max_retries` (E-WORKER-LOST).
        ConfigError: As `open_ray_pool`.
        Whatever `fn` or the initializer raises, at the place of its item.
    """
    with open_pool(compute, initializer) as pool:
        yield from pool(fn, items)


@contextmanager
def open_pool(compute: ComputeTable, initializer: Initializer) -> Iterator[Map]:
    """Workers that several maps use one after the other. Processes of this machine start
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
