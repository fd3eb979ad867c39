"""Pre-broadcast as a whole: decided as loops decide, priced by the model, and borne out by the event simulator."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles import dynamic as oracle
from oracles.arrays import floats, full
from oracles.layer import Tokens
from small_dynamic import EXPERTS, NODES, quarters, skewed_batches

from jaxmoe.des import LayerDescription, Memory, fabric_of, replay_layer, replay_plan
from jaxmoe.engine import Decisions, Layer, evaluate, rollout
from jaxmoe.methods import (
    CrossLayer,
    FixedAllowance,
    MovingAverage,
    PerfectForecast,
    PreBroadcast,
    StaticForecast,
    broadcast_experts,
)
from jaxmoe.placement.exchange import exchange_of

LAYERS, BATCHES, SHAPE = 3, 4, (2, 3)
RULES = ("lowest_host", "fewest_hops", "least_loaded_tree", "ring_both_ways")
PARTS = ("compute", "dispatch", "combine", "total")


def small_method(rng: np.random.Generator, forecast=None, allowed=2, limit=EXPERTS, flops=1.0) -> PreBroadcast:
    return PreBroadcast(
        share=floats(np.stack([quarters(rng) for _ in range(LAYERS)])),
        flops_per_token_expert=jnp.asarray(flops),
        forecast=PerfectForecast() if forecast is None else forecast,
        allowance=FixedAllowance(jnp.asarray(allowed)),
        limit=limit,
    )


def plain_model(rng: np.random.Generator) -> tuple[Layer, np.ndarray]:
    """A machine whose nodes take a power of two of seconds for a choice, and these seconds."""
    seconds = rng.choice([0.5, 1.0, 2.0], NODES)
    machine = cases.random_machine(rng, SHAPE)
    machine.flops = 1 / seconds
    return cases.layer_model(machine), seconds


def decided(method: PreBroadcast, model: Layer, batches) -> tuple[np.ndarray, np.ndarray]:
    """Experts that are broadcast [layer, step, expert], and nodes that serve [layer, step, token, top_k]."""
    decisions = rollout(method, model, batches)[2]
    return tuple(np.swapaxes(np.asarray(a), 0, 1) for a in (broadcast_experts(decisions), decisions.served))


def times_of(method: PreBroadcast, model: Layer, batches):
    """Times [layer, step]."""
    return jax.tree.map(lambda leaf: np.swapaxes(leaf, 0, 1), rollout(method, model, batches)[1])


def one_of(batches, *at):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[at], batches)


@pytest.mark.parametrize("seed", range(3))
def test_decisions_equal_the_loops(seed):
    rng = np.random.default_rng(seed)
    model, seconds = plain_model(rng)
    allowed = np.array([0, 2, 5])
    method, batches = small_method(rng, allowed=allowed), skewed_batches(rng, LAYERS, BATCHES)
    broadcast, served = decided(method, model, batches)
    for layer, step in np.ndindex(LAYERS, BATCHES):
        share, batch = np.asarray(method.share[layer]), one_of(batches, layer, step)
        tokens = Tokens(*(np.asarray(leaf) for leaf in (batch.experts, batch.token_draw, batch.draw, batch.weight)))
        loads = np.bincount(tokens.experts.ravel(), minlength=EXPERTS)
        chosen = oracle.chosen_experts(share, loads, seconds, int(allowed[layer]))
        assert set(np.flatnonzero(broadcast[layer, step]).tolist()) == chosen
        np.testing.assert_array_equal(served[layer, step], oracle.served_nodes(share, tokens, chosen, seconds))


def test_a_forecast_learns_from_steps_before():
    # The frequencies it starts with favour expert 0, which no token chooses; from then on it knows better.
    rng = np.random.default_rng(1)
    model, _ = plain_model(rng)
    batches = skewed_batches(rng, LAYERS, BATCHES)
    batches = dataclasses.replace(batches, experts=jnp.asarray(np.maximum(batches.experts, 1)))
    wrong = floats(np.broadcast_to(np.arange(EXPERTS) == 0, (LAYERS, EXPERTS)))
    broadcast, _ = decided(small_method(rng, MovingAverage(wrong, jnp.asarray(1.0)), allowed=1), model, batches)
    assert broadcast[:, 0, 0].all()
    assert not broadcast[:, 1:, 0].any()
    assert (broadcast.sum(axis=-1) == 1).all()
    assert decided(small_method(rng, StaticForecast(wrong), allowed=1), model, batches)[0][..., 0].all()


def random_layer(seed: int, rule: str = "lowest_host", memory: bool = False):
    """A machine with links and nodes of their own, its method and batches.

    Links are alike enough for the busiest to be busy throughout its stage, as the model has it.
    """
    rng = np.random.default_rng(seed)
    machine = cases.random_machine(rng, SHAPE, memory=memory)
    machine.link_bandwidth, machine.link_latency = rng.uniform(2e9, 3e9, 14), rng.uniform(1e-8, 2e-8, 14)
    model = cases.layer_model(machine, rule=rule)
    method = small_method(rng, flops=model.costs.flops_per_token_expert)
    return model, method, skewed_batches(rng, LAYERS, BATCHES)


@pytest.mark.parametrize("rule", [RULES[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:])])
@pytest.mark.parametrize("memory", [pytest.param(False, marks=pytest.mark.slow), True])
def test_broadcasting_nothing_is_the_static_placement(rule, memory):
    model, method, batches = random_layer(0, rule, memory)
    method = dataclasses.replace(method, allowance=FixedAllowance(jnp.asarray(0)))
    broadcast, served = decided(method, model, batches)
    assert not broadcast.any()
    assert (served == -1).all()
    dynamic, static = times_of(method, model, batches), evaluate(model, method.share, batches)
    assert (dynamic.stages["movement"] == 0).all()
    for part in PARTS:
        np.testing.assert_allclose(getattr(dynamic, part), getattr(static, part), rtol=1e-6, err_msg=part)


@pytest.mark.parametrize("seed", range(4))
def test_broadcasting_all_evens_out_compute(seed):
    # Not so in general: tokens are served in their order, and a choice is not taken back. Skewed loads leave room.
    model, method, batches = random_layer(seed)
    method = dataclasses.replace(method, allowance=FixedAllowance(jnp.asarray(EXPERTS)))
    chosen = (batches.choices(EXPERTS).sum(axis=2)) > 0
    np.testing.assert_array_equal(decided(method, model, batches)[0], chosen)
    dynamic, static = times_of(method, model, batches), evaluate(model, method.share, batches)
    assert (dynamic.compute <= static.compute * (1 + 1e-6)).all()


def describe(model, rule: str) -> LayerDescription:
    machine, costs = model.machine, model.costs
    levels = ((level.bandwidth, level.latency, level.channel) for level in machine.memory)
    return LayerDescription(
        fabric=fabric_of(machine.topology, float(model.time_model.chunk_bytes)),
        flops=np.asarray(machine.die.flops),
        memory=tuple(Memory(*map(np.asarray, level)) for level in levels),
        dispatch_bytes=float(costs.dispatch_bytes),
        combine_bytes=float(costs.combine_bytes),
        expert_bytes=float(costs.expert_bytes),
        flops_per_token_expert=float(costs.flops_per_token_expert),
        mode="sharded",
        exchange=exchange_of(rule),
    )


@pytest.mark.parametrize("rule", [RULES[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:])])
@pytest.mark.parametrize("memory", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_model_is_borne_out(seed, memory, rule):
    model, method, batches = random_layer(seed, rule, memory)
    _, served = decided(method, model, batches)
    told = times_of(method, model, batches)
    seen = replay_plan(describe(model, rule), np.asarray(method.share), batches, served=served)
    for at in np.ndindex(LAYERS, BATCHES):
        one, simulated = one_of(told, *at), seen[at[0]][at[1]]
        np.testing.assert_allclose(one.node_time, simulated.node_busy, rtol=1e-5)
        np.testing.assert_allclose(one.dispatch_link_time, simulated.link_busy["dispatch"], rtol=1e-5)
        np.testing.assert_allclose(one.combine_link_time, simulated.link_busy["combine"], rtol=1e-5)
        np.testing.assert_allclose(one.total, simulated.total_s, rtol=0.03)


def test_memory_of_broadcast_experts_by_hand():
    # Three nodes in a row: expert 0 is on node 0, expert 1 half on node 1 and half on node 2. Expert 0 is
    # served twice at node 1, and once at node 0: each reads it whole. Nobody reads it as placed.
    machine = cases.random_machine(np.random.default_rng(0), (1, 3), memory=True)
    machine.memory_bandwidth[:] = 1e6
    share = floats([[1.0, 0, 0], [0, 0.5, 0.5], [0, 0, 1]])
    tokens = Tokens(np.array([[0, 1], [0, 1], [0, -1]]), np.zeros(3, int), np.zeros((3, 2)), np.ones(3))
    served = jnp.array([[1, -1], [1, -1], [0, -1]])
    latency = eqx.filter_jit(cases.layer_model(machine).time)(Decisions(share, served=served), cases.batch(tokens))
    vectors = np.array([1, 2, 2]) * (cases.COSTS.dispatch_bytes + cases.COSTS.combine_bytes)
    np.testing.assert_allclose(latency.node_time, (np.array([1, 1.5, 0.5]) * 3e6 + vectors) / 1e6, rtol=1e-6)


@pytest.mark.slow
def test_vmap_over_methods_equals_one_by_one():
    rng = np.random.default_rng(5)
    model, _ = plain_model(rng)
    batches = skewed_batches(rng, LAYERS, BATCHES)
    frequency = full((LAYERS, EXPERTS), 1 / EXPERTS)
    rows = floats(rng.dirichlet(np.ones(EXPERTS), (LAYERS, EXPERTS)))

    def method(allowed, rate):
        forecast = CrossLayer(rows, MovingAverage(frequency, rate))
        return small_method(np.random.default_rng(6), forecast, allowed=allowed, limit=4)

    def served(method):
        return rollout(method, model, batches)[2].served

    several = [method(jnp.asarray(allowed), jnp.asarray(rate)) for allowed, rate in ((0, 0.1), (2, 0.5), (4, 0.9))]
    together = eqx.filter_jit(eqx.filter_vmap(served))(
        jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *several)
    )
    assert together.shape == (3, BATCHES, LAYERS, *batches.experts.shape[2:])
    for row, one in enumerate(several):
        np.testing.assert_array_equal(together[row], served(one))


def test_a_batch_must_have_the_layers_of_the_placement():
    rng = np.random.default_rng(0)
    model, _ = plain_model(rng)
    with pytest.raises(ValueError, match=r"2 layers.* 3"):
        rollout(small_method(rng), model, skewed_batches(rng, 2, BATCHES))


def test_the_simulator_replays_one_layer_as_it_replays_a_plan():
    model, method, batches = random_layer(3, memory=True)
    _, served = decided(method, model, batches)
    layer, share = describe(model, "lowest_host"), np.asarray(method.share)
    plan = replay_plan(layer, share, batches, served=served)
    alone = replay_layer(layer, share[1], one_of(batches, 1, 2), served[1, 2])
    assert plan[1][2].total_s == alone.total_s
    assert alone.total_s != replay_layer(layer, share[1], one_of(batches, 1, 2)).total_s
