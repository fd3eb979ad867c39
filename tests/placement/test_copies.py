"""Copies of experts: what is refused, what they weigh, which serves a choice, and that plan files keep them."""

import dataclasses

import numpy as np
import pytest

from jaxmoe.placement import Placement, PlanError, check_fits, read_plan, write_plan
from jaxmoe.placement.copies import ByDraw, ByHome, Copies, LeastWork

# Two nodes. Expert 0 has copy 0 at node 0 and copy 2 at node 1; expert 1 has copy 1 over both.
COPY_OF = np.array([[0, 1, 0]])
SHARE = np.array([[[1, 0], [0.5, 0.5], [0, 1]]], np.float32)
BY_HOME = ByHome(np.array([[[0, 2], [1, 1]]]))
BY_DRAW = ByDraw(np.array([[0.25, 1.0, 0.75]]))
LEAST_WORK = LeastWork(np.array([1.0]), np.array([0.5]))
RULES = {"by_home": BY_HOME, "by_draw": BY_DRAW, "least_work": LEAST_WORK}
TOGETHER = LeastWork(np.array([1.0]), np.array([0.5]), together=True)


def legal(rule=BY_HOME) -> Copies:
    return Copies(COPY_OF, SHARE, rule)


def placed(rule=BY_HOME) -> Placement:
    return Placement.of_copies(legal(rule), (1, 2), (7,), {"model": "small"}, ("token_home",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": SHARE[0]}, r"copy_share has shape \(3, 2\), expected non-empty \[layer, copy, node\]"),
        ({"copy_of": COPY_OF[:, :2]}, r"copy_of is int64 of shape \(1, 2\), expected whole numbers of shape \(1, 3\)"),
        ({"copy_of": COPY_OF * 0.5}, "copy_of is float64"),
        ({"copy_of": np.array([[0, -1, 0]])}, "copy_of names experts -1 to 0 for 3 copies; number experts from 0"),
        ({"copy_of": np.array([[0, 3, 0]])}, "copy_of names experts 0 to 3 for 3 copies"),
        ({"copy_of": np.array([[0, 2, 0]])}, "no copy of expert 1 in row 0 of its layers; every expert needs one"),
        ({"share": SHARE * 0.5}, "copy 0, row 0 of its layers, sums to 0.5, expected 1"),
        ({"share": SHARE * np.float32(np.nan)}, r"copy_share has nan at \[0, 0, 0\]; give finite numbers"),
        ({"serving": ByHome(np.array([[[0, 1], [1, 1]]]))}, r"copy 1 for expert 0 at node 1.*; name one of \[0, 2\]"),
        ({"serving": ByHome(np.array([[[0, 9], [1, 1]]]))}, r"copy 9 for expert 0 at node 1"),
        ({"serving": ByHome(np.array([[[0, -1], [1, 1]]]))}, r"copy -1 for expert 0 at node 1"),
        ({"serving": ByHome(np.array([[[0], [1]]]))}, r"serving_table is int64 of shape \(1, 2, 1\), expected whole"),
        (
            {"serving": ByDraw(np.array([[0.25, 1, 0.5]]))},
            "serving_parts of expert 0, row 0 .* sum to 0.75, expected 1",
        ),
        ({"serving": ByDraw(np.array([[-0.5, 1, 1.5]]))}, r"serving_parts has -0.5 at \[0, 0\]"),
        (
            {"serving": LeastWork(np.array([-1.0]), np.ones(1))},
            r"serving_work has -1 at \[0\]; give finite numbers from",
        ),
        ({"serving": LeastWork(np.ones(1), np.array([np.inf]))}, "serving_visits has inf"),
        ({"serving": LeastWork(np.ones(2), np.ones(2))}, r"serving_work has shape \(2,\), expected \(1,\)"),
    ],
)
def test_illegal_copies_are_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(legal(), **fields)


def test_a_plan_of_copies_has_copies_and_no_other_has():
    with pytest.raises(PlanError, match="mode is 'sharded' with copies; make it with of_copies"):
        dataclasses.replace(placed(), mode="sharded")
    with pytest.raises(PlanError, match="mode is 'copies' without copies"):
        dataclasses.replace(placed(), copies=None)


def test_all_copies_weigh():
    np.testing.assert_allclose(placed().memory(100.0), [150, 150])
    with pytest.raises(PlanError, match=r"node 0 needs 1.5 GB .* has 1.4 GB"):
        check_fits(placed(), 1e9, np.array([1.4e9, 2e9]))


@pytest.mark.parametrize(
    ("rule", "mean"),
    [(BY_HOME, [0.5, 0.5]), (BY_DRAW, [0.25, 0.75]), (LEAST_WORK, [0.5, 0.5])],
    ids=RULES,
)
def test_the_share_of_a_plan_is_what_its_copies_do_on_average(rule, mean):
    np.testing.assert_allclose(placed(rule).share, [[mean, [0.5, 0.5]]])


def test_copies_by_home_and_by_draw():
    experts, source = np.array([[0, 1], [1, 0], [0, -1]]), np.array([0, 1, 1])
    draw = np.array([[0.2, 0.9], [0.5, 0.25], [0.0, 0.0]])
    assert legal(BY_HOME).served(0, experts, source, draw).tolist() == [[0, 1], [1, 2], [2, -1]]
    # The draw 0.25 is the first of the slice of copy 2.
    assert legal(BY_DRAW).served(0, experts, source, draw).tolist() == [[0, 1], [1, 2], [0, -1]]
    with pytest.raises(PlanError, match="least_work, which decides at run time"):
        legal(LEAST_WORK).served(0, experts, source, draw)


def test_a_copy_without_a_part_never_serves():
    copies = Copies(np.array([[0, 0, 0]]), SHARE, ByDraw(np.array([[0.0, 1.0, 0.0]])))
    draw = np.array([[0.0], [np.nextafter(np.float32(1), np.float32(0))]])
    assert copies.served(0, np.zeros((2, 1), int), np.zeros(2, int), draw).tolist() == [[1], [1]]


def test_layers_may_have_copies_of_different_experts():
    copies = Copies(
        np.array([[0, 1, 0], [1, 1, 0]]),
        np.tile(SHARE, (2, 1, 1)),
        ByDraw(np.array([[0.5, 1, 0.5]] * 1 + [[0.5, 0.5, 1]])),
    )
    assert copies.of_expert.tolist() == [[[0, 2], [1, -1]], [[2, -1], [0, 1]]]
    assert copies.rows([1]).of_expert.tolist() == [[[2, -1], [0, 1]]]
    np.testing.assert_allclose(copies.mean_share()[1], [[0, 1], [0.75, 0.25]])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_plan_file_round_trip(tmp_path, rule):
    plan = placed(rule)
    write_plan(tmp_path / "plan.npz", plan)
    back = read_plan(tmp_path / "plan.npz")
    assert (back.mode, back.layer_ids, back.meta, back.exchange) == ("copies", (7,), plan.meta, ("token_home",))
    np.testing.assert_array_equal(back.share, plan.share)
    np.testing.assert_array_equal(back.copies.copy_of, COPY_OF)
    np.testing.assert_array_equal(back.copies.share, SHARE)
    assert type(back.copies.serving) is type(rule)
    for name, array in rule.arrays().items():
        np.testing.assert_array_equal(back.copies.serving.arrays()[name], array)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"copy_of": None}, "plan.npz: has mode copies and no copy_of; write the plan again"),
        ({"serving_table": None}, "plan.npz: has mode copies and no serving_table"),
        (
            {"serving": np.asarray("nearest")},
            "plan.npz: serving is 'nearest', expected 'by_home', 'by_draw', 'least_work' or",
        ),
        ({"copy_share": np.array([["a"]])}, "plan.npz: copy_share is <U1 of shape"),
        ({"share": np.array([[[1, 0], [0, 1]]], np.float32)}, "plan.npz: share is not what its copies do on average"),
        ({"format": np.asarray(3)}, "plan.npz: has format 3, this version of jaxmoe reads up to 2; use a newer one"),
        ({"format": np.asarray("2")}, "plan.npz: format is <U1"),
    ],
)
def test_damaged_files_are_refused_with_their_name(tmp_path, changed, message):
    write_plan(tmp_path / "plan.npz", placed())
    with np.load(tmp_path / "plan.npz") as file:
        arrays = {**file} | changed
    np.savez(tmp_path / "plan.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(PlanError, match=message):
        read_plan(tmp_path / "plan.npz")


def test_some_layers_of_a_plan():
    two = Copies(np.tile(COPY_OF, (2, 1)), np.tile(SHARE, (2, 1, 1)), LeastWork(np.array([1.0, 2.0]), np.zeros(2)))
    plan = Placement.of_copies(two, None, (3, 8), exchange=("ring", "token_home"))
    second = plan.of_layers([1])
    assert (second.layer_ids, second.exchange, second.copies.serving.work.tolist()) == ((8,), ("token_home",), [2.0])


def test_tokens_served_together_need_equally_many_copies(tmp_path):
    with pytest.raises(PlanError, match="least_work_together for 1 to 2 copies of an expert; give all equally many"):
        legal(TOGETHER)
    whole = Copies(np.array([[0, 1, 0, 1]]), np.tile(np.eye(2, dtype=np.float32), (1, 2, 1)), TOGETHER)
    path = tmp_path / "plan.npz"
    write_plan(path, Placement.of_copies(whole, (1, 2), (7,), {"model": "small"}, ("token_home",)))
    assert read_plan(path).copies.serving.together
