"""Work side by side on threads: for what leaves Python's lock, like compiling by XLA and solving by HiGHS.

Settings of JAX that hold inside a `with` block alone do not reach these threads: set them for the whole process.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What the function makes of each item, in order, made as many at a time as there are cores.

    An error comes in its item's turn, and leaves out what was not begun.
    """
    with _pool(cores()) as pool:
        yield from pool.map(function, items)


@contextmanager
def beside(function: Callable[[], Result]) -> Iterator[Future[Result]]:
    """What the function makes on another thread while the block runs; leaving the block waits for it."""
    with _pool(1) as pool:
        yield pool.submit(function)


@contextmanager
def _pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that an error or Ctrl-C leaves at once, without waiting for what is under way."""
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
