"""The study of exchanges: its table of copies says what its README says, and its rows are of model and simulator."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.files import read_table

STUDY = Path(__file__).resolve().parents[2] / "studies" / "exchanges"
NAMES = ("copies", "setting")


@pytest.fixture(scope="module")
def copies():
    """The module of the study that makes the table of copies."""
    sys.path.insert(0, str(STUDY))
    kept = {name: sys.modules.pop(name, None) for name in NAMES}
    try:
        import copies

        yield copies
    finally:
        sys.path.remove(str(STUDY))
        for name in NAMES:
            sys.modules.pop(name, None)
            if kept[name] is not None:
                sys.modules[name] = kept[name]


def row(network, copies, told, seen):
    times = {
        f"{who}_{what}_s": at
        for what in ("communication", "total")
        for who, at in ((("model"), told), (("simulated"), seen))
    }
    return {"network": network, "copies": copies} | {name: str(value) for name, value in times.items()}


def test_agreement_is_by_network_and_number_of_copies(copies):
    rows = [
        row("mesh", "1", 1.0, 1.0),
        row("mesh", "1", 2.2, 2.0),
        row("torus", "1", 3.0, 3.0),
        row("torus", "1", 4, 4),
    ]
    lines = copies.summary(rows).splitlines()[2:]
    # Squares of errors 0.04 over those from the mean 0.5; errors 0 and 10 %.
    assert lines[0] == "| mesh | 1 | 2 | 0.92000 | 5.00 % | 0.92000 | 5.00 % |"
    assert lines[1].startswith("| torus | 1 | 2 | 1.00000 | 0.00 %")
    assert [line.split(" | ")[:3] for line in lines[2:]] == [["| all", "1", "4"], ["| all", "all", "4"]]


def test_the_readme_has_the_table_that_the_rows_make(copies):
    assert copies.summary(read_table(STUDY / "copies.csv")) in (STUDY / "README.md").read_text(encoding="utf-8")


def test_small_batches_are_large_ones_in_which_few_tokens_choose(copies):
    batches = copies.batches_of(copies.gating())
    chosen = (np.asarray(batches.experts[0]) >= 0).all(axis=-1)
    assert chosen.sum(axis=1).tolist() == [copies.SMALL, copies.TOKENS]
    homes = np.asarray(batches.experts[0, 0]) >= 0
    assert (np.flatnonzero(homes.all(axis=1)) * copies.NODES // copies.TOKENS).tolist() == np.repeat(
        np.arange(16), 4
    ).tolist()
