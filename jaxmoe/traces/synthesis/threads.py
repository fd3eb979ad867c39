"""Jobs in threads: a few ahead of whoever takes their results, which come in order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import TypeVar

TICK = 0.1  # seconds between reports

Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Called by a job with how much of it is done. It raises `CancelledError` when nobody wants the rest."""


def in_order(
    jobs: Sequence[Callable[[Progress], Result]], workers: int, report: Callable[[int], None]
) -> Iterator[Result]:
    """The results of jobs, in their order. No more than `workers` run or wait at a time besides the one asked for.

    `report` is called now and then, by the caller's thread, with how much is done of all jobs; what it raises ends
    them, as does closing the iterator.
    """
    done = [0] * len(jobs)
    stop = Event()

    def run(index: int) -> Result:
        def progress(amount: int) -> None:
            if stop.is_set():
                raise CancelledError
            done[index] = amount

        return jobs[index](progress)

    def result(job: Future[Result]) -> Result:
        while not wait((job,), timeout=TICK).done:
            report(sum(done))
        return job.result()

    pool, pending = ThreadPoolExecutor(workers), deque[Future[Result]]()
    try:
        for index in range(len(jobs)):
            pending.append(pool.submit(run, index))
            if len(pending) > workers:
                yield result(pending.popleft())
        while pending:
            yield result(pending.popleft())
        report(sum(done))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
