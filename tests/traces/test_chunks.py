"""Arrays of any size a piece at a time, whether in memory or mapped from a file."""

import numpy as np
import pytest

from jaxmoe.traces.trace import ROWS_AT_ONCE, chunks, release, take


@pytest.fixture(params=["in memory", "mapped"])
def array(request, tmp_path):
    values = np.random.default_rng(0).integers(100, size=(3 * ROWS_AT_ONCE + 5, 2, 3)).astype(np.int16)
    if request.param == "in memory":
        return values
    np.save(tmp_path / "array.npy", values)
    return np.load(tmp_path / "array.npy", mmap_mode="r")


def test_pieces_cover_the_first_axis_in_order(array):
    parts = list(chunks(array.shape, array.dtype.itemsize, most_bytes=100))
    assert all((part.stop - part.start) * 12 <= 100 for part in parts)
    np.testing.assert_array_equal(np.concatenate([array[part] for part in parts]), array)


def test_rows_are_taken_from_anywhere_and_as_often_as_asked(array):
    rows = np.random.default_rng(1).integers(len(array), size=2 * len(array))
    taken = take(array, rows)
    np.testing.assert_array_equal(taken, np.asarray(array)[rows])
    assert taken.dtype == np.int16
    assert take(array, rows[:0]).shape == (0, 2, 3)


def test_what_is_released_can_be_read_again(array):
    before = np.array(array)
    release(array, None)
    np.testing.assert_array_equal(array, before)
