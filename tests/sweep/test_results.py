"""Results in a folder: resumed, extended, refused, and repaired."""

import json
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from pyarrow import dataset, parquet
from sweep_keys import DIE, LINK

from jaxmoe.errors import InputError
from jaxmoe.run_folders import locked
from jaxmoe.sweep import SweepError, chunks, evaluation, read_study, run_sweep
from jaxmoe.sweep.compile_groups import Refused
from jaxmoe.sweep.results import TEXT, row_of

GEMM = {"kind": "tiled", "tile_tokens": 4, "tile_columns": 64, "startup_ns": 50}

AXES = {LINK: {"from": 1, "to": 20, "points": 20}, "strategy": ["ep_random", "ep_balanced"]}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(evaluation, "MOST", 8)


def read(folder):
    """All rows by hash, as any reader of Parquet sees them."""
    rows = dataset.dataset(folder / "points").to_table().to_pylist()
    assert len({row["hash"] for row in rows}) == len(rows)
    return {row["hash"]: row for row in rows}


class StopError(Exception):
    """Stands for a kill."""


def test_rows_have_every_number_metrics_and_versions(sweep, tmp_path):
    done = sweep(axes=AXES, derived={DIE: f"{LINK} / 10"})
    rows = read(tmp_path / "out")
    assert len(rows) == 40
    first = rows[done.points[0].hash]
    assert (first[LINK], first[DIE], first["strategy"], first["exchange"]) == (1.0, 0.1, "ep_random", "lowest_host")
    assert first["jaxmoe_version"]
    table = parquet.read_table(next((tmp_path / "out" / "points").glob("*.parquet")))
    assert table.schema.field(LINK).type == pa.float64()
    assert "jax" in json.loads(table.schema.metadata[b"versions"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["metrics"][0] == "total_s"
    assert (tmp_path / "out" / "study.yaml").read_bytes() == (tmp_path / "study.yaml").read_bytes()


def test_a_stopped_sweep_goes_on_and_ends_as_if_never_stopped(study, sweep, tmp_path):
    path, folder = study(axes=AXES), tmp_path / "stopped"
    folder.mkdir()

    def stop_after_a_chunk(done, total):
        if done:
            raise StopError

    for number in (1, 2):
        with pytest.raises(StopError):
            run_sweep(read_study(path), folder, stop_after_a_chunk)
        assert len(list((folder / "points").iterdir())) == number
    there = len(read(folder))
    assert 0 < there < 20
    last = run_sweep(read_study(path), folder, lambda done, total: None)
    assert last.computed == 40 - there
    again = run_sweep(read_study(path), folder, lambda done, total: None)
    assert (again.computed, again.compiles) == (0, 0)
    whole = {row["hash"]: row for row in sweep(axes=AXES).rows}
    rows = read(folder)
    assert rows.keys() == whole.keys()
    for key, row in rows.items():
        assert row["total_s"] == pytest.approx(whole[key]["total_s"], rel=1e-6)
        assert {k: v for k, v in row.items() if not isinstance(v, float)} == {
            k: v for k, v in whole[key].items() if not isinstance(v, float)
        }


def test_a_changed_study_adds_what_is_missing(sweep, tmp_path):
    sweep(axes={LINK: [1, 2], "strategy": ["tp"]})
    more = sweep(axes={LINK: [2, 3], "strategy": ["tp", "ep"]}, metrics=["p95"])
    assert (len(more.points), more.computed) == (4, 3)
    further = sweep(axes={LINK: [2, 3], DIE: [1, 3], "strategy": ["tp"]})
    assert further.computed == 4
    assert len(read(tmp_path / "out")) == 9


@pytest.mark.slow
def test_a_grown_study_can_be_read_as_one_dataset(sweep, tmp_path):
    """New columns, and one of nothing that becomes text: every file has them all."""
    memory = "hardware.die.memory_bandwidth_GB_per_s"
    one = sweep(axes={LINK: [1], "hardware.die.gemm": [None]})
    two = sweep(axes={DIE: [2], "hardware.die.gemm": [GEMM]})
    three = sweep(axes={LINK: [1], memory: [None, 3], "strategy": ["tp"]})
    for file in (tmp_path / "out" / "points").iterdir():
        schema = parquet.read_schema(file)
        assert {LINK, DIE, memory, "hardware.die.gemm"} <= set(schema.names)
        assert schema.field("hardware.die.gemm").type == pa.string()
        assert b"versions" in schema.metadata
    rows = read(tmp_path / "out")
    assert len(rows) == 4
    for done in (one, two, three):
        for row in done.rows:
            assert rows[row["hash"]] == dict.fromkeys(rows[row["hash"]]) | row
    assert sweep(axes={LINK: [1], memory: [None, 3], "strategy": ["tp"]}).computed == 0


def test_a_metric_that_an_older_version_lacks_is_computed(sweep, tmp_path):
    """Without a word of damage, and rows of points that are not in the study stay."""
    sweep(axes={LINK: [1, 2], "strategy": ["tp"]})
    (victim,) = (tmp_path / "out" / "points").glob("*.parquet")
    parquet.write_table(parquet.read_table(victim).drop_columns(["busiest_s"]), victim)
    done = sweep(axes={LINK: [2, 3], "strategy": ["tp"]})
    assert (done.computed, done.notes) == (2, [])
    rows = read(tmp_path / "out")
    assert sorted((row[LINK], row["busiest_s"] is None) for row in rows.values()) == [(1, True), (2, False), (3, False)]
    assert sweep(axes={LINK: [1, 2], "strategy": ["tp"]}).computed == 1
    assert all(row["busiest_s"] for row in read(tmp_path / "out").values())


def test_text_in_rows_without_a_metric_stays(sweep, tmp_path):
    sweep(axes={"hardware.die.gemm": [GEMM]})
    (victim,) = (tmp_path / "out" / "points").glob("*.parquet")
    parquet.write_table(parquet.read_table(victim).drop_columns(["busiest_s"]), victim)
    sweep(axes={LINK: [2]})
    assert sorted(row["hardware.die.gemm"] or "" for row in read(tmp_path / "out").values()) == ["", json.dumps(GEMM)]


def test_a_file_that_may_not_be_read_is_no_damage(sweep, tmp_path, monkeypatch):
    sweep(axes={LINK: [1]})

    def refuse(*arguments, **options):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "ParquetFile", refuse)
        with pytest.raises(SweepError, match=r"cannot read .*: Too many open files; put that right"):
            sweep(axes={LINK: [1]})
    assert sweep(axes={LINK: [1]}).computed == 0


def test_one_sweep_at_a_time_in_a_folder(study, tmp_path):
    """The command and Python alike. What holds the lock may take it again."""
    path, other = study(axes={LINK: [1]}), ThreadPoolExecutor(1)
    with locked(tmp_path), locked(tmp_path):
        running = other.submit(run_sweep, read_study(path), tmp_path, lambda done, total: None)
        with pytest.raises(InputError, match="another run is writing to"):
            running.result()
        assert not list(tmp_path.glob("*points*"))
    assert other.submit(run_sweep, read_study(path), tmp_path, lambda done, total: None).result().computed == 1


def test_the_version_is_looked_up_once(space):
    """Looking it up reads the package's metadata from disk, which a row must not."""
    (point,) = space(axes={LINK: [1]}).points()
    group = Refused([point], "none")
    row_of(point, group, TEXT)
    known = chunks.version_of.cache_info()
    for _ in range(20):
        row_of(point, group, TEXT)
    assert chunks.version_of.cache_info().misses == known.misses
    assert chunks.version_of.cache_info().hits >= known.hits + 20


def test_results_of_another_study_are_refused(sweep, tmp_path):
    sweep(axes=AXES)
    for other in ({"set": {"workload.batch_tokens": 4}}, {"layers": [3]}):
        with pytest.raises(SweepError, match="results of another study"):
            sweep(axes=AXES, **other)


def test_a_folder_of_something_else_is_refused(sweep, tmp_path):
    (tmp_path / "out" / "points").mkdir(parents=True)
    (tmp_path / "out" / "points" / "x.parquet").touch()
    with pytest.raises(SweepError, match="files of something else"):
        sweep(axes=AXES)
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(SweepError, match="is not that of a sweep"):
        sweep(axes=AXES)


def test_a_column_keeps_its_type(sweep):
    sweep(axes={"hardware.die.memory_bandwidth_GB_per_s": [None, 10]})
    sweep(axes={"hardware.die.memory_bandwidth_GB_per_s": [20]})
    with pytest.raises(SweepError, match="there are results with numbers at"):
        sweep(axes={"hardware.die.memory_bandwidth_GB_per_s": [10, "much"]})


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_file_is_set_aside_and_computed_anew(sweep, tmp_path, damage):
    before = {row["hash"]: row["total_s"] for row in sweep(axes=AXES).rows}
    victim = sorted((tmp_path / "out" / "points").glob("*.parquet"))[2]
    data = bytearray(victim.read_bytes())
    if damage == "cut":
        victim.write_bytes(data[:-100])
    elif damage == "flipped":
        data[60] ^= 0xFF
        victim.write_bytes(data)
    else:
        parquet.write_table(pa.table({"hash": ["x"]}), victim)
    done = sweep(axes=AXES)
    assert done.computed in (6, 7)
    assert (tmp_path / "out" / f"{victim.name}.damaged").exists()
    assert done.notes == [
        f"{victim.name}.damaged could not be read: it was set aside, and its points were computed anew"
    ]
    assert {key: row["total_s"] for key, row in read(tmp_path / "out").items()} == pytest.approx(before, rel=1e-6)


def test_a_failed_write_leaves_nothing_behind(sweep, tmp_path, monkeypatch):
    def full(table, where, **options):
        where.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(SweepError, match=r"cannot write to .*out: No space left on device; make room and run again"):
        sweep(axes=AXES)
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["manifest.json", "points", "study.yaml"]


def test_what_a_kill_left_aside_goes(sweep, tmp_path):
    sweep(axes={LINK: [1]})
    left = tmp_path / "out" / ".abc.parquet.part"
    left.write_bytes(b"half")
    sweep(axes={LINK: [1]})
    assert not left.exists()


MACHINE = "mesh_shape: [2, 2]\ndie: {compute_TFLOPs_per_s: 1}\nlink: {bandwidth_GB_per_s: "


def test_a_changed_file_behind_a_name_is_computed_anew(sweep, scenario, tmp_path):
    folder = scenario.parent / "hardware"
    folder.mkdir()
    (folder / "one.yaml").write_text(MACHINE + "10}\n")
    (folder / "two.yaml").write_text(MACHINE + "20}\n")
    axes = {"hardware": ["one", "two"]}
    before = sweep(axes=axes)
    assert sweep(axes=axes).computed == 0
    (folder / "one.yaml").write_text(MACHINE + "1}\n")
    after = sweep(axes=axes)
    assert after.computed == 1
    rows = read(tmp_path / "out")
    assert rows.keys() == {point.hash for point in after.points}  # what the file said before is gone
    assert rows.keys() != {point.hash for point in before.points}
    assert [row["point"] for row in after.rows] == [row["point"] for row in before.rows]
    assert after.rows[0]["dispatch_s"] > 2 * before.rows[0]["dispatch_s"]
    assert after.rows[1] == before.rows[1]


def made(space):
    return space.identity, space.points()[0].hash


@pytest.mark.parametrize("where", ["axes", "set"])
def test_a_changed_table_of_times_is_noticed(space, tmp_path, where):
    table = tmp_path / "gemm.csv"
    gemm = {"kind": "measured", "path": str(table)}
    key = "hardware.die.gemm"
    sections = {"axes": {LINK: [1]}, "set": {key: gemm}} if where == "set" else {"axes": {key: [gemm]}}
    table.write_text("tokens,columns,seconds\n1,128,1e-6\n")
    first, again = (made(space(**sections)) for _ in range(2))
    assert first == again
    table.write_text("tokens,columns,seconds\n1,128,2e-6\n")
    identity, point = made(space(**sections))
    assert (identity != first[0], point != first[1]) == (where == "set", where == "axes")


def test_rows_of_another_version_are_told(sweep, monkeypatch):
    sweep(axes={LINK: [1]})
    monkeypatch.setattr("jaxmoe.sweep.run.version", lambda name: "99")
    assert any("this is 99" in note for note in sweep(axes={LINK: [1]}).notes)
