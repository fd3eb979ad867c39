"""Every script of a study tells what it makes, and where its tables go, before it does any work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "studies"
CALLED = {"cross_cells.py"}  # by another script, with arguments of its own
SCRIPTS = sorted(
    path for path in STUDIES.glob("*/*.py") if '__name__ == "__main__"' in path.read_text() and path.name not in CALLED
)
WRITERS = ("make_tables(", "write_table(", "summary.write(")


def test_no_script_writes_over_a_committed_table_by_itself():
    """A table goes to a folder that `folder_of_tables` or an option gives, never to that of the script."""
    for path in STUDIES.glob("*/*.py"):
        assert "write_table(HERE" not in path.read_text(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_help_says_what_a_script_makes(path, tmp_path):
    done = subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    source = path.read_text()
    assert source.split('"""')[1].split("\n")[0] in done.stdout
    assert ("--out FOLDER" in done.stdout) == any(writer in source for writer in WRITERS)
    assert not any(tmp_path.iterdir())


def test_microseconds_have_their_letter_in_scripts_and_tables():
    """But for keys, whose letters are of ASCII."""
    for path in (*STUDIES.glob("*/*.py"), *STUDIES.glob("*/*.csv"), *STUDIES.glob("*/*.md")):
        told = [line for line in path.read_text().splitlines() if re.search(r"(?<![\w\"])us\b", line)]
        assert not told, path
