"""Work side by side on threads: for what leaves Python's lock, like compiling by XLA and solving by HiGHS."""

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

    The first error ends it: items that were not begun are left out.
    """
    pool = ThreadPoolExecutor(cores())
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def beside(function: Callable[[], Result]) -> Iterator[Future[Result]]:
    """What the function makes on another thread while the block runs; leaving the block waits for it."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(function)
