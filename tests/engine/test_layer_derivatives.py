"""Derivatives of the layer time, and its limit as the relaxation is taken back, in double precision."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats

from jaxmoe.relax import HardMax, SmoothMax, SoftSupport

SHAPE, EXPERTS, TOKENS, TOP_K = (2, 3), 5, 8, 2


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def random_case(seed=0, rule="lowest_host", **limits):
    rng = np.random.default_rng(seed)
    model = cases.layer_model(cases.random_machine(rng, SHAPE, **limits), "sharded", rule)
    share = floats(cases.random_share(rng, EXPERTS, 6))
    return model, share, cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))


def slope(function, point, index, relative_step):
    step, moved = relative_step * point[index], np.zeros_like(point)
    moved[index] = step
    return (function(point + moved) - function(point - moved)) / (2 * step)


@pytest.mark.parametrize("reduction", [HardMax(), SmoothMax(0.1)], ids=["hard", "smooth"])
@pytest.mark.parametrize("what", ["share", "link_bandwidth", "flops"])
def test_gradients_agree_with_central_differences(what, reduction):
    model, share, batch = random_case(3)
    points = {
        "share": (share, lambda m, s, value: (m, value)),
        "link_bandwidth": (
            model.machine.topology.link_bandwidth,
            lambda m, s, value: (eqx.tree_at(lambda t: t.machine.topology.link_bandwidth, m, value), s),
        ),
        "flops": (
            model.machine.die.flops,
            lambda m, s, value: (eqx.tree_at(lambda t: t.machine.die.flops, m, value), s),
        ),
    }
    point, placed = points[what]

    @jax.jit
    @jax.value_and_grad
    def time(value):
        changed, plan = placed(model, share, value)
        return changed(plan, batch, None, reduction, SoftSupport(0.1)).total

    point = np.asarray(point)
    gradient = np.asarray(time(point)[1])
    assert np.isfinite(gradient).all()
    checked = np.argsort(-np.abs(gradient * point).ravel())[:3]
    checked = [np.unravel_index(flat, point.shape) for flat in checked]
    assert abs(gradient[checked[0]]) > 0
    for index in checked:
        if point[index] > 0:
            expected = slope(lambda value: float(time(value)[0]), point, index, 1e-6)
            np.testing.assert_allclose(gradient[index], expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("rule", ["lowest_host", "fewest_hops"])
def test_relaxed_time_tends_to_the_exact_one(rule):
    model, share, batch = random_case(4, rule=rule, ports=True, memory=True)
    exact = float(jax.jit(lambda m: m(share, batch).total)(model))

    @jax.jit
    def relaxed(sharpness):
        return model(share, batch, None, SmoothMax(sharpness), SoftSupport(sharpness)).total

    gaps = [abs(float(relaxed(jnp.asarray(s))) / exact - 1) for s in (0.1, 0.01, 0.001, 0.0001)]
    assert gaps[-1] < 1e-4 < gaps[0]
    if rule == "lowest_host":  # the nearest node may change on the way
        assert gaps == sorted(gaps, reverse=True)
