"""Slots by gradient through the model: never worse than Algorithm 1, and aware of what moving and reading cost."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.hardware import Die, Machine, node_memory
from jaxmoe.hardware.networks import wafers
from jaxmoe.latency import LayerCosts
from jaxmoe.latency.counts import AttentionTime, CountModel, node_loads, paths_of
from jaxmoe.latency.schedule import Overlap
from jaxmoe.placement.slots import EMPTY
from jaxmoe.placement.tokens import token_layout
from jaxmoe.policies.balancing import ShadowSlots, first_slots
from jaxmoe.policies.gradient_slots import GradientSlots
from jaxmoe.policies.migration import moves_between
from jaxmoe.relax import SmoothMax

NODES = 16


def model_of(memory: float) -> CountModel:
    topology = wafers((4, 4), (1, 1), 1e10, 0.0, 1e10, 0.0)
    machine = Machine(topology, Die(jnp.full(NODES, 1e12)), node_memory(jnp.full(NODES, memory), None))
    costs = LayerCosts(*(jnp.asarray(value) for value in (64.0, 64.0, 1e6, 2e6, 128.0, 3.0)))
    layout = token_layout("er", (4, 4), 4)
    before = AttentionTime(jnp.zeros(()), jnp.zeros(()), jnp.zeros(topology.num_links))
    return CountModel(machine, costs, jnp.asarray(layout.parts), paths_of(topology, layout.parts), before, Overlap())


def rule_of(model: CountModel, hop_seconds: float = 0.0) -> GradientSlots:
    distance = jnp.asarray(model.machine.topology.hop_counts(), jnp.float32)
    return GradientSlots(model, distance, jnp.asarray(1.0), jnp.asarray(hop_seconds), native=1, candidates=8)


@pytest.fixture(scope="module")
def loads() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).gamma(0.5, 100, (4, NODES)).astype(np.float32))


START = jnp.asarray(first_slots(4, NODES, NODES, 1))


def seconds(model: CountModel, slots: jax.Array, loads: jax.Array) -> np.ndarray:
    return np.asarray(jax.vmap(model)(slots, loads).total)


def test_never_slower_than_algorithm_1_and_no_slots(loads):
    for memory in (1e13, 1e11):
        model = model_of(memory)
        rule = rule_of(model)
        tuned = rule(loads, START)
        greedy = ShadowSlots(rule.distance, 1)(loads, START)
        best = np.minimum(seconds(model, greedy, loads), seconds(model, START, loads))
        assert (seconds(model, tuned, loads) <= best * (1 + 1e-5)).all()
        np.testing.assert_array_equal(tuned[:, :, 0], START[:, :, 0])


def test_compute_bound_it_balances(loads):
    tuned = rule_of(model_of(1e13))(loads, START)
    before, after = (np.asarray(jax.vmap(node_loads)(slots, loads)).max(axis=1) for slots in (START, tuned))
    assert (after < 0.8 * before).all()


def test_where_reading_weights_is_all_copies_are_left_out(loads):
    """A second expert doubles what a device reads, and there is nothing to gain."""
    slow = model_of(1e8)
    tuned = rule_of(slow)(loads, START)
    assert (np.asarray(tuned[:, :, 1]) == EMPTY).mean() > 0.9  # a device with next to no load may take one
    greedy = ShadowSlots(rule_of(slow).distance, 1)(loads, START)
    assert (seconds(slow, greedy, loads) > 1.5 * seconds(slow, tuned, loads)).all()


def test_the_dearer_moves_are_the_fewer_there_are(loads):
    model = model_of(1e13)
    distance = rule_of(model).distance
    hops = []
    for price in (0.0, 2e-6, 1.0):
        tuned = rule_of(model, price)(loads, START)
        hops.append(float(moves_between(START, tuned, NODES, distance, None).hops.sum()))
    assert hops[0] >= hops[1] >= hops[2] == 0


def test_gradient_of_the_objective_against_differences(loads):
    rule = rule_of(model_of(1e11), 1e-7)
    top = jax.lax.top_k(loads[0], 8)[1]
    far = rule._way(START[0, :, :1], START[0, :, 1:], top)

    def cost(weights):
        parts = jax.nn.softmax(weights, axis=-1)
        return 1e6 * rule._cost(parts, loads[0], START[0, :, :1], top, far, SmoothMax(jnp.asarray(0.1)))

    weights = jnp.asarray(np.random.default_rng(1).standard_normal((NODES, 1, 9)).astype(np.float32))
    way = jnp.asarray(np.random.default_rng(2).standard_normal((NODES, 1, 9)).astype(np.float32))
    told = float((jax.grad(cost)(weights) * way).sum())
    step = 1e-2
    found = (float(cost(weights + step * way)) - float(cost(weights - step * way))) / (2 * step)
    assert told == pytest.approx(found, rel=2e-2)


def test_numbers_of_the_rule_do_not_recompile(loads):
    rule = rule_of(model_of(1e13))
    call = jax.jit(lambda rule, loads: rule(loads, START))
    call(rule, loads)
    size = call._cache_size()
    call(replace(rule, hop_seconds=jnp.asarray(3e-6)), loads)
    assert call._cache_size() == size
