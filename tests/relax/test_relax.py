"""Smooth stand-ins tend to what they stand in for, and their derivatives are those of their values."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.relax import HardMax, HardSupport, SmoothMax, SoftSupport, geometric, largest, least_at, sinkhorn


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def central_differences(function, point, step=1e-6):
    point = np.asarray(point, np.float64)
    slopes = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        up, down = point.copy(), point.copy()
        up[index] += step
        down[index] -= step
        slopes[index] = (function(jnp.asarray(up)) - function(jnp.asarray(down))) / (2 * step)
    return slopes


LEAST_AT = jax.jit(least_at)
SMOOTH_MAX = jax.jit(lambda temperature, values: SmoothMax(temperature)(values))
reduced = eqx.filter_jit(lambda reduction, values: reduction(values))
present = eqx.filter_jit(lambda support, share: support.presence(support.amount(share)))
stepped = eqx.filter_jit(lambda support, values: support.step(values))


@given(st.lists(st.floats(1e-9, 1e9), min_size=5, max_size=5), st.floats(0.001, 1.0))
def test_smooth_max_keeps_its_bounds(values, temperature):
    values = np.asarray(values, np.float32)
    smooth, largest = float(SMOOTH_MAX(jnp.asarray(temperature), jnp.asarray(values))), float(values.max())
    assert largest * (1 - 1e-5) <= smooth <= largest * (1 + temperature * np.log(5) + 1e-5)


def test_smooth_max_tends_to_the_maximum_linearly(x64):
    values = jnp.array([3.0, 3.0, 1.0])
    # With two equal maxima the excess is temperature * max * log 2.
    for temperature in (0.1, 0.01, 0.001):
        excess = float(reduced(SmoothMax(temperature), values)) - float(reduced(HardMax(), values))
        assert excess == pytest.approx(temperature * 3 * np.log(2), rel=1e-3)


def test_smooth_max_scales_with_its_values(x64):
    values, smooth = np.array([1.0, 0.8, 0.3]), SmoothMax(0.2)
    small, large = (float(reduced(smooth, jnp.asarray(some))) for some in (values * 1e-6, values))
    np.testing.assert_allclose(small, large * 1e-6, rtol=1e-12)


def test_smooth_max_of_zeros_is_zero():
    value, slope = jax.jit(jax.value_and_grad(SmoothMax(0.1)))(np.zeros(4, np.float32))
    assert float(value) == 0
    assert np.isfinite(slope).all()


def test_smooth_max_gradient_is_the_derivative_of_its_value(x64):
    smooth, values = eqx.filter_jit(SmoothMax(0.3)), [1.0, 0.9, 0.5]
    np.testing.assert_allclose(
        jax.jit(jax.grad(smooth))(np.array(values)), central_differences(smooth, values), rtol=1e-6
    )


@pytest.mark.parametrize("reduction", [HardMax(), SmoothMax(0.1)], ids=["hard", "smooth"])
def test_the_maximum_of_nothing_is_zero(reduction):
    assert float(reduced(reduction, jnp.asarray(np.zeros(0), float))) == 0
    np.testing.assert_array_equal(reduced(reduction, jnp.asarray(np.zeros((2, 0)), float)), [0, 0])


def test_the_derivative_of_the_largest_is_shared_by_equals_though_rounded_differently():
    values = jnp.asarray([[1.0, 3.0, 2.0], [3.0, 3.0 * (1 - 1e-7), 1.0], [0.0, 0.0, 0.0]])
    slopes = jax.jit(jax.vmap(jax.grad(largest)))(values)
    np.testing.assert_allclose(slopes, [[0, 1, 0], [0.5, 0.5, 0], [1 / 3] * 3], rtol=1e-6)
    np.testing.assert_array_equal(jax.jit(largest)(values), np.asarray(values).max(axis=1))


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, np.inf]), min_size=1, max_size=6))
def test_the_least_is_where_argmin_finds_it(values):
    assert int(LEAST_AT(jnp.asarray(values + [np.inf] * (6 - len(values))))) == np.argmin(values)


def test_smooth_max_reduces_the_last_axis_only():
    values = np.random.default_rng(0).random((2, 3, 4)).astype(np.float32)
    for reduction in (HardMax(), SmoothMax(0.1)):
        found = np.asarray(reduced(reduction, jnp.asarray(values)))
        assert found.shape == (2, 3)
        np.testing.assert_allclose(found[1, 2], reduced(reduction, jnp.asarray(values[1, 2])), rtol=1e-6)


def test_soft_support_tends_to_the_hard_one():
    share = jnp.array([0.0, 0.05, 0.3, 1.0])
    hard = np.asarray(present(HardSupport(), share))
    assert hard.tolist() == [0, 1, 1, 1]
    gaps = []
    for width in (0.3, 0.1, 0.03, 0.001):
        gaps.append(np.abs(np.asarray(present(SoftSupport(width), share)) - hard).max())
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-6


def test_presences_unite_as_independent_absences():
    # Absent from both: the product of the absences; present once for the hard support.
    soft, hard = SoftSupport(0.2), HardSupport()
    one, two = jnp.asarray(0.1), jnp.asarray(0.3)
    united = eqx.filter_jit(lambda support: support.presence(support.amount(one) + support.amount(two)))
    absent = (1 - float(present(soft, one))) * (1 - float(present(soft, two)))
    assert float(united(soft)) == pytest.approx(1 - absent, rel=1e-5)
    assert float(united(hard)) == 1


def test_parts_unite_as_independent_presences():
    parts = jnp.asarray([[[0.5, 0.0, 1.0], [0.2, 0.0, 0.3]]])
    for support in (HardSupport(), SoftSupport(0.1)):
        np.testing.assert_allclose(eqx.filter_jit(support.union)(parts), [[1 - 0.5 * 0.8, 0, 1]], rtol=1e-6)


def test_soft_steps_tend_to_the_hard_one():
    values = jnp.asarray([-0.5, -0.01, 0.01, 0.5])
    hard = np.asarray(stepped(HardSupport(), values))
    assert hard.tolist() == [0, 0, 1, 1]
    gaps = [np.abs(np.asarray(stepped(SoftSupport(width), values)) - hard).max() for width in (1.0, 0.1, 1e-3)]
    assert gaps[2] < 1e-4 < gaps[1] < gaps[0] < 0.5
    assert float(stepped(SoftSupport(0.1), jnp.asarray(0.0))) == 0.5


def test_widths_may_differ_between_rows():
    soft = SoftSupport(jnp.asarray([[[0.1]], [[0.2]], [[0.4]]]))
    np.testing.assert_allclose(soft.of(jnp.asarray([2, 0])).width, [[[0.4]], [[0.1]]])
    assert SoftSupport(0.3).of(jnp.asarray([2, 0])).width.shape == ()


def test_soft_support_gradient_is_the_derivative_of_its_value(x64):
    soft = SoftSupport(0.2)

    @jax.jit
    def presence(share):
        return soft.presence(soft.amount(share)).sum()

    share = [0.0, 0.1, 0.7]
    np.testing.assert_allclose(
        jax.jit(jax.grad(presence))(np.array(share)), central_differences(presence, share), rtol=1e-6
    )


SINKHORN = jax.jit(sinkhorn, static_argnames="iterations")


@given(st.integers(0, 2**32 - 1))
def test_sinkhorn_meets_both_margins(seed):
    rng = np.random.default_rng(seed)
    row, column = rng.dirichlet(np.ones(5) * 3), rng.dirichlet(np.ones(4) * 3)
    given = (jnp.asarray(a, jnp.float32) for a in (rng.normal(size=(5, 4)), row, column))
    plan = np.asarray(SINKHORN(*given, iterations=60))
    assert (plan > 0).all()
    np.testing.assert_allclose(plan.sum(axis=1), row, rtol=1e-5)
    np.testing.assert_allclose(plan.sum(axis=0), column, rtol=2e-2)


def test_sinkhorn_of_equal_logits_is_the_product_of_the_margins():
    row, column = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.6, 0.4])
    expected = np.asarray(row)[:, None] * np.asarray(column)
    np.testing.assert_allclose(SINKHORN(np.zeros((3, 2), np.float32), row, column), expected, rtol=1e-5)


def test_sinkhorn_keeps_cross_ratios(x64):
    # Scaling rows and columns cannot change p00 p11 / (p01 p10).
    logits = np.array([[0.3, -1.0], [0.7, 0.2]])
    plan = np.asarray(SINKHORN(logits, np.array([0.7, 0.3]), np.array([0.4, 0.6])))
    ratio = plan[0, 0] * plan[1, 1] / (plan[0, 1] * plan[1, 0])
    assert np.log(ratio) == pytest.approx(0.3 + 0.2 + 1.0 - 0.7, rel=1e-9)


def test_sinkhorn_gradient_is_the_derivative_of_its_value(x64):
    rng = np.random.default_rng(3)
    weight, row, column = rng.random((3, 4)), np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.3, 0.2, 0.1])

    @jax.jit
    def score(logits):
        return (sinkhorn(logits, jnp.asarray(row), jnp.asarray(column)) * weight).sum()

    logits = rng.normal(size=(3, 4))
    np.testing.assert_allclose(
        jax.jit(jax.grad(score))(logits), central_differences(score, logits), rtol=1e-5, atol=1e-9
    )


def test_geometric_schedule_has_equal_ratios():
    assert [geometric(1.0, 0.01, p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.1, 0.01])


@pytest.mark.parametrize("module", [SmoothMax, SoftSupport])
def test_another_number_compiles_nothing(module):
    traced = []

    @eqx.filter_jit
    def value(smooth, values):
        traced.append(smooth)
        return smooth(values) if module is SmoothMax else smooth.amount(values)

    values = np.array([1.0, 3.0, 2.0], np.float32)
    found = [value(module(number), jnp.asarray(values)) for number in (0.1, 0.2, 0.4)]
    assert len(traced) == 1
    for number, one in zip((0.1, 0.2, 0.4), found, strict=True):
        expected = 3 * number * np.log(np.exp(values / (3 * number)).sum()) if module is SmoothMax else values / number
        np.testing.assert_allclose(one, expected, rtol=1e-5)


@pytest.mark.parametrize("module", [SmoothMax, SoftSupport])
def test_a_number_does_not_change_the_type_of_values(module):
    smooth = module(0.25)
    found = smooth(jnp.ones(3, jnp.bfloat16)) if module is SmoothMax else smooth.amount(jnp.ones(3, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    width = jnp.ones((2, 1))
    assert SoftSupport(width).width is width
