"""The policy as a whole: replayed, judged by the model, and borne out by the event simulator."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles import dynamic as oracle
from oracles.layer import Tokens
from small_dynamic import EXPERTS, NODES, quarters, skewed_batches

from jaxmoe.des import LayerDescription, fabric_of, replay_layer, replay_plan
from jaxmoe.latency import Decisions, evaluate
from jaxmoe.policies import (
    CrossLayer,
    MovingAverage,
    PerfectForecast,
    PreBroadcast,
    StaticForecast,
    replay,
)

LAYERS, BATCHES, SHAPE = 3, 4, (2, 3)
RULES = ("lowest_host", "fewest_hops")
EQUAL = dataclasses.replace(cases.COSTS, dispatch_bytes=8192.0)  # as many bytes as in combine


def small_policy(rng: np.random.Generator, forecast=None, allowed=2, limit=EXPERTS) -> PreBroadcast:
    return PreBroadcast(
        share=jnp.asarray(np.stack([quarters(rng) for _ in range(LAYERS)]), float),
        seconds_each=jnp.asarray(rng.choice([0.5, 1.0, 2.0], NODES)),
        forecast=PerfectForecast() if forecast is None else forecast,
        allowed=jnp.broadcast_to(jnp.asarray(allowed), (LAYERS,)),
        limit=limit,
    )


def one_of(batches, *at):
    return jax.tree.map(lambda leaf: leaf[at], batches)


@pytest.mark.parametrize("seed", range(3))
def test_decisions_equal_the_loops(seed):
    rng = np.random.default_rng(seed)
    policy = small_policy(rng, allowed=np.array([0, 2, 5]))
    batches = skewed_batches(rng, LAYERS, BATCHES)
    decisions = replay(policy, batches)
    seconds = np.asarray(policy.seconds_each)
    for layer, iteration in np.ndindex(LAYERS, BATCHES):
        share, batch = np.asarray(policy.share[layer]), one_of(batches, layer, iteration)
        tokens = Tokens(*(np.asarray(leaf) for leaf in (batch.experts, batch.token_draw, batch.draw, batch.weight)))
        loads = np.bincount(tokens.experts.ravel(), minlength=EXPERTS)
        broadcast = oracle.chosen_experts(share, loads, seconds, int(policy.allowed[layer]))
        assert set(np.flatnonzero(decisions.broadcast[layer, iteration]).tolist()) == broadcast
        expected = oracle.served_nodes(share, tokens, broadcast, seconds)
        np.testing.assert_array_equal(decisions.served[layer, iteration], expected)


def test_a_forecast_learns_from_iterations_before():
    # The frequencies it starts with favour expert 0, which no token chooses; from then on it knows better.
    rng = np.random.default_rng(1)
    batches = skewed_batches(rng, LAYERS, BATCHES)
    batches = dataclasses.replace(batches, experts=jnp.maximum(batches.experts, 1))
    wrong = jnp.zeros((LAYERS, EXPERTS)).at[:, 0].set(1.0)
    broadcast = replay(small_policy(rng, MovingAverage(wrong, jnp.asarray(1.0)), allowed=1), batches).broadcast
    assert broadcast[:, 0, 0].all()
    assert not broadcast[:, 1:, 0].any()
    assert (broadcast.sum(axis=-1) == 1).all()
    assert replay(small_policy(rng, StaticForecast(wrong), allowed=1), batches).broadcast[..., 0].all()


def random_layer(seed: int, rule: str = "lowest_host", memory: bool = False):
    """A machine with links and nodes of their own, its policy and batches.

    Links are alike enough for the busiest to be busy throughout its stage, as the model has it.
    """
    rng = np.random.default_rng(seed)
    machine = cases.random_machine(rng, SHAPE, memory=memory)
    machine.link_bandwidth, machine.link_latency = rng.uniform(2e9, 3e9, 14), rng.uniform(1e-8, 2e-8, 14)
    model = cases.layer_model(machine, rule=rule, costs=EQUAL)
    policy = small_policy(rng)
    each = model.costs.flops_per_token_expert / model.machine.die.flops
    return model, dataclasses.replace(policy, seconds_each=each), skewed_batches(rng, LAYERS, BATCHES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("memory", [False, True])
def test_broadcasting_nothing_is_the_static_placement(rule, memory):
    model, policy, batches = random_layer(0, rule, memory)
    policy = dataclasses.replace(policy, allowed=jnp.zeros(LAYERS, int))
    decisions = replay(policy, batches)
    assert not decisions.broadcast.any()
    assert (decisions.served == -1).all()
    latency, static = (
        evaluate(model, policy.share, batches, served=decisions.served),
        evaluate(model, policy.share, batches),
    )
    for part in ("compute", "dispatch", "combine", "total"):
        np.testing.assert_array_equal(getattr(latency, part), getattr(static, part), err_msg=part)


@pytest.mark.parametrize("seed", range(4))
def test_broadcasting_all_evens_out_compute(seed):
    # Not so in general: tokens are served in their order, and a choice is not taken back. Skewed loads leave room.
    model, policy, batches = random_layer(seed)
    decisions = replay(dataclasses.replace(policy, allowed=jnp.full(LAYERS, EXPERTS)), batches)
    chosen = (batches.choices(EXPERTS).sum(axis=2)) > 0
    np.testing.assert_array_equal(decisions.broadcast, chosen)
    dynamic = evaluate(model, policy.share, batches, served=decisions.served)
    assert (dynamic.compute <= evaluate(model, policy.share, batches).compute).all()


@eqx.filter_jit
def detailed(model, share, batches, served):
    """Times of every layer and batch, with busy times of each."""

    def one(share, batch, served):
        return model.decided(Decisions(share, served=served), batch)

    return jax.vmap(jax.vmap(one, (None, 0, 0)))(share, batches, served)


def describe(model, rule: str) -> LayerDescription:
    die, memory = model.machine.die, model.machine.memory
    return LayerDescription(
        fabric=fabric_of(model.machine.topology, float(model.time_model.chunk_bytes)),
        flops=np.asarray(die.flops),
        memory_bandwidth=np.asarray(memory[0].bandwidth) if memory else None,
        message_bytes=float(model.costs.combine_bytes),
        expert_bytes=float(model.costs.expert_bytes),
        flops_per_token_expert=float(model.costs.flops_per_token_expert),
        mode="sharded",
        gather=rule,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_the_model_is_borne_out(seed, memory, rule):
    model, policy, batches = random_layer(seed, rule, memory)
    served = replay(policy, batches).served
    told = detailed(model, policy.share, batches, served)
    layer = describe(model, rule)
    seen = replay_plan(layer, np.asarray(policy.share), batches, served=np.asarray(served))
    for at in np.ndindex(LAYERS, BATCHES):
        one, simulated = one_of(told, *at), seen[at[0]][at[1]]
        np.testing.assert_allclose(one.node_time, simulated.node_busy, rtol=1e-5)
        np.testing.assert_allclose(one.dispatch_link_time, simulated.dispatch_link_busy, rtol=1e-5)
        np.testing.assert_allclose(one.combine_link_time, simulated.combine_link_busy, rtol=1e-5)
        np.testing.assert_allclose(one.total, simulated.total_s, rtol=0.03)


def test_memory_of_broadcast_experts_by_hand():
    # Three nodes in a row: expert 0 is on node 0, expert 1 half on node 1 and half on node 2. Expert 0 is
    # served twice at node 1, and once at node 0: each reads it whole. Nobody reads it as placed.
    machine = cases.random_machine(np.random.default_rng(0), (1, 3), memory=True)
    machine.memory_bandwidth[:] = 1e6
    share = jnp.array([[1.0, 0, 0], [0, 0.5, 0.5], [0, 0, 1]])
    tokens = Tokens(np.array([[0, 1], [0, 1], [0, -1]]), np.zeros(3), np.zeros((3, 2)), np.ones(3))
    served = jnp.array([[1, -1], [1, -1], [0, -1]])
    model, decisions = cases.layer_model(machine, costs=EQUAL), Decisions(share, served=served)
    latency = eqx.filter_jit(lambda model, *args: model.decided(*args))(model, decisions, cases.batch(tokens))
    vectors = np.array([1, 2, 2]) * 2 * 8192
    np.testing.assert_allclose(latency.node_time, (np.array([1, 1.5, 0.5]) * 3e6 + vectors) / 1e6, rtol=1e-6)


def test_vmap_over_policies_equals_one_by_one():
    rng = np.random.default_rng(5)
    batches = skewed_batches(rng, LAYERS, BATCHES)
    frequency = jnp.full((LAYERS, EXPERTS), 1 / EXPERTS)
    rows = jnp.asarray(rng.dirichlet(np.ones(EXPERTS), (LAYERS, EXPERTS)), float)

    def policy(allowed, rate):
        forecast = CrossLayer(rows, MovingAverage(frequency, rate))
        return small_policy(np.random.default_rng(6), forecast, allowed=allowed, limit=4)

    settings = [(0, 0.1), (2, 0.5), (4, 0.9)]
    several = [policy(jnp.asarray(allowed), jnp.asarray(rate)) for allowed, rate in settings]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    together = eqx.filter_jit(eqx.filter_vmap(replay, in_axes=(eqx.if_array(0), None)))(stacked, batches)
    assert together.served.shape == (3, LAYERS, BATCHES, *batches.experts.shape[2:])
    for row, one in enumerate(several):
        alone = replay(one, batches)
        np.testing.assert_array_equal(together.served[row], alone.served)
        np.testing.assert_array_equal(together.broadcast[row], alone.broadcast)


def test_other_numbers_do_not_compile_anew():
    compiled = []

    @eqx.filter_jit
    def run(policy, batches):
        compiled.append(None)
        return replay(policy, batches)

    for seed, allowed in enumerate((1, 3, 5)):
        rng = np.random.default_rng(seed)
        run(small_policy(rng, allowed=allowed), skewed_batches(rng, LAYERS, BATCHES))
    assert len(compiled) == 1


def test_a_batch_must_have_the_layers_of_the_placement():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"2 layers.* 3"):
        replay(small_policy(rng), skewed_batches(rng, 2, BATCHES))


def test_the_simulator_replays_one_layer_as_it_replays_a_plan():
    model, policy, batches = random_layer(3)
    served = np.asarray(replay(policy, batches).served)
    layer, share = describe(model, "lowest_host"), np.asarray(policy.share)
    plan = replay_plan(layer, share, batches, served=served)
    alone = replay_layer(layer, share[1], one_of(batches, 1, 2), served[1, 2])
    assert plan[1][2].total_s == alone.total_s
    assert alone.total_s != replay_layer(layer, share[1], one_of(batches, 1, 2)).total_s
