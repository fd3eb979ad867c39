"""Every script of a study tells what it makes, and where its tables go, before it does any work."""

import re
from pathlib import Path

import pytest
from script_help import HelpServer

STUDIES = Path(__file__).parents[2] / "studies"
SCRIPTS = sorted(path for path in STUDIES.glob("*/*.py") if '__name__ == "__main__"' in path.read_text())
FIGURES = sorted((STUDIES.parent / "figures").glob("fig_*.py"))
STUDIES_WITH_SCRIPTS = sorted({path.parent.name for path in SCRIPTS})
WRITERS = ("make_tables(", "write_table(", "summary.write(", "claims_script(")


def test_no_script_writes_over_a_committed_table_by_itself():
    """A table goes to a folder that `folder_of_tables` or an option gives, never to that of the script."""
    for path in STUDIES.glob("*/*.py"):
        assert "write_table(HERE" not in path.read_text(), path.name


@pytest.mark.parametrize("study", STUDIES_WITH_SCRIPTS)
def test_a_script_of_every_study_says_how_long_it_takes(study):
    """Those whose time is known; the README's first command is of them."""
    told = [path.read_text().split('"""')[1] for path in SCRIPTS if path.parent.name == study]
    assert any(re.search(r"\b(seconds?|minutes?|half an hour)\b", text) for text in told)


@pytest.fixture(scope="module")
def help_server():
    server = HelpServer()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_help_says_what_a_script_makes(help_server, path, tmp_path):
    done = help_server.of(path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    source = path.read_text()
    assert source.split('"""')[1].split("\n")[0] in done.stdout
    assert ("--out FOLDER" in done.stdout) == any(writer in source for writer in WRITERS)
    assert not any(tmp_path.iterdir())


def test_recorded_data_are_found_from_any_folder():
    """By an option, or beside the project: never from where the script is called."""
    for path in STUDIES.glob("*/*.py"):
        assert 'Path("../' not in path.read_text(), path


@pytest.mark.parametrize("study", STUDIES_WITH_SCRIPTS)
def test_a_study_says_what_to_run_first_and_what_to_change(study):
    text = (STUDIES / study / "README.md").read_text()
    told = " ".join(text.partition("## Run it yourself\n")[2].partition("\n## ")[0].split())
    assert re.search(r"In (seconds|ten seconds|half a minute|a minute)", told)
    for name in re.findall(r"`([\w.]+\.py)`", told):
        assert (STUDIES / study / name).is_file()
    change = re.search(r"Then (change|add) `?([^`,.]+)`?", told)
    assert change
    if re.fullmatch(r"[A-Z_]+", change[2]):
        texts = [path.read_text() for path in (STUDIES / study).glob("*.py")]
        assert any(re.search(rf"^{change[2]}\b", text, re.M) for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_help_of_a_figure_says_where_images_go_and_draws_none(help_server, path, tmp_path):
    done = help_server.of(path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout
    assert not any(tmp_path.iterdir())


def test_microseconds_have_their_letter_in_scripts_and_tables():
    """But for keys, whose letters are of ASCII."""
    for path in (*STUDIES.glob("*/*.py"), *STUDIES.glob("*/*.csv"), *STUDIES.glob("*/*.md")):
        lines = path.read_text().splitlines()[path.suffix == ".csv" :]
        told = [line for line in lines if re.search(r"(?<![\w\"])us\b", line)]
        assert not told, path
