"""Sources of no format say what they are instead."""

import os

import pytest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"  \n ", "neither npz nor JSON"),
        (b"42", "JSON holds a int"),
        (b"null", "JSON holds a NoneType"),
        (b"[]", "JSON holds a list"),
        (b'[{"a": 1}]', "JSON holds a list"),
        (b'{"a": 1}\n{"a": 2}\n', "JSON holds a dict"),
        (b'"some text"', "record 0: not readable as base64"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "neither npz nor JSON"),
        (b"PAR1" + bytes(40), "not readable as Parquet|layer number|pyarrow"),
    ],
)
def test_other_files(tmp_path, refuses, content, message):
    (tmp_path / "layer_2").write_bytes(content)
    refuses(tmp_path / "layer_2", f"({message})")


def test_other_folders(tmp_path, refuses):
    refuses(tmp_path, r"not readable \(an empty directory\)")
    (tmp_path / ".hidden").write_text("{}")
    refuses(tmp_path, "an empty directory")
    (tmp_path / "notes.txt").write_text("none")
    refuses(tmp_path, "directory of no known kind, with notes.txt")
    refuses(tmp_path / "absent", "no such trace file")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_unreadable_files(tmp_path, refuses):
    (tmp_path / "t").write_text("{}")
    (tmp_path / "t").chmod(0)
    refuses(tmp_path / "t", "not readable")
