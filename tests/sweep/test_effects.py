"""Shares of variance against what is worked out by hand."""

import numpy as np
import pytest
from sweep_keys import DIE, LINK

from jaxmoe.sweep import SweepError
from jaxmoe.sweep.effects import contrasts, effects, legendre, shares


def grid(*lengths):
    return [list(axis.ravel()) for axis in np.meshgrid(*map(range, lengths), indexing="ij")]


def test_two_axes_that_add_up():
    """Variances 2/3 of 0, 1, 2, and 9/4 of 0, 3."""
    a, b = grid(3, 2)
    main, pairs, rest = shares([contrasts(a), contrasts(b)], np.array(a) + 3.0 * np.array(b))
    assert main == pytest.approx(np.array([2 / 3, 9 / 4]) / (2 / 3 + 9 / 4))
    assert (np.abs(pairs).max(), rest) == pytest.approx((0, 0), abs=1e-12)


def test_an_interaction_alone():
    """Whether two switches differ: neither says anything without the other."""
    a, b = grid(2, 2)
    main, pairs, rest = shares([contrasts(a), contrasts(b)], np.array([0.0, 1.0, 1.0, 0.0]))
    assert main == pytest.approx([0, 0], abs=1e-12)
    assert pairs == pytest.approx(np.array([[0, 1], [1, 0]]))
    assert rest == pytest.approx(0, abs=1e-12)


def test_what_three_axes_do_together_is_left():
    a, b, c = grid(2, 2, 2)
    signs = np.prod([2.0 * np.array(axis) - 1 for axis in (a, b, c)], axis=0)
    main, pairs, rest = shares([contrasts(axis) for axis in (a, b, c)], signs + 2 * np.array(a))
    assert main == pytest.approx([0.5, 0, 0], abs=1e-12)  # both have a variance of 1
    assert (np.abs(pairs).max(), rest) == pytest.approx((0, 0.5), abs=1e-12)


def test_drawn_numbers_have_the_indices_of_the_function():
    """x + y z over the unit cube: variances 1/12 of x, 1/48 of y and of z, 1/144 of both."""
    from scipy.stats import qmc

    x, y, z = qmc.Sobol(3, rng=0).random(1024).T
    main, pairs, rest = shares([legendre(axis) for axis in (x, y, z)], x + y * z)
    assert main == pytest.approx(np.array([12, 3, 3]) / 19, abs=0.01)
    assert pairs[1, 2] == pytest.approx(1 / 19, abs=0.005)
    assert np.abs(pairs[0]).max() == pytest.approx(0, abs=0.002)
    assert rest == pytest.approx(0, abs=1e-9)


def test_holes_in_a_grid_change_little():
    a, b = grid(6, 8)
    values = np.sin(np.array(a)) + 0.3 * np.array(b)
    main, _, _ = shares([contrasts(a), contrasts(b)], values)
    part = np.random.default_rng(0).random(48) < 0.9
    few = [contrasts(np.array(axis)[part].tolist()) for axis in (a, b)]
    assert shares(few, values[part])[0] == pytest.approx(main, abs=1e-9)  # without interactions, none at all
    assert np.isnan(shares(few, values[part])[1][0, 1])  # of which so few points can tell nothing


def test_compute_time_is_explained_by_the_rate_alone(space, sweep):
    sections = {"axes": {LINK: [1, 4], DIE: {"from": 1, "to": 8, "scale": "log"}}, "sample": {"sobol": 16}}
    made, done = space(**sections), sweep(**sections)
    told = effects(made, done.points, done.rows, "compute")
    assert (told.axes, told.points, told.logarithm) == ((LINK, DIE), 32, True)
    assert told.main == pytest.approx([0, 1], abs=1e-5)
    assert told.total == pytest.approx([0, 1], abs=1e-5)
    done.rows[0]["compute_s"] = float("nan")
    assert effects(made, done.points, done.rows, "compute").points == 31


@pytest.mark.slow
def test_zipped_axes_are_one_and_single_values_none(space, sweep):
    sections = {
        "axes": {LINK: [1, 2, 4], DIE: [1, 2, 4], "strategy": ["tp"], "workload.batch_tokens": [4, 8]},
        "zip": [[LINK, DIE]],
    }
    made, done = space(**sections), sweep(**sections)
    assert effects(made, done.points, done.rows, "total").axes == (f"{LINK} and {DIE}", "workload.batch_tokens")


def test_where_there_is_nothing_to_tell(space, sweep):
    sections = {"axes": {LINK: [1, 2], "strategy": ["tp"]}}
    made, done = space(**sections), sweep(**sections)
    with pytest.raises(SweepError, match="compute is the same at all points"):
        effects(made, done.points, done.rows, "compute")
    with pytest.raises(SweepError, match="no axis has two values"):
        effects(made, done.points[:1], done.rows[:1], "total")
    with pytest.raises(SweepError, match="too few to tell effects apart; give at least 10"):
        shares([legendre(np.linspace(0, 1, 5))], np.arange(5.0))


def test_a_hole_in_a_grid_moves_nothing_to_an_axis_without_effect():
    """One pair of values has no points: the mean of all, far from 0, must not be told as effects."""
    rng = np.random.default_rng(0)
    drawn = rng.random(1000)
    cells = [(a, b) for a in (0, 1) for b in (0, 1) if (a, b) != (1, 1)]
    a, b, u = (np.array(each) for each in zip(*((a, b, u) for a, b in cells for u in drawn), strict=True))
    values = -8 + u + 0.1 * a
    main, _, rest = shares([contrasts(a.tolist()), contrasts(b.tolist()), legendre(u)], values)
    parts = np.array([0.01 * a.var(), 0, u.var()]) / values.var()
    assert main == pytest.approx(parts, abs=0.02)
    assert rest == pytest.approx(0, abs=0.02)


def test_noise_is_left_and_no_interaction():
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 60))
    _, pairs, rest = shares([legendre(x), legendre(y)], rng.normal(size=60))
    assert rest > 0.6
    assert pairs[0, 1] < 0.3


def test_axes_that_go_together_are_one_error():
    one = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    with pytest.raises(SweepError, match="go together"):
        shares([contrasts(one), contrasts([str(each) for each in one])], np.arange(12.0))
