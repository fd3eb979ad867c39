"""What `vmap`, `grad` and `jit` promise of the layer model."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats, full
from oracles.topologies import with_random_numbers

from jaxmoe.hardware import Die, Machine, MemoryLevel
from jaxmoe.hardware.kernels import TiledGemm
from jaxmoe.network import Congestion, build_exchange
from jaxmoe.relax import SmoothMax, SoftSupport
from jaxmoe.traces import Batch

SHAPE, EXPERTS, TOKENS, TOP_K = (2, 3), 5, 8, 2


def random_case(seed=0, mode="sharded", rule="lowest_host", **limits):
    rng = np.random.default_rng(seed)
    model = cases.layer_model(cases.random_machine(rng, SHAPE, **limits), mode, rule)
    share = floats(cases.random_share(rng, EXPERTS, 6))
    return model, share, cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *trees)


@eqx.filter_jit
def timed(model, *given):
    return model(*given)


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
    shares = stack([stack(plan) for plan in plans])
    together = over_machines(stack(models), shares, stack([stack(layer) for layer in batches]))
    one = eqx.filter_jit(total)
    for (h, p, layer, b), value in np.ndenumerate(np.asarray(together)):
        assert value == pytest.approx(float(one(models[h], plans[p][layer], batches[layer][b])), rel=1e-5)


@pytest.mark.parametrize(
    "exchange",
    [
        "ring_both_ways",
        "least_loaded_tree",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("lowest_host", "reduce_scatter")),
    ],
)
def test_tokens_of_weight_nothing_change_nothing(exchange):
    model, share, batch = random_case(3, ports=True, memory=True)
    exchange = build_exchange(exchange, model.machine.topology)
    nobody = Batch(jnp.asarray(np.full((4, TOP_K), -1)), full(4, 0.0), full((4, TOP_K), 0.0), full(4, 0.0))
    more = jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), batch, nobody)
    alone, padded = timed(model, share, batch, exchange), timed(model, share, more, exchange)
    for name in ("compute", "dispatch", "combine", "node_time", "combine_link_time"):
        np.testing.assert_allclose(getattr(padded, name), getattr(alone, name), rtol=1e-6)
    weight = np.asarray(more.weight) + 5.0 * (np.arange(TOKENS + 4) == 0)
    counted = eqx.tree_at(lambda given: given.weight, more, floats(weight))
    assert np.sum(timed(model, share, counted, exchange).node_time) > np.sum(alone.node_time)


def test_a_relaxed_flow_of_every_token_is_one_of_every_expert():
    """Few tokens have flows of their own; where there are more, if only of weight nothing, experts have."""
    model, share, batch = random_case(3, ports=True)
    few = jax.tree.map(lambda leaf: leaf[:EXPERTS], batch)
    rest = jax.tree.map(lambda leaf: leaf[EXPERTS:], batch)
    more = jax.tree.map(lambda *both: jnp.concatenate(both), few, eqx.tree_at(lambda b: b.weight, rest, full(3, 0.0)))
    soft = {"reduction": SmoothMax(0.05), "support": SoftSupport(0.3)}

    @eqx.filter_jit
    def network_alone(batch):
        return jax.value_and_grad(lambda share: model(share, batch, **soft).combine)(jnp.asarray(share))

    (alone, slope), (padded, slope_padded) = network_alone(few), network_alone(more)
    assert padded == pytest.approx(float(alone), rel=1e-5)
    np.testing.assert_allclose(slope_padded, slope, rtol=1e-3, atol=1e-5 * np.abs(slope).max())


def test_gradient_of_the_relaxed_time_is_finite_where_shares_are_zero():
    model, share, batch = random_case(5, ports=True, memory=True)
    gradient = jax.jit(jax.grad(lambda s: model(s, batch, None, SmoothMax(0.05), SoftSupport(0.05)).total))(share)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


def numbers_everywhere(seed: int, exchange: str):
    """A case whose dies compute in tiles, and share a second level of memory: all numbers differ with the seed."""
    model, share, batch = random_case(seed, rule=exchange, ports=True, memory=True)
    rng = np.random.default_rng(seed)
    gemm = TiledGemm(*(floats(rng.uniform(1, 5)) for _ in range(3)))
    levels = (floats(rng.uniform(1, 2, 2) * scale) for scale in (1e9, 1e-6, 1e9))
    ddr = MemoryLevel(*levels, channel=jnp.asarray(rng.permutation([0, 0, 0, 1, 1, 1]), jnp.int32))
    topology = with_random_numbers(model.machine.topology, rng)
    die = Die(model.machine.die.flops, gemm)
    machine = Machine(topology, die, (*model.machine.memory, ddr))
    costs = jax.tree.map(lambda number: number * (1 + seed), model.costs)
    chunks = Congestion(floats(rng.uniform(100, 1000)))
    return dataclasses.replace(model, machine=machine, costs=costs, time_model=chunks), share, batch


@pytest.mark.parametrize(
    "exchanges",
    [
        ["lowest_host"] * 3,
        ["least_loaded_split_tree"] * 3,
        ["rings_1x3_both_ways", "rings_2x1_both_ways", "rings_3_both_ways"],
    ],
    ids=["unicast", "tree", "rings"],
)
def test_new_numbers_need_no_new_compilation(exchanges):
    traces = []

    @eqx.filter_jit
    def time(model, share, batch, reduction, support):
        traces.append(None)
        return model(share, batch, None, reduction, support).total

    values = []
    for seed, exchange in enumerate(exchanges):
        model, share, batch = numbers_everywhere(seed, exchange)
        sharpness = jnp.asarray(0.1 / (1 + seed))
        values.append(float(time(model, share, batch, SmoothMax(sharpness), SoftSupport(sharpness))))
    assert len(set(values)) == 3
    assert len(traces) == 1


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["random_host", "least_loaded_split_tree", "reduce_scatter", "rings_1x3"])
def test_compiled_and_mapped_plans_equal_one_by_one(exchange):
    model, _, batch = numbers_everywhere(1, exchange)
    rng = np.random.default_rng(0)
    plans = floats(np.stack([cases.random_share(rng, EXPERTS, 6) for _ in range(3)]))
    together = eqx.filter_jit(eqx.filter_vmap(lambda model, share: model(share, batch), in_axes=(None, 0)))(
        model, plans
    )
    for index, share in enumerate(plans):
        eager = model(share, batch)
        for mapped, one in zip(jax.tree.leaves(together), jax.tree.leaves(eager), strict=True):
            np.testing.assert_allclose(mapped[index], one, rtol=2e-5, atol=1e-12)
