"""Where Numba keeps what it has compiled, so that a package that cannot be written to works."""

import os
from pathlib import Path

import jaxmoe


def test_a_folder_of_its_own_only_where_nothing_can_be_written(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(os, "access", lambda *_: True)
    jaxmoe._keep_compiled_code()
    assert "NUMBA_CACHE_DIR" not in os.environ
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "given")
    jaxmoe._keep_compiled_code()
    assert os.environ["NUMBA_CACHE_DIR"] == "given"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    jaxmoe._keep_compiled_code()
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    assert folder.is_dir()
    assert not any(folder.iterdir())
    folder.rmdir()


def test_a_folder_that_is_to_be_made_counts_as_what_it_is_made_in(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, _: folder == tmp_path)
    assert jaxmoe._can_write(tmp_path / "to" / "be")
    assert not jaxmoe._can_write(tmp_path.parent / "none")
