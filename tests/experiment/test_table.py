"""Tables of studies: cases that are made, kept, chosen and gone on with; several at a time; and what fails."""

import importlib
import re
import sys
from functools import partial

import pytest

import jaxmoe.experiment.code_pieces as code_pieces
import jaxmoe.experiment.table_age as table_age
from jaxmoe.experiment.table import Table, add_shared, earlier_table, make_tables, run_jobs, study_options, tables_of

CASES = [("a", 0), ("a", 1), ("b", 0)]


def rows_of(add, name, seed):
    return [{"case": name, "seed": seed, "line": line, "value": seed + add + line / 3} for line in range(2)]


def times(add=0.0, rows=rows_of):
    return Table("times", partial(rows, add), CASES, ("case", "seed"), digits=3)


def made(folder, tables, *arguments, resume=False):
    """Makes tables in the folder of the study itself, unless told otherwise."""
    out = () if {"--out", "--quick"} & {*arguments} else ("--out", str(folder))
    return make_tables(folder, tables, study_options(None, resume).parse_args([*arguments, *out]))


def test_a_table_has_the_rows_of_all_cases_in_their_order(tmp_path, capsys):
    (found,) = made(tmp_path, [times()]).values()
    assert [(row["case"], row["seed"], row["line"]) for row in found] == [
        (name, str(seed), str(line)) for name, seed in CASES for line in range(2)
    ]
    assert (tmp_path / "times.csv").read_text().splitlines()[:3] == [
        "case,seed,line,value",
        "a,0,0,0",
        "a,0,1,0.333",
    ]
    assert re.search(r"times/b/0: 2 rows, \d+ s \(3 of 3\)", capsys.readouterr().out)


def test_cases_that_are_chosen_take_the_place_of_their_own_rows(tmp_path):
    made(tmp_path, [times()])
    before = (tmp_path / "times.csv").read_text().splitlines()
    made(tmp_path, [times(10.0)], "--only", "times/a/1", "nothing")
    after = (tmp_path / "times.csv").read_text().splitlines()
    assert after[3:5] == ["a,1,0,11", "a,1,1,11.3"]
    assert after[:3] + after[5:] == before[:3] + before[5:]


def test_with_resume_only_what_is_missing_is_made(tmp_path, capsys):
    made(tmp_path, [times()], "--only", "/b/")
    capsys.readouterr()
    made(tmp_path, [times(10.0)], "--list", resume=True)
    assert capsys.readouterr().out == "times/a/0\ntimes/a/1\n"
    values = [row["value"] for row in made(tmp_path, [times(10.0)], "--resume")["times"]]
    assert values == ["10", "10.3", "11", "11.3", "0", "0.333"]
    assert made(tmp_path, [times(20.0)], "--no-resume", resume=True)["times"][0]["value"] == "20"


def test_a_number_that_is_written_shorter_is_the_case_that_it_was(tmp_path):
    def rows(factor):
        return [{"factor": factor, "value": 1}]

    table = Table("factors", rows, [(8.0,), (1 / 3,), (None,)], ("factor",), digits=3)
    made(tmp_path, [table])
    assert [row["factor"] for row in made(tmp_path, [table])["factors"]] == ["8", "0.333", ""]


def test_rows_of_cases_that_are_no_more_stay_at_the_end(tmp_path):
    (tmp_path / "times.csv").write_text("case,seed,line,value\nold,9,0,1\n")
    assert [row["case"] for row in made(tmp_path, [times()])["times"]][-1] == "old"


def test_a_trial_is_the_first_case_in_a_folder_of_its_own(tmp_path):
    assert len(made(tmp_path, [times()], "--quick")["times"]) == 2
    assert not (tmp_path / "times.csv").exists()
    assert (tmp_path / "runs" / "quick" / "times.csv").is_file()
    assert len(made(tmp_path, [times()], "--out", str(tmp_path / "there"))["times"]) == 6
    assert (tmp_path / "there" / "times.csv").is_file()


def test_committed_tables_stay_unless_their_folder_is_named(tmp_path, capsys):
    committed = tmp_path / "times.csv"
    committed.write_text("case,seed,line,value\na,0,0,9\n")
    given = study_options(None).parse_args([])
    assert earlier_table(tmp_path, given, "times") == committed
    make_tables(tmp_path, [times()], given)
    assert committed.read_text().endswith("a,0,0,9\n")
    assert earlier_table(tmp_path, given, "times") == tmp_path / "runs" / "tables" / "times.csv"
    assert f"tables are in {tmp_path / 'runs' / 'tables'}" in capsys.readouterr().out


def test_tables_are_chosen_by_name_and_later_ones_may_rest_on_earlier_ones(tmp_path):
    first = tables_of({"first": lambda: [{"x": 1}, {"x": 2}]})
    second = Table("second", lambda x: [{"x": x, "twice": 2 * x}], lambda: [(1,), (2,)], ("x",))
    assert [*made(tmp_path, [*first, second], "second")] == ["second"]
    assert made(tmp_path, [*first, second])["second"] == [{"x": "1", "twice": "2"}, {"x": "2", "twice": "4"}]
    assert [*made(tmp_path, [*first, second], "f*")] == ["first"]
    with pytest.raises(SystemExit, match="no table is called third; choose from first, second"):
        made(tmp_path, [*first, second], "third")


def test_a_table_of_one_case_is_made_whatever_cases_are_chosen(tmp_path):
    sums = tables_of({"sums": lambda: [{"x": 1}]})
    assert {name: len(rows) for name, rows in made(tmp_path, [times(), *sums], "--only", "/b/").items()} == {
        "times": 2,
        "sums": 1,
    }


def test_processes_make_the_same_table(tmp_path):
    made(tmp_path, [times()])
    one = (tmp_path / "times.csv").read_text()
    made(tmp_path, [times()], "--jobs", "2")
    assert (tmp_path / "times.csv").read_text() == one


def fails_at_one(add, name, seed):
    if seed == 1:
        raise ValueError("no such seed")
    return rows_of(add, name, seed)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_case_that_fails_is_told_and_the_others_go_on(tmp_path, capsys, jobs):
    with pytest.raises(SystemExit, match="1 failed: times/a/1"):
        made(tmp_path, [times(rows=fails_at_one)], "--jobs", jobs)
    told = capsys.readouterr()
    assert "times/a/1: failed: no such seed" in told.out
    assert "Traceback" in told.err
    assert len((tmp_path / "times.csv").read_text().splitlines()) == 5


def test_rows_that_are_not_of_their_case_are_refused(tmp_path, capsys):
    wrong = Table("wrong", lambda x: [{"x": x + 1}], [(1,)], ("x",))
    with pytest.raises(SystemExit):
        made(tmp_path, [wrong])
    assert "wrong/1: a row has 2 in its key; expected x=1" in capsys.readouterr().out


def test_a_case_that_is_stopped_leaves_the_rows_before_it(tmp_path):
    def stopped(add, name, seed):
        if name == "b":
            raise KeyboardInterrupt
        return rows_of(add, name, seed)

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, [times(rows=stopped)])
    assert len((tmp_path / "times.csv").read_text().splitlines()) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.json", "times.csv"]


def test_compiled_functions_are_kept_on_disk(tmp_path):
    import jax

    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        given = study_options(None).parse_args([])
        made_rows = make_tables(tmp_path, [times()], given, compiled=tmp_path / "compiled")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
        assert len(made_rows["times"]) == 6
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_the_shared_folder_has_to_have_what_is_read(tmp_path, capsys):
    (tmp_path / "traces").mkdir()
    parser = study_options(None)
    add_shared(parser, tmp_path, "traces")
    assert parser.parse_args([]).shared == tmp_path.resolve()
    with pytest.raises(SystemExit):
        parser.parse_args(["--shared", str(tmp_path / "traces")])
    assert "has no traces/; give the folder that has" in capsys.readouterr().err


def test_results_of_jobs_are_kept_by_name():
    kept = {}

    def keep(name, result):
        kept[name] = result
        return "done"

    assert run_jobs(pow, {"eight": (2, 3), "nine": (3, 2)}, 1, keep) == []
    assert kept == {"eight": 8, "nine": 9}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of its own, whose table has two cases."""
    (tmp_path / "own_rows.py").write_text("SEED = 7\n\n\ndef rows(x):\n    return [{'x': x, 'y': 2 * x}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["own.py", "--shared", "/somewhere", "doubled"])
    monkeypatch.setattr(code_pieces, "_WATCHED", None)  # as in a process of its own
    monkeypatch.setattr(code_pieces, "_RAN", {})
    yield tmp_path, Table("doubled", importlib.import_module("own_rows").rows, [(1,), (2,)], ("x",))
    del sys.modules["own_rows"]


def test_what_made_a_table_lies_beside_it_and_tells_that_it_is_stale(study):
    folder, table = study
    made(folder, [table])
    kept = table_age.read(folder / "made.json")["doubled"]
    assert kept["command"] == f"{folder.name}/own.py --shared FOLDER doubled"
    assert kept["seed"] == {"SEED": "7"}
    assert {"own_rows.py", "jaxmoe/experiment/table.py"} <= kept["code"].keys()
    assert table_age.stale(folder) == {}
    own = folder / "own_rows.py"
    own.write_text(f'"""Other words."""\nimport os\n{own.read_text()}\n# changed\n\ndef unused():\n    return SEED\n')
    assert table_age.stale(folder) == {}
    own.write_text(own.read_text().replace("2 * x", "3 * x"))
    assert table_age.stale(folder) == {"doubled": ["own_rows.py"]}


def test_a_table_that_nothing_is_noted_of_is_told(study):
    folder, table = study
    made(folder, [table])
    (folder / "older.csv").write_text("a\n1\n")
    assert table_age.unnoted(folder) == ["older"]


def test_a_table_is_stale_until_all_its_cases_are_made_anew(study):
    folder, table = study
    made(folder, [table])
    path = folder / "made.json"
    path.write_text(path.read_text().replace(table_age.read(path)["doubled"]["code"]["own_rows.py"], "0" * 6))
    made(folder, [table], "--only", "doubled/1")
    assert table_age.stale(folder) == {"doubled": ["own_rows.py"]}
    made(folder, [table])
    assert table_age.stale(folder) == {}
    path.unlink()
    made(folder, [table], "--only", "doubled/1")  # nobody knows what made the other case
    assert not path.exists()
