"""What the study of design spaces works out of its points, on numbers made up by hand; and how its table is filled."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.errors import InputError

FOLDER = Path(__file__).resolve().parents[2] / "studies" / "dse"


@pytest.fixture(scope="module")
def study():
    """The two modules of the study."""
    sys.path.insert(0, str(FOLDER))
    try:
        import cross
        import space

        yield space, cross
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("cross", "space"):
            sys.modules.pop(name, None)


def part(space, total, price, mesh="4x4"):
    """Machines of two strategies, the first of which has the links of all and the second the compute."""
    made = object.__new__(space.Part)
    made.mesh, made.tokens, made.strategies = mesh, 128, ("a", "b")
    made.total, made.price = np.array(total), np.array(price)
    made.communication = np.full(made.total.shape, 0.25)
    made.numbers = {key: np.geomspace(1, 100, len(price)) for key in space.NUMBERS}
    made.winner, made.best = made.total.argmin(axis=1), made.total.min(axis=1)
    return made


def test_winners_are_counted_by_mesh(study):
    space, _ = study
    (row,) = space.winners([part(space, [[1e-3, 2e-3], [3e-3, 2e-3], [1e-3, 4e-3], [1e-3, 1.1e-3]], [1, 2, 3, 4])])
    assert (row["a"], row["b"], row["machines"]) == (0.75, 0.25, 4)
    # behind by 100, 50, 300 and 10 %
    assert row["next_behind_median"] == pytest.approx(0.75)
    assert row["communication_share_median"] == 0.25


def test_a_front_spans_all_meshes(study):
    space, _ = study
    few = part(space, [[4e-6, 5e-6], [3e-6, 9e-6]], [10, 20], "2x8")
    many = part(space, [[8e-6, 2e-6], [9e-6, 5e-6]], [30, 15])
    told = [(row["price"], row["total_us"], row["mesh"], row["strategy"]) for row in space.fronts([few, many])]
    assert told == [("10", "4", "2x8", "a"), ("20", "3", "2x8", "a"), ("30", "2", "4x4", "b")]


def test_a_map_has_every_machine_in_one_cell(study):
    space, _ = study
    rows = space.regions([part(space, [[1.0, 2.0]] * 20 + [[2.0, 1.0]] * 20, range(1, 41))])
    for across, up in space.MAPS:
        of_map = [row for row in rows if (row["across"], row["up"]) == (across, up)]
        assert sum(row["machines"] for row in of_map) == 40
        low, high = (row for row in of_map if row["machines"] and row["x"] in (of_map[0]["x"], of_map[-1]["x"]))
        assert (low["most_often"], high["most_often"]) == ("a", "b")


class Ways:
    """A column with one way that has a time, one that cannot be, and perhaps one more."""

    def __init__(self, *more, version="now"):
        self.computed, self.more, self.version = [], more, version

    def ways(self):
        return [(name, lambda name=name: self._compute(name)) for name in ("fine", "wrong", "endless", *self.more)]

    def _compute(self, name):
        self.computed.append(name)
        if name == "wrong":
            raise InputError("needs a mesh\nand more")
        return {"total_s": np.inf if name == "endless" else 2e-6}


def test_a_cell_has_a_time_or_a_reason_and_is_computed_once(study, tmp_path):
    _, cross = study
    path = tmp_path / "machine_model.json"
    cells = cross.fill(Ways(), path, again=False)
    assert cells["fine"] == {"total_s": 2e-6}
    assert cells["wrong"] == {"reason": "needs a mesh"}
    assert "no finite number" in cells["endless"]["reason"]
    later = Ways("new")
    assert cross.fill(later, path, again=False).keys() == {"fine", "wrong", "endless", "new"}
    assert later.computed == ["new"]
    again = Ways("new")
    cross.fill(again, path, again=True)
    assert again.computed == ["wrong", "endless"]
    assert json.loads(path.read_text())["cells"]["new"] == {"total_s": 2e-6}


@pytest.mark.parametrize(
    "before", ['{"version": "before", "cells": {"fine": {"total_s": 1}}}', '{"fine": {"total_s": 1}}']
)
def test_cells_of_another_version_are_computed_anew(study, tmp_path, before):
    _, cross = study
    path = tmp_path / "machine_model.json"
    path.write_text(before)
    assert cross.fill(Ways(), path, again=False)["fine"] == {"total_s": 2e-6}
    assert cross.fill(later := Ways(version="later"), path, again=False)["fine"] == {"total_s": 2e-6}
    assert later.computed == ["fine", "wrong", "endless"]


def test_a_version_is_of_the_scenario_and_of_the_code(study, monkeypatch):
    _, cross = study
    column = cross.Column("nmp_4x4", "mixtral-8x7b")
    version = column.version
    assert version == cross.Column("nmp_4x4", "mixtral-8x7b").version
    others = {cross.Column("nmp_8x8", "mixtral-8x7b").version, cross.Column("nmp_4x4", "deepseek-v3").version}
    monkeypatch.setattr(cross, "code_version", lambda: "other code")
    assert len({version, column.version, *others}) == 4


def test_the_table_has_no_empty_cell(study):
    _, cross = study
    found = {
        ("m", "x"): {"strategy tp": {"total_s": 1.5e-5}, "system s": {"reason": "no"}},
        ("n", "x"): {"strategy tp": {"reason": "no"}, "system s": {"reason": "other"}},
    }
    rows, reasons = cross.table(found, ["m", "n"], ["x"])
    assert [(row["kind"], row["name"], row["m"], row["n"]) for row in rows] == [
        ("strategy", "tp", "15", "R1"),
        ("system", "s", "R1", "R2"),
    ]
    assert reasons == [{"number": "R1", "reason": "no"}, {"number": "R2", "reason": "other"}]


def test_every_way_that_there_is_has_a_row(study):
    _, cross = study
    names = [name for name, _ in cross.Column("nmp_4x4", "mixtral-8x7b").ways()]
    assert {"strategy ep_balanced", "exchange token_home_tree", "exchange ring", "system hd_moe"} <= {*names}
    assert len(names) == len({*names}) == len(cross.STANDARD) + len(cross.exchange_names()) + len(cross.SYSTEMS)
