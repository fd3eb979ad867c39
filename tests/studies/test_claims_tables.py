"""Tables of claims are what their studies' tables say now."""

import importlib
import sys
from pathlib import Path

import pytest

from jaxmoe.experiment.claims import rows_of_parts
from jaxmoe.files import read_table

STUDIES = Path(__file__).resolve().parents[2] / "studies"


@pytest.fixture
def claims(request):
    """The module `claims` of a study, and its table."""
    folder = STUDIES / request.param
    kept = sys.modules.pop("claims", None)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("claims"), read_table(folder / "claims.csv")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("claims", None)
        if kept is not None:
            sys.modules["claims"] = kept


@pytest.mark.parametrize("claims", ["camoe", "expert_streaming", "hd_moe", "wafer_gpu"], indirect=True)
def test_verdicts_are_those_of_the_tables(claims):
    module, table = claims
    made = [
        {name: row[name] for name in ("claim", "reading", "paper", "verdict")} for row in rows_of_parts(module.PARTS)
    ]
    assert made == [{name: row[name] for name in made[0]} for row in table]
    assert len({(row["claim"], row["reading"]) for row in table}) == len(table)
