"""What made the tables of studies, where it is noted; `-s` lists tables that are older than their code, and others."""

from pathlib import Path

import pytest

from jaxmoe.experiment.table_age import FILE, read, stale, unnoted

NOTED = sorted((Path(__file__).resolve().parents[2] / "studies").glob(f"*/{FILE}"))


@pytest.mark.parametrize("path", NOTED, ids=lambda path: path.parent.name)
def test_notes_are_of_tables_that_are_there_and_name_no_folder_of_a_machine(path):
    if others := unnoted(path.parent):
        print(f"{path.parent.name}: nothing is noted of {', '.join(others)}")
    for name, files in stale(path.parent).items():
        print(f"{path.parent.name}/{name} is older than {', '.join(files)}")
    for name, each in read(path).items():
        assert path.with_name(f"{name}.csv").is_file()
        assert each["code"]
        assert " /" not in each["command"]
