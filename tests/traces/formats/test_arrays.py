"""Headers of arrays are held against the bytes there are, before anything is allocated."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.traces import TraceError
from jaxmoe.traces.formats.arrays import npy_array, read_arrays


def npy(header: str | bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin1") if isinstance(header, str) else header
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + data


def header(descr="'<i2'", shape="(2, 3)", order="False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def saved(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@given(
    st.sampled_from("<>"),
    st.sampled_from(["i2", "u8", "f4", "c8", "U3", "S2"]),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=3),
)
def test_arrays_come_back_in_the_byte_order_of_the_machine(order, kind, by_columns, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(np.dtype(f"{order}{kind}"))
    back = npy_array(saved(np.asfortranarray(array) if by_columns and array.ndim else array))
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype.newbyteorder("=")
    assert back.flags.writeable


def test_a_header_of_version_2():
    assert npy_array(npy(header(), bytes(12), b"\x02\x00")).tolist() == [[0] * 3] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a .npy"),
        (npy(header(), bytes(12), b"\x03\x00"), "not a .npy of version 1 or 2"),
        (npy(header(), bytes(11)), r"shape \[2, 3\] has 12 bytes, but there are 11"),
        (npy(header(), bytes(13)), r"has 12 bytes, but there are 13"),
        (npy(header(shape="(-2, -3)"), bytes(12)), "its header is"),
        (npy(header(shape="(1099511627776, 1099511627776)")), "but there are 0"),
        (npy(header(shape="(0, 1099511627776)")), "expected 8 of 65536"),
        (npy(header(shape=f"({'1, ' * 70})"), bytes(2)), "70 axes"),
        (npy(header("'|O'"), bytes(12)), "without pickle"),
        (npy(header("'<U0'"), b""), "its header is"),
        (npy(header("[('a', '<i2')]"), bytes(12)), "its header is"),
        (npy(header("'<i3'"), bytes(12)), "its header is"),
        (npy("{'descr': (", bytes(12)), "its header is"),  # NumPy raises tokenize.TokenError
        (npy("(" * 9000), "its header is"),
        (npy("{[]: 1}"), "its header is"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", "claims 4294967295 bytes"),
        (npy(header("'<U1'", "(1,)"), b"\xff\xff\xff\xff"), "text that is not Unicode"),
    ],
)
def test_what_is_refused(content, message):
    with pytest.raises(TraceError, match=message) as caught:
        npy_array(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("field", ["array", "member"])
def test_terabytes_are_refused_without_allocating_them(tmp_path, packing, field):
    tall = npy(header(shape="(1099511627776, 2)"), bytes(64))
    with zipfile.ZipFile(tmp_path / "t.npz", "w", packing) as archive:
        archive.writestr("experts.npy", tall if field == "array" else saved(np.zeros(50_000)))
    content = (tmp_path / "t.npz").read_bytes()
    if field == "member":
        at = content.index(b"PK\x01\x02") + 24  # the size in the directory
        (tmp_path / "t.npz").write_bytes(content[:at] + b"\xf0\xff\xff\xff" + content[at + 4 :])
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"not a readable npz .*(claims|has .* bytes)"):
        read_arrays(tmp_path / "t.npz")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(tmp_path, packing):
    with zipfile.ZipFile(tmp_path / "t.npz", "w", packing) as archive:
        archive.writestr("experts.npy", saved(np.zeros(3)))
    with pytest.raises(TraceError, match=r"'experts\.npy' is compressed in a way that NumPy does not use"):
        read_arrays(tmp_path / "t.npz")
