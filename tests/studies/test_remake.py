"""One command makes every table of a paper's study: no script is left out, and each gets options that it has."""

import subprocess
import sys
from pathlib import Path

import pytest
from script_help import HelpServer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies"))
from remake import SCRIPTS, STUDIES, ages, command, due

sys.path.pop(0)
WRITERS = ("make_tables(", "claims_script(")
CASES = [(study, script) for study, scripts in SCRIPTS.items() for script in scripts]


@pytest.mark.parametrize("study", SCRIPTS)
def test_no_script_that_writes_tables_is_left_out(study):
    scripts = {
        path.stem for path in (STUDIES / study).glob("*.py") if any(each in path.read_text() for each in WRITERS)
    }
    assert scripts <= {*SCRIPTS[study]}


@pytest.mark.parametrize("study", SCRIPTS)
def test_verdicts_come_last(study):
    assert SCRIPTS[study][-1] in ("claims", "study")


@pytest.fixture(scope="module")
def help_server():
    server = HelpServer()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize(("study", "script"), CASES)
def test_a_script_has_the_options_that_it_gets(help_server, study, script, tmp_path):
    _, path, *given = command(study, script, tmp_path, tmp_path)
    told = help_server.of(Path(path), tmp_path).stdout
    assert all(option in told for option in given if option.startswith("--"))


def test_list_tells_ages_and_makes_no_table(tmp_path):
    done = subprocess.run(
        [sys.executable, STUDIES / "remake.py", "camoe", "--list", "--out", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not any(tmp_path.iterdir())


def test_what_is_stale_or_of_unknown_age_is_told_and_a_script_without_resume_runs_where_a_table_is_missing(tmp_path):
    for name in ("mapping", "found", "older"):
        (tmp_path / f"{name}.csv").write_text("a\n1\n")
    note = '{"command": "moentwine/mapping.py --out FOLDER", "seed": 0, "code": {%s}}'
    many = ", ".join(f'"{at}.py": "000000"' for at in range(5))
    (tmp_path / "many.csv").write_text("a\n1\n")
    (tmp_path / "made.json").write_text(
        '{"mapping": %s, "found": %s, "many": %s}'  # noqa: UP031
        % (note % "", note % '"mapping.py": "000000"', note % many)
    )
    told = ages("moentwine", tmp_path)
    assert told == {
        "found": "is older than mapping.py",
        "many": "is older than 0.py, 1.py, 2.py and 2 more",
        "older": "has no note of what made it",
    }
    assert not due("moentwine", "mapping", tmp_path)
    (tmp_path / "found.csv").unlink()
    assert due("moentwine", "mapping", tmp_path)


def test_an_unknown_study_is_named():
    done = subprocess.run([sys.executable, STUDIES / "remake.py", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
