"""How the study of design spaces compares folders and counts what a kill loses, on folders made by hand."""

import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

FOLDER = Path(__file__).resolve().parents[2] / "studies" / "dse"


@pytest.fixture(scope="module")
def robust():
    sys.path.insert(0, str(FOLDER))
    try:
        import robust

        yield robust
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("robust", "robust_answers"):
            sys.modules.pop(name, None)


def folder(path, hashes, totals, strategies):
    (path / "points").mkdir(parents=True)
    table = pa.table({"hash": hashes, "total_s": pa.array(totals, pa.float64()), "strategy": strategies})
    parquet.write_table(table, path / "points" / "one.parquet")
    return path


def told(rows):
    return {row["figure"]: (row["value"], row["met"]) for row in rows}


def test_equal_folders_in_another_order_are_equal(robust, tmp_path, monkeypatch):
    monkeypatch.setattr(robust, "POINTS", 3)
    one = folder(tmp_path / "one", ["a", "b", "c"], [1.0, 2.0, None], ["tp", "ep", "ep"])
    two = folder(tmp_path / "two", ["c", "a", "b"], [None, 1.0, 2.0], ["ep", "tp", "ep"])
    assert told(robust.compared("x", one, two)) == {
        "rows": (3, True),
        "rows missing": (0, True),
        "rows twice": (0, True),
        "texts that differ": (0, True),
        "largest relative difference of a number": (0.0, True),
    }


def test_what_differs_is_told(robust, tmp_path, monkeypatch):
    monkeypatch.setattr(robust, "POINTS", 2)
    one = folder(tmp_path / "one", ["a", "b"], [1.0, 2.0], ["tp", "ep"])
    off = told(robust.compared("x", one, folder(tmp_path / "off", ["a", "b"], [1.0, 2.5], ["tp", "tp"])))
    assert off["largest relative difference of a number"] == (0.25, False)
    assert off["texts that differ"] == (1, False)
    empty = told(robust.compared("x", one, folder(tmp_path / "empty", ["a", "b"], [1.0, None], ["tp", "ep"])))
    assert not empty["largest relative difference of a number"][1]
    other = told(robust.compared("x", one, folder(tmp_path / "other", ["a", "a"], [1.0, 1.0], ["tp", "tp"])))
    assert other == {"rows": (2, True), "rows missing": (1, False), "rows twice": (1, False)}


def test_chunks_lost_are_those_evaluated_and_not_written(robust, tmp_path):
    log = tmp_path / "log"
    assert robust.evaluated(log) == []
    log.write_text("[10, 0.5]\n[10, 0.1]\n[7, 0.1]\n[10, 0")
    chunks = robust.evaluated(log)
    assert [chunk.points for chunk in chunks] == [10, 10, 7]
    assert [len(chunks) - robust.chunks_of(points, chunks) for points in (0, 10, 20, 27)] == [3, 2, 1, 0]


def test_numbers_of_a_machine_are_found_by_key(robust):
    answers = sys.modules["robust_answers"]
    numbers = answers.numbers_of(answers.CASES["mesh, levels of memory"])
    assert numbers["hardware.memory.hbm.bandwidth_GB_per_s"] == 2000
    assert numbers["hardware.link.latency_ns"] == 200
    assert "hardware.mesh_shape" not in numbers
