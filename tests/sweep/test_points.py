"""From axes to points, counted and worked out by hand."""

from datetime import date

import numpy as np
import pytest
from sweep_keys import CHUNK, DIE, LINK

from jaxmoe.config import ConfigError
from jaxmoe.errors import InputError
from jaxmoe.sweep import SweepError


def column(space, key):
    return [point.values[key] for point in space.points()]


def test_a_grid_has_every_combination_in_order(space):
    points = space(axes={LINK: [10, 20], "strategy": ["tp", "ep"]}).points()
    assert [(p.values[LINK], p.values["strategy"]) for p in points] == [(10, "tp"), (10, "ep"), (20, "tp"), (20, "ep")]
    assert {p.values["exchange"] for p in points} == {"own"}


def test_equal_points_are_one(space):
    assert len(space(axes={LINK: [10, 10.0, 20]}).points()) == 2


def test_ranges_have_their_ends_as_written(space):
    grid = space(
        axes={LINK: {"from": 10, "to": 1000, "points": 3, "scale": "log"}, DIE: {"from": 0.1, "to": 0.3, "points": 3}}
    )
    assert sorted(set(column(grid, LINK))) == pytest.approx([10, 100, 1000], rel=1e-12)
    assert {10.0, 1000.0} <= set(column(grid, LINK))
    assert {0.1, 0.3} <= set(column(grid, DIE))


def test_whole_numbers_stay_whole(space):
    values = column(space(axes={CHUNK: {"from": 64, "to": 100, "points": 4, "scale": "log"}}), CHUNK)
    assert values == [64, 74, 86, 100]
    assert all(isinstance(value, int) for value in values)


@pytest.mark.parametrize("method", ["latin_hypercube", "sobol"])
def test_ranges_are_drawn_and_lists_stay_a_grid(space, method):
    ranges = {LINK: {"from": 1, "to": 10}, DIE: {"from": 1, "to": 10, "scale": "log"}}
    drawn = space(axes=ranges | {"strategy": ["tp", "ep"]}, sample={method: 16, "seed": 3})
    points = drawn.points()
    assert len(points) == 32
    first = [(p.values[LINK], p.values[DIE]) for p in points if p.values["strategy"] == "tp"]
    assert first == [(p.values[LINK], p.values[DIE]) for p in points if p.values["strategy"] == "ep"]
    # Both methods have one point in each of 16 equal slices of every range.
    for at, part in ((0, lambda v: (v - 1) / 9), (1, lambda v: np.log10(v))):
        slices = sorted(int(part(values[at]) * 16) for values in first)
        assert slices == list(range(16))


def test_zipped_axes_go_together(space):
    axes = {LINK: [10, 20], DIE: {"from": 1, "to": 3, "points": 2}, "strategy": ["tp", "ep"]}
    points = space(axes=axes, zip=[[LINK, DIE]]).points()
    assert {(p.values[LINK], p.values[DIE]) for p in points} == {(10, 1.0), (20, 3.0)}
    assert len(points) == 4


def test_zipped_ranges_share_a_draw(space):
    axes = {LINK: {"from": 0.5, "to": 1.5}, DIE: {"from": 1, "to": 3}}
    for point in space(axes=axes, zip=[[LINK, DIE]], sample={"sobol": 5}).points():
        assert point.values[DIE] == pytest.approx(2 * point.values[LINK])


def test_derived_keys_and_conditions(space):
    made = space(
        axes={"total": [40, 80, 160], "ports": [1, 4]},
        derived={LINK: "total / ports"},
        where=["total <= 80", f"{LINK} > 10"],
    )
    assert {(p.values["total"], p.values[LINK]) for p in made.points()} == {(40, 40.0), (80, 80.0), (80, 20.0)}
    assert made.scenario(made.points()[0].values).hardware.link.bandwidth_GB_per_s == 40


def test_derived_keys_are_worked_out_in_the_order_of_their_needs(space):
    one, other = {DIE: f"{LINK} / 10"}, {LINK: "total / 2"}
    values = [
        [(p.values[LINK], p.values[DIE]) for p in space(axes={"total": [40, 80]}, derived=derived).points()]
        for derived in (one | other, other | one)
    ]
    assert values[0] == values[1] == [(20, 2), (40, 4)]


def test_conditions_see_the_scenario_of_the_point(space):
    made = space(
        axes={"hardware.mesh_shape": [[2, 2], [2, 4], [4, 4]]},
        where=["hardware.mesh_shape[0] * hardware.mesh_shape[1] <= 2 * model.num_experts"],
    )
    assert column(made, "hardware.mesh_shape") == [[2, 2], [2, 4]]


def test_hashes_are_of_values(space):
    one = space(axes={LINK: [10], "strategy": ["tp"]}).points()[0].hash
    assert one == space(axes={"strategy": ["ep", "tp"], LINK: [10.0, 20]}).points()[2].hash
    assert one != space(axes={LINK: [11], "strategy": ["tp"]}).points()[0].hash


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"axes": {LINK: []}}, "at least one value"),
        ({"axes": {}}, "at least one axis"),
        ({"axes": {LINK: 5}}, "a list with at least one value"),
        ({"axes": {LINK: {"from": 1, "to": 2}}}, "points beside from and to"),
        ({"axes": {LINK: {"from": 1, "to": 2, "point": 2}}}, "point: Extra inputs"),
        ({"axes": {LINK: {"from": 0, "to": 2, "points": 2, "scale": "log"}}}, "linear where an end is not above 0"),
        ({"axes": {LINK: [1]}, "metrics": ["latency"]}, 'metrics.0 is "latency"; expected one of total, p95'),
        ({"axes": {LINK: [1]}, "axis": {}}, "Did you mean axes?"),
        ({"axes": {LINK: [1]}, "sample": {"sobol": 2, "latin_hypercube": 2}}, "Keep one of the two"),
        ({"axes": {LINK: [1]}, "sample": "random"}, "grid, {latin_hypercube: N} or {sobol: N}"),
        ({"axes": {LINK: [1], DIE: [1, 2]}, "zip": [[LINK, DIE]]}, "axes of one length"),
        ({"axes": {LINK: [1]}, "zip": [[LINK, DIE]]}, f"Correct '{DIE}'"),
        ({"axes": {LINK: [1]}, "where": ["1 +"]}, "where.0"),
        ({"axes": {LINK: [1]}, "set": {LINK: 2}}, "Remove it here or there"),
        ({"axes": {LINK: [1]}, "zip": [[]]}, "at least two axes"),
        ({"axes": {"strategy": {"from": 1, "to": 2, "points": 2}}}, "a list of names"),
        ({"axes": {LINK: [1]}, "derived": {"exchange": "'own'"}}, "Make it an axis"),
        ({"axes": {LINK: [date(2026, 1, 1)]}}, "Put a date in quotes"),
        ({"axes": {LINK: [1]}, "sample": {"sobol": 4}}, "a range among the axes"),
        ({"axes": {LINK: [1]}, "derived": {"a": "a + 1"}}, "no key that needs itself"),
        ({"axes": {LINK: [1]}, "derived": {"a": "b", "b": "2 * a"}}, "no key that needs itself"),
    ],
)
def test_a_study_that_cannot_be_is_one_clear_error(space, sections, told):
    with pytest.raises(ConfigError) as error:
        space(**sections)
    assert told in str(error.value)
    assert "study.yaml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"axes": {LINK: [1, 2]}, "where": [f"{LINK} > 5"]}, "where leaves no point"),
        ({"axes": {"strategy": ["tp", "sp"]}}, "strategy has 'sp'; expected one of tp, "),
        ({"axes": {"exchange": ["ringg"]}}, "did you mean ring?"),
        ({"axes": {"note": [1]}, "derived": {LINK: "note"}}, "note is a column of the results"),
        ({"axes": {LINK: [1]}, "set": {"budget": 100}, "where": ["budget > 1"]}, "write it under derived"),
        ({"axes": {LINK: [1]}, "where": ["hardware.link.bandwith_GB_per_s > 0"]}, "did you mean " + LINK),
    ],
)
def test_points_that_cannot_be(space, sections, told):
    with pytest.raises(InputError) as error:
        space(**sections).points()
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"axes": {LINK: {"from": 1, "to": 2, "points": 10**9}, DIE: [1, 2]}}, "2,000,000,000 points"),
        ({"axes": {LINK: {"from": 1, "to": 2}}, "sample": {"sobol": 10**12}}, "1,000,000,000,000 points"),
        ({"axes": {key: [*range(1, 2001)] for key in (LINK, DIE)}, "zip": []}, "4,000,000 points"),
    ],
)
def test_more_points_than_there_may_be_are_told_before_there_are_any(space, monkeypatch, sections, told):
    monkeypatch.setattr("jaxmoe.sweep.points.MOST_POINTS", 3_999_999)
    with pytest.raises(SweepError, match=f"axes make {told}, more than the 3,999,999 .*; shorten axes"):
        space(**sections).points()


def test_zipped_axes_count_once(space, monkeypatch):
    monkeypatch.setattr("jaxmoe.sweep.points.MOST_POINTS", 6)
    axes = {LINK: [1, 2, 3], DIE: [1, 2, 3], "strategy": ["tp", "ep"]}
    assert len(space(axes=axes, zip=[[LINK, DIE]]).points()) == 6


def test_the_base_is_checked(study, space):
    with pytest.raises(InputError, match="no such file"):
        space(scenario="none.yaml", axes={LINK: [1]})
