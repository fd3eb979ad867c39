"""Dumps of SGLang's expert distribution recorder; those that need PyTorch are skipped where it is absent."""

import pickle
import sys
from zipfile import ZipFile

import numpy as np
import pytest

from jaxmoe.traces import Hints, LoadCounts, read_any, read_loads, write_as


class Trap:
    """Unpickling it would be noticed."""

    def __reduce__(self):
        return pytest.fail, ("the file was unpickled",)


@pytest.fixture
def pickled(tmp_path):
    """A zip like that of a dump, with an object that must not be made."""
    with ZipFile(tmp_path / "t.pt", "w") as archive:
        archive.writestr("t/data.pkl", pickle.dumps({"logical_count": Trap()}, protocol=2))
        archive.writestr("t/version", "3\n")
    return tmp_path / "t.pt"


def test_without_pytorch(pickled, refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    refuses(pickled, r"need PyTorch; install it with: pip install")


def test_nothing_is_unpickled(pickled, refuses):
    pytest.importorskip("torch")
    refuses(pickled, "not a dump of tensors")


COUNTS = np.zeros((3, 5, 4), np.int64)
COUNTS[:, [1, 3]] = np.arange(24).reshape(3, 2, 4)


@pytest.fixture
def dump(tmp_path):
    torch = pytest.importorskip("torch")

    def write(name="t.pt", **held):
        path = tmp_path / "t" / name
        path.parent.mkdir(exist_ok=True)
        torch.save(
            {key: torch.tensor(value) if isinstance(value, np.ndarray) else value for key, value in held.items()}, path
        )
        return path

    return write


def test_a_dump_and_a_folder_of_them(dump):
    path = dump("a_1.pt", rank=0, logical_count=COUNTS[:2])
    found = read_any(path)
    assert (found.format, found.content.layer_ids.tolist(), found.content.top_k) == ("sglang", [1, 3], None)
    np.testing.assert_array_equal(found.content.counts, COUNTS[:2, [1, 3]])
    dump("a_2.pt", rank=0, logical_count=COUNTS[2:].astype(np.int32), average_utilization_rate_over_window=0.5)
    loads = read_loads(path.parent, Hints(4, 2, (1, 2, 3), 5))
    np.testing.assert_array_equal(loads.counts, COUNTS[:, [1, 2, 3]])
    assert (loads.window_name, loads.top_k) == (("step 0", "step 1", "step 2"), 2)


def test_written_counts_come_back(tmp_path):
    pytest.importorskip("torch")
    names = ("step 0", "step 1", "step 2")
    loads = LoadCounts(COUNTS[:, [1, 3]], np.array([1, 3]), None, names, {})
    assert write_as("sglang", tmp_path / "l.pt", loads) == []
    back = read_loads(tmp_path / "l.pt")
    np.testing.assert_array_equal(back.counts, loads.counts)
    assert (back.layer_ids.tolist(), back.window_name) == ([1, 3], names)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"records": [], "last_physical_to_logical_map": None}, "no logical_count but .*records.*mode stat"),
        ({"logical_count": COUNTS[0]}, r"logical_count is \(5, 4\)"),
        ({"logical_count": COUNTS.astype(np.float32)}, "expected whole numbers"),
        ({"logical_count": 3}, "logical_count is int"),
        ({"logical_count": COUNTS * 0}, "zeros in every layer"),
        ({"logical_count": -COUNTS}, "are negative"),
        ({"logical_count": COUNTS[:, :4]}, "has rows of 4 layers, but the model has 5"),
        ({"logical_count": COUNTS[..., :3]}, "of a model with 3 experts, not 4"),
        ({"logical_count": COUNTS[:, ::-1] + 1}, r"choices in layers \[0, 2, 4\], where the model has no experts"),
    ],
)
def test_dumps_that_do_not_fit(dump, refuses, held, message):
    layers = None if message.startswith("zeros") else (1, 3)
    refuses(dump(**held), message, Hints(4, 2, layers, 5))


def test_a_damaged_dump_in_a_folder_is_named(dump, refuses):
    dump("a.pt", logical_count=COUNTS)
    bad = dump("b.pt", logical_count=COUNTS)
    bad.write_bytes(bad.read_bytes()[:300])
    refuses(bad.parent, "b.pt: not a dump of tensors")
    dump("b.pt", logical_count=COUNTS[..., :2])
    refuses(bad.parent, r"b.pt: has layers and experts \(5, 2\), the others \(5, 4\)", Hints())
