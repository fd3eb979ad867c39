"""Work on threads: in order, side by side, and left at once by an error."""

import threading
import time

import pytest

from jaxmoe.threads import beside, cores, side_by_side


def test_results_come_in_order_however_long_each_takes():
    naps = [0.05, 0.0, 0.02, 0.0]
    assert list(side_by_side(lambda nap: time.sleep(nap) or nap, naps)) == naps


@pytest.mark.skipif(cores() < 2, reason="needs two cores")
def test_two_run_at_once():
    """Each waits for the other: one after the other, neither would end."""
    both = threading.Barrier(2, timeout=10)
    assert len(list(side_by_side(lambda _: both.wait(), range(2)))) == 2


def test_an_error_comes_in_its_turn_and_leaves_out_what_was_not_begun():
    begun = []

    def work(item):
        begun.append(item)
        if item == 1:
            raise ValueError(item)
        return item

    seen = []
    with pytest.raises(ValueError, match="1"):
        seen.extend(side_by_side(work, range(1000)))
    assert len(begun) < 1000


def test_what_runs_beside_a_block_is_there_at_its_end():
    with beside(lambda: time.sleep(0.05) or "made") as made:
        pass
    assert made.done()
    assert made.result() == "made"


def test_an_error_in_the_block_does_not_wait_for_what_runs_beside_it():
    go_on = threading.Event()
    with pytest.raises(KeyboardInterrupt), beside(lambda: go_on.wait(10)):
        raise KeyboardInterrupt
    assert not go_on.is_set()  # it would have waited ten seconds
    go_on.set()
