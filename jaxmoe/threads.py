"""Parallel threads, for work that releases Python's global lock, such as XLA compilation and HiGHS.

Settings of JAX that hold inside a `with` block alone do not reach these threads: set them for the whole process.
"""

import os
from collections import deque
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
    """Apply the function to every item, on as many threads as there are cores; yields results in the items' order.

    An error is raised when its item's turn comes; items not yet begun are then dropped.
    """
    with _pool(cores()) as pool:
        yield from pool.map(function, items)


def streamed(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """As `side_by_side`, of items that are many or large: each is taken when a thread is about to be free for it."""
    with _pool(cores()) as pool:
        begun: deque[Future[Result]] = deque()
        for item in items:
            begun.append(pool.submit(function, item))
            if len(begun) > cores():
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


@contextmanager
def beside(function: Callable[[], Result]) -> Iterator[Future[Result]]:
    """Run the function on another thread while the block runs; yields its future. Leaving the block waits for it."""
    with _pool(1) as pool:
        yield pool.submit(function)


@contextmanager
def _pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A thread pool. On an error or Ctrl-C the block is left at once, without waiting for running work."""
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
