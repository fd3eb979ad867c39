"""What the study of design spaces works out of its points, on numbers made up by hand; and how its table is filled."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxmoe.config.hardware_space import read_space
from jaxmoe.engine import measured_time
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
        for name in ("cross", "cross_cells", "gradient_space", "space"):
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


def test_descent_has_the_space_of_the_grid():
    """The same ranges, meshes and price: only then is one search to be held against the other."""
    grid, space = (
        yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")) for name in ("mesh_space", "mesh_budget")
    )
    assert grid["scenario"] == "mesh_4x4.yaml"
    ranges = {key: axis for key, axis in grid["axes"].items() if isinstance(axis, dict)}
    assert space["variables"] == ranges
    assert space["choices"] == {"hardware.mesh_shape": grid["axes"]["hardware.mesh_shape"]}
    assert space["derived"] == grid["derived"]


def test_the_grid_is_held_to_the_same_price(study):
    import gradient_space

    rows = [
        {"tokens": tokens, "price": price, "total_us": time}
        for tokens, price, time in (("128", "90", "7"), ("128", "199", "5"), ("128", "201", "4"), ("64", "100", "3"))
    ]
    assert gradient_space.grid_best(rows, 128, 200.0)["total_us"] == "5"
    assert gradient_space.limit_of(read_space(FOLDER / "mesh_budget.yaml")) == 200


class Ways:
    """A column with one way that has a time, one that cannot be, one without end, and perhaps one more."""

    def __init__(self, *more, version="now"):
        self.computed, self.more, self.version = [], more, version

    def ways(self):
        names = ("fine", "wrong", "endless", *self.more)
        return [(way(name), lambda name=name: self._compute(name)) for name in names]

    def _compute(self, name):
        self.computed.append(name)
        if name == "wrong":
            raise InputError("needs a mesh\nand more")
        if name == "broken":
            raise ValueError("a fault of ours\nand more")
        return {"total_s": np.inf if name == "endless" else 2e-6}


def way(name):
    return "decode_32", "system", name


def test_a_cell_has_a_time_or_a_reason_and_is_computed_once(study, tmp_path):
    _, cross = study
    path = tmp_path / "machine_model.json"
    cells = cross.fill(Ways(), path, again=False)
    assert cells[way("fine")] == {"total_s": 2e-6}
    assert cells[way("wrong")] == {"reason": "needs a mesh"}
    assert "no finite number" in cells[way("endless")]["reason"]
    later = Ways("new")
    assert cross.fill(later, path, again=False).keys() == {way(name) for name in ("fine", "wrong", "endless", "new")}
    assert later.computed == ["new"]
    again = Ways("new")
    cross.fill(again, path, again=True)
    assert again.computed == ["wrong", "endless"]
    assert json.loads(path.read_text())["cells"]["decode_32 system new"] == {"total_s": 2e-6}


def test_a_fault_is_told_and_stops_no_other_cell(study, tmp_path, capsys):
    _, cross = study
    cells = cross.fill(Ways("broken", "after"), tmp_path / "machine_model.json", again=False)
    assert cells[way("broken")] == {"reason": "fault: ValueError: a fault of ours"}
    assert "decode_32 system broken fault" in capsys.readouterr().err
    assert cells[way("after")] == {"total_s": 2e-6}


@pytest.mark.parametrize(
    "before",
    ['{"version": "before", "cells": {"decode_32 system fine": {"total_s": 1}}}', '{"fine": {"total_s": 1}}'],
)
def test_cells_of_another_version_are_computed_anew(study, tmp_path, before):
    _, cross = study
    path = tmp_path / "machine_model.json"
    path.write_text(before)
    assert cross.fill(Ways(), path, again=False)[way("fine")] == {"total_s": 2e-6}
    assert cross.fill(later := Ways(version="later"), path, again=False)[way("fine")] == {"total_s": 2e-6}
    assert later.computed == ["fine", "wrong", "endless"]


def test_a_version_is_of_the_scenario_and_of_the_code(study, monkeypatch, tmp_path):
    _, cross = study
    column = cross.Column("nmp_4x4", "mixtral-8x7b", tmp_path)
    version = column.version
    assert version == cross.Column("nmp_4x4", "mixtral-8x7b", tmp_path).version
    others = {cross.Column(*names, tmp_path).version for names in (("nmp_8x8", "mixtral-8x7b"), ("nmp_4x4", "dbrx"))}
    monkeypatch.setattr(sys.modules["cross_cells"], "code_version", lambda: "other code")
    assert len({version, column.version, *others}) == 4


def test_the_table_has_no_empty_cell(study):
    _, cross = study
    tp, other = ("decode_32", "strategy", "tp"), ("decode_32", "system", "s")
    timed = {"total_s": 1.5e-5, "bottleneck": "combine: link", "model_s": 1e-5, "simulated_s": 1.25e-5}
    found = {
        ("m", "x"): {tp: timed, other: {"reason": "no"}},
        ("n", "x"): {tp: {"reason": "no"}, other: {"reason": "other"}},
    }
    rows, reasons = cross.table(found, ["m", "n", "later"], ["x"])
    assert [(*(row[key] for key in ("phase", "kind", "name", "m", "n", "later")),) for row in rows] == [
        ("decode_32", "strategy", "tp", "15", "R1", "R2"),
        ("decode_32", "system", "s", "R1", "R3", "R2"),
    ]
    assert [row["reason"] for row in reasons] == ["no", "not computed yet", "other"]
    (told,) = cross.long_table(found)
    assert (told["machine"], told["total_us"], told["energy_uJ"], told["simulated_us"]) == ("m", "15", "", "12.5")
    assert {row["mean_abs_error_percent"] for row in cross.agreements(found)} == {"20.0000"}


def test_the_fastest_strategy_is_told_with_the_next(study):
    _, cross = study
    times = {"tp": 2e-6, "ep": 1.6e-6, "hybrid": 3e-6}
    cells = {("decode_32", "strategy", name): {"total_s": time, "bottleneck": name} for name, time in times.items()}
    cells[("decode_32", "system", "camoe")] = {"total_s": 1e-6, "bottleneck": "camoe"}
    cells[("decode_128", "strategy", "tp")] = {"reason": "does not fit"}
    (row,) = cross.fastest({("m", "x"): cells})
    assert (row["phase"], row["strategy"], row["total_us"], row["bottleneck"]) == ("decode_32", "ep", "1.6", "ep")
    assert row["next_behind_percent"] == "25.00"


def test_every_way_that_there_is_has_a_row(study, tmp_path):
    _, cross = study
    cells = sys.modules["cross_cells"]
    ways = [way for way, _ in cross.Column("nmp_4x4", "mixtral-8x7b", tmp_path).ways()]
    assert {("decode_32", "strategy", "ep_balanced"), ("prefill_2048", "system", "hd_moe")} <= {*ways}
    assert ("decode_128", "exchange", "token_home_tree") in ways
    each = len(cells.compared_strategies()) + len(cells.METHODS)
    assert len(ways) == len({*ways}) == len(cells.PHASES) * each + len(cells.EXCHANGES.names)


def test_machines_that_share_what_is_compiled_come_together(study):
    _, cross = study
    machines = sorted(path.stem for path in (FOLDER.parents[1] / "configs" / "hardware").glob("*.yaml"))
    order = cross.ordered(machines)
    assert sorted(order) == machines
    for stem in ("nmp_4x4", "nmp_4x8", "nmp_8x8"):
        at = [place for place, machine in enumerate(order) if machine.startswith(stem)]
        assert np.ptp(at) == 2


def test_a_bottleneck_is_of_the_longest_stage(study):
    cells = sys.modules["cross_cells"]
    stages = {"dispatch": np.array([2.0]), "compute": np.array([1.0])}

    def limit(link, port=0.0):
        busy = {"dispatch": {"link": np.array([[link, 0.1]]), "port": np.array([[port]])}}
        return cells.bottleneck(measured_time(stages, busy, np.array([3.0])))

    assert limit(1.9) == "dispatch: link"
    assert limit(1.0, 1.5) == "dispatch: port"
    assert limit(0.9) == "dispatch: latency"
    assert cells.bottleneck(measured_time(stages, {}, np.array([3.0]))) == "dispatch"
    for rounded in (1.9, 1.9 * (1 + 1e-7)):
        waits = {"dispatch": {"memory": np.array([[rounded]]), "node": np.array([[1.9]])}}
        assert cells.bottleneck(measured_time(stages, waits, np.array([3.0]))) == "dispatch: node"
