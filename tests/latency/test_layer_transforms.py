"""What `vmap`, `grad` and `jit` promise of the layer model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases

from jaxmoe.relax import HardMax, SmoothMax, SoftSupport

SHAPE, EXPERTS, TOKENS, TOP_K = (2, 3), 5, 8, 2


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def random_case(seed=0, mode="sharded", rule="lowest", **limits):
    rng = np.random.default_rng(seed)
    model = cases.layer_model(cases.random_machine(rng, SHAPE, **limits), mode, rule)
    share = jnp.asarray(cases.random_share(rng, EXPERTS, 6), float)
    return model, share, cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def total(model, share, batch):
    return model(share, batch).total


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_vmap_over_machines_layers_batches_and_plans_equals_loops(mode):
    models = [random_case(seed, mode)[0] for seed in range(2)]
    plans = [[random_case(10 * p + layer)[1] for layer in range(2)] for p in range(3)]  # [plan][layer]
    batches = [[random_case(100 + 10 * layer + b)[2] for b in range(2)] for layer in range(2)]  # [layer][batch]
    over_batches = jax.vmap(total, (None, None, 0))
    over_layers = jax.vmap(over_batches, (None, 0, 0))
    over_plans = jax.vmap(over_layers, (None, 0, None))
    over_machines = eqx.filter_jit(jax.vmap(over_plans, (0, None, None)))
    shares = jnp.stack([jnp.stack(plan) for plan in plans])
    together = over_machines(stack(models), shares, stack([stack(layer) for layer in batches]))
    one = eqx.filter_jit(total)
    for (h, p, layer, b), value in np.ndenumerate(np.asarray(together)):
        assert value == pytest.approx(float(one(models[h], plans[p][layer], batches[layer][b])), rel=1e-5)


def slope(function, point, index, relative_step):
    step = relative_step * float(point[index])
    return (function(point.at[index].add(step)) - function(point.at[index].add(-step))) / (2 * step)


@pytest.mark.parametrize(
    "reduction",
    [
        HardMax(),
        pytest.param(SmoothMax(0.1), marks=pytest.mark.xfail(strict=True, reason="SmoothMax holds its scale constant")),
    ],
    ids=["hard", "smooth"],
)
@pytest.mark.parametrize("what", ["share", "link_bandwidth", "flops"])
def test_gradients_agree_with_central_differences(x64, what, reduction):
    model, share, batch = random_case(3)
    points = {
        "share": (share, lambda m, s, value: (m, value)),
        "link_bandwidth": (
            model.platform.mesh.link_bandwidth,
            lambda m, s, value: (eqx.tree_at(lambda t: t.platform.mesh.link_bandwidth, m, value), s),
        ),
        "flops": (
            model.platform.die.flops,
            lambda m, s, value: (eqx.tree_at(lambda t: t.platform.die.flops, m, value), s),
        ),
    }
    point, placed = points[what]

    @jax.jit
    def time(value):
        changed, plan = placed(model, share, value)
        return changed(plan, batch, None, reduction, SoftSupport(0.1)).total

    gradient = jax.grad(time)(point)
    assert np.isfinite(gradient).all()
    checked = np.argsort(-np.abs(np.asarray(gradient) * np.asarray(point)).ravel())[:3]
    checked = [np.unravel_index(flat, point.shape) for flat in checked]
    assert float(jnp.abs(gradient[checked[0]])) > 0
    for index in checked:
        if float(point[index]) > 0:
            np.testing.assert_allclose(gradient[index], slope(time, point, index, 1e-6), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("rule", ["lowest", "fewest"])
def test_relaxed_time_tends_to_the_exact_one(x64, rule):
    model, share, batch = random_case(4, rule=rule, ports=True, memory=True)
    exact = float(total(model, share, batch))

    @jax.jit
    def relaxed(sharpness):
        return model(share, batch, None, SmoothMax(sharpness), SoftSupport(sharpness)).total

    gaps = [abs(float(relaxed(jnp.asarray(s))) / exact - 1) for s in (0.1, 0.01, 0.001, 0.0001)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-4


def test_gradient_of_the_relaxed_time_is_finite_where_shares_are_zero():
    model, share, batch = random_case(5, ports=True, memory=True)
    gradient = jax.jit(jax.grad(lambda s: model(s, batch, None, SmoothMax(0.05), SoftSupport(0.05)).total))(share)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


def test_new_numbers_need_no_new_compilation():
    traces = []

    @eqx.filter_jit
    def time(model, share, batch, reduction, support):
        traces.append(None)
        return model(share, batch, None, reduction, support).total

    values = []
    for seed in range(3):
        model, share, batch = random_case(seed, ports=True, memory=True)
        model = jax.tree.map(lambda leaf, factor=1 + seed: leaf * factor, model)
        sharpness = jnp.asarray(0.1 / (1 + seed))
        values.append(float(time(model, share, batch, SmoothMax(sharpness), SoftSupport(sharpness))))
    assert len(set(values)) == 3
    assert len(traces) == 1
