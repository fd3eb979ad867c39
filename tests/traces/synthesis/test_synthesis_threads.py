"""Jobs in threads: order, how far ahead they run, reports and their end."""

import threading
import time

import pytest

from jaxmoe.traces.synthesis.sampling import in_order


def test_results_come_in_order_whichever_job_is_done_first():
    jobs = [lambda _, wait=wait: time.sleep(wait) or wait for wait in (0.05, 0.0, 0.02)]
    assert list(in_order(jobs, 3, lambda _: None)) == [0.05, 0.0, 0.02]


def test_no_more_jobs_are_begun_than_workers_and_the_one_taken():
    begun = []
    results = in_order([lambda _, n=n: begun.append(n) or n for n in range(10)], 2, lambda _: None)
    assert next(results) == 0
    time.sleep(0.05)
    assert sorted(begun) == [0, 1, 2]
    assert list(results) == list(range(1, 10))


def test_the_last_report_is_all():
    reports = []

    def job(progress):
        progress(3)
        progress(5)

    list(in_order([job, job], 2, reports.append))
    assert reports[-1] == 10


def test_what_a_report_raises_ends_the_jobs():
    ended = threading.Event()

    def job(progress):
        try:
            while True:
                time.sleep(0.01)
                progress(1)
        finally:
            ended.set()

    def report(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(in_order([job], 1, report))
    assert ended.is_set()


def test_what_a_job_raises_is_raised():
    def job(_):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(in_order([job], 1, lambda _: None))
