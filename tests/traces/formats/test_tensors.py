"""Files of tensors, as PyTorch saves them: read and written without it, and nothing else is unpickled."""

import base64
import pickle
import zlib
from zipfile import ZipFile

import numpy as np
import pytest

from jaxmoe.traces import TraceError
from jaxmoe.traces.formats.tensors import read_tensors, write_tensors

# By PyTorch 1.13: torch.save of rank 0 and a logical_count of arange(24), int32 [2, 3, 4], packed.
BY_PYTORCH = (
    "eNp9Uk1r1EAYfpPsJul0s626rcWDICisoNtSjwUPiyyUARtXhOAlHSdhDR2TTjJpoSB4K/4J7x69+hd66rmX/gLxJ/hOEpbNrvrCw5vMPM/78S"
    "Q+tToArgsr0YcBFJ+YELsRU2x0eiIm4014vxRfzM8ShgHWgJylJ9KgEHj4IrJZwpkIeVamSppcZTn/OApLlYiChHn8oUxEFKo4LbI8PNsn0hoO"
    "AweFBTLZLJadWkIOU/W2PiKyGxjI2JN2YGHmp6V06I6S7hsK1KQW7VzKNdqjHWpcSvKV80yImKskSwtylEdxHkevEq6IXH86lT0lvansB4+xEj"
    "uLdYNquuSCaUWYMxWHGV6E50kaZedy43U58qnj3h4cfP+FIg3/n+71YGfBvd29yXiw4p0OzdVLmQi9lDayi7AR2g5deg1BEOtVXQCv+joAG4hN"
    "xB3EXcQ9xACxhdhG3K8mdNyrm58PjvH5+L8Te/CkmRiXLtCCyfjRX0duxQuiO1x/m70zmy18aug077HoV3+la/sPW9YuTt5r6V4a0PJ3Wbk4kd"
    "dS/p4rmz19atvPmsuH1vM50VrKP5o8NeuMOqe6bwhGdda1a41V8WvuH1myohE="
)


def test_a_dump_of_pytorch(tmp_path):
    path = tmp_path / "dump.pt"
    path.write_bytes(zlib.decompress(base64.b64decode(BY_PYTORCH)))
    found = read_tensors(path)
    assert (found["rank"], found["average_utilization_rate_over_window"]) == (0, None)
    assert found["logical_count"].dtype == np.int32
    np.testing.assert_array_equal(found["logical_count"], np.arange(24).reshape(2, 3, 4))


VALUES = {"rank": 0, "counts": np.arange(12).reshape(3, 4), "flags": np.array([True, False]), "empty": np.zeros((0, 3))}


def test_what_is_written_comes_back(tmp_path):
    write_tensors(tmp_path / "t.pt", VALUES)
    found = read_tensors(tmp_path / "t.pt")
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found[name], value, strict=isinstance(value, np.ndarray))


def test_pytorch_agrees(tmp_path):
    torch = pytest.importorskip("torch")
    write_tensors(tmp_path / "ours.pt", VALUES)
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    np.testing.assert_array_equal(loaded["counts"].numpy(), VALUES["counts"])
    part = torch.arange(60).reshape(3, 4, 5)[1:, :, :2].transpose(0, 1)
    torch.save({"part": part, "half": torch.ones(2, dtype=torch.float16)}, tmp_path / "theirs.pt")
    found = read_tensors(tmp_path / "theirs.pt")
    np.testing.assert_array_equal(found["part"], part.numpy())
    np.testing.assert_array_equal(found["half"], np.ones(2, np.float16))


def tensor(shape, strides, offset=0, storage=b"ctorch\nLongStorage\n", key=b"0"):
    """A pickle of one tensor, whose storage 0 has four numbers."""
    text = b"X\x01\x00\x00\x00" + key
    held = b"(X\x07\x00\x00\x00storage" + storage + text + b"X\x03\x00\x00\x00cpuK\x04tQ"
    plain = b"".join(pickle.dumps(value, 2)[2:-1] for value in (offset, shape, strides))
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + held + plain + b"tR."


def saved(path, content):
    with ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", content)
        archive.writestr("a/data/0", np.arange(4).tobytes())
    return path


def test_parts_of_a_storage(tmp_path):
    found = read_tensors(saved(tmp_path / "t.pt", tensor((2,), (2,), 1)))
    np.testing.assert_array_equal(found, [1, 3])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", "it holds os.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "it holds builtins.eval"),
        (b"cjaxmoe.files\nremove\n.", "it holds jaxmoe.files.remove"),
        (b"ctorch\nload\n.", "it holds torch.load"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}b.", "KeyError"),  # it may not change what it gets
        (tensor((1 << 40,), (0,)), "in a storage of 4"),
        (tensor((4,), (2,)), "in a storage of 4"),
        (tensor((2,), (1,), 3), "in a storage of 4"),
        (tensor((2,), (-1,), 3), "strides"),
        (tensor((2, 2), (1,)), "without a storage"),
        (tensor((2,), (1,), key=b"7"), "KeyError"),
        (tensor((2,), (1,), key=b"."), "a storage of another kind"),
        (tensor((2,), (1,), storage=b"N"), "a storage of another kind"),
        (b"\x80\x05\x96" + (1 << 62).to_bytes(8, "little") + b".", "KeyError"),  # bytes that are not there
        (b"\x80\x02N", "EOFError"),
        (b"", "EOFError"),
    ],
)
def test_nothing_but_tensors_is_made(tmp_path, content, message):
    with pytest.raises(TraceError, match=f"not a dump of tensors.*{message}") as caught:
        read_tensors(saved(tmp_path / "t.pt", content))
    assert "\n" not in str(caught.value)


def test_files_of_another_kind(tmp_path):
    with ZipFile(tmp_path / "t.pt", "w") as archive:
        archive.writestr("a/other", b"")
    with pytest.raises(TraceError, match=r"it has no data\.pkl"):
        read_tensors(tmp_path / "t.pt")
    saved(tmp_path / "t.pt", tensor((2,), (1,)))
    with ZipFile(tmp_path / "t.pt", "a") as archive:
        archive.writestr("a/byteorder", b"big")
    with pytest.raises(TraceError, match="big-endian"):
        read_tensors(tmp_path / "t.pt")
