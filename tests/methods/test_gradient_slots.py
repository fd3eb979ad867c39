"""Slots tuned through the model: never worse than Algorithm 1, and aware of what moving and reading cost."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats, full
from oracles.slots import in_order
from oracles.stages import known_attention

from jaxmoe.engine import LayerCosts
from jaxmoe.engine.counts import CountModel, paths_of
from jaxmoe.engine.schedule import Overlap
from jaxmoe.hardware import Die, Machine, node_memory
from jaxmoe.hardware.networks import wafers
from jaxmoe.methods.moentwine import gradient_slots, migration
from jaxmoe.methods.moentwine.balancing import Eplb, ShadowSlots
from jaxmoe.methods.moentwine.gradient_slots import GradientSlots, hop_price
from jaxmoe.placement.slots import EMPTY, excess_over_mean, node_loads
from jaxmoe.placement.token_layout import token_layout
from jaxmoe.relax import HardMax, SmoothMax

NODES = 16
# Compiled whole: step by step, every step of every shape is compiled by itself.
copies_by_load, deal_copies = jax.jit(gradient_slots.copies_by_load), jax.jit(gradient_slots.deal_copies)
moves_between = eqx.filter_jit(migration.moves_between)


def model_of(memory: float, corner: float = 1e10) -> CountModel:
    """Links of 1e10 B/s, but those of the corner."""
    topology = wafers((4, 4), (1, 1), 1e10, 0.0, 1e10, 0.0)
    at_corner = (topology.link_ends == 0).any(axis=1)
    topology = replace(topology, link_bandwidth=jnp.where(at_corner, corner, topology.link_bandwidth))
    machine = Machine(topology, Die(full(NODES, 1e12)), node_memory(full(NODES, memory), None))
    costs = LayerCosts(*(jnp.asarray(value) for value in (64.0, 64.0, 1e6, 2e6, 128.0, 3.0)))
    layout = token_layout("er", (4, 4), 4)
    before = known_attention(jnp.asarray(0.0), jnp.asarray(0.0), full(topology.num_links, 0.0))
    return CountModel(machine, costs, jnp.asarray(layout.parts), paths_of(topology, layout.parts), before, Overlap())


def rule_of(model: CountModel, hop_seconds: float = 0.0, **settings) -> GradientSlots:
    distance = jnp.asarray(model.machine.topology.hop_counts(), jnp.float32)
    return GradientSlots(model, distance, jnp.asarray(1.0), jnp.asarray(hop_seconds), native=1, **settings)


@eqx.filter_jit
def chosen(rule, loads, resident):
    return rule(loads, resident)


@pytest.fixture(scope="module")
def loads() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).gamma(0.5, 100, (4, NODES)).astype(np.float32))


START = jnp.asarray(in_order(4, NODES, NODES, 1))
DISTANCE = rule_of(model_of(1e13)).distance


@eqx.filter_jit
def total(model: CountModel, slots: jax.Array, loads: jax.Array) -> jax.Array:
    return jax.vmap(model)(slots, loads).total


def seconds(model: CountModel, slots: jax.Array, loads: jax.Array) -> np.ndarray:
    return np.asarray(total(model, slots, loads))


EXCESS = jax.jit(lambda slots, loads: excess_over_mean(jax.vmap(node_loads)(slots, loads)))
LOADS = jax.jit(jax.vmap(node_loads))


def excess(slots: jax.Array, loads: jax.Array) -> np.ndarray:
    return np.asarray(EXCESS(slots, loads))


# Copies and places, by hand.


def test_copies_go_to_whose_copies_have_the_most_to_do():
    none, each = jnp.full((4, 1), EMPTY), jnp.arange(5)
    copies = copies_by_load(floats([12.0, 5.0, 4.0, 3.0]), none, jnp.asarray(0.0), each)
    np.testing.assert_array_equal(copies[:, 0], [1, 2, 3, 3, 4])  # 12, 6, then 5 of the second comes first
    np.testing.assert_array_equal(copies[:, 1], [1, 1, 1, 2, 2])
    # A copy that is there already counts for more by the slack: 4.6 of the third before 5, and before 4.
    held = none.at[0, 0].set(2)
    kept = copies_by_load(floats([12.0, 5.0, 4.0, 3.0]), held, jnp.asarray(0.3), each)
    np.testing.assert_array_equal(kept[:, 2], [1, 1, 1, 2, 2])
    np.testing.assert_array_equal(kept[3], [3, 1, 2, 1])
    some = copies_by_load(floats([12.0, 5.0, 4.0, 3.0]), held, jnp.asarray(0.3), jnp.array([1, 3]))
    np.testing.assert_array_equal(some, kept[jnp.array([1, 3])])


def test_no_expert_gets_more_copies_than_nodes():
    copies = copies_by_load(floats([100.0, 1.0]), jnp.full((2, 2), EMPTY), jnp.asarray(0.0), jnp.arange(5))
    np.testing.assert_array_equal(copies, [[1, 1], [2, 1], [2, 2], [2, 2], [2, 2]])


def dealt(copies, limit, loads, resident):
    """Four nodes in a line, expert e native on node e."""
    line = jnp.abs(jnp.arange(4.0)[:, None] - jnp.arange(4.0))
    given = (jnp.asarray(each) for each in (copies, limit, loads))
    return deal_copies(*given, jnp.arange(4)[:, None], jnp.asarray(resident)[:, None], line)[:, 0].tolist()


def test_copies_go_to_the_nearest_node_that_they_fit():
    # Halves of 4 beside 4, 3, 1: the nearest node has no room, the next has.
    assert dealt([2, 1, 1, 1], [5.5] * 4, [8.0, 4.0, 1.5, 1.0], [EMPTY] * 4) == [EMPTY, EMPTY, 0, EMPTY]
    assert dealt([2, 1, 1, 1], [8.5] * 4, [8.0, 4.0, 1.5, 1.0], [EMPTY] * 4) == [EMPTY, 0, EMPTY, EMPTY]


def test_copies_stay_where_they_fit_and_leave_where_not():
    assert dealt([2, 1, 1, 1], [5.5] * 4, [8.0, 4.0, 1.5, 1.0], [EMPTY, EMPTY, EMPTY, 0]) == [EMPTY, EMPTY, EMPTY, 0]
    assert dealt([2, 1, 1, 1], [5.5] * 4, [8.0, 4.0, 1.5, 1.0], [EMPTY, 0, EMPTY, EMPTY]) == [EMPTY, EMPTY, 0, EMPTY]


def test_a_heavy_copy_takes_the_slot_of_a_lighter_one_that_fits_elsewhere():
    # Only node 3 has room for a copy of 0 (4 beside 1), and holds one of 1 (2), which fits beside 3 on node 2.
    loads, limit = [8.0, 4.0, 3.0, 1.0], [5.1, 5.1, 5.1, 5.1]
    assert dealt([2, 2, 1, 1], limit, loads, [EMPTY, EMPTY, EMPTY, 1]) == [EMPTY, EMPTY, 1, 0]


def test_what_fits_nowhere_goes_where_least_is_over():
    assert dealt([2, 1, 1, 1], [3.0] * 4, [8.0, 4.0, 2.0, 1.0], [EMPTY] * 4) == [EMPTY, EMPTY, EMPTY, 0]


# The rule.


def test_never_slower_than_algorithm_1_and_no_slots(loads):
    for memory in (1e13, 1e11):
        model = model_of(memory)
        tuned = chosen(rule_of(model), loads, START)
        greedy = chosen(ShadowSlots(DISTANCE, 1), loads, START)
        best = np.minimum(seconds(model, greedy, loads), seconds(model, START, loads))
        assert (seconds(model, tuned, loads) <= best * (1 + 1e-5)).all()
        np.testing.assert_array_equal(tuned[:, :, 0], START[:, :, 0])


def test_compute_bound_it_balances(loads):
    tuned = chosen(rule_of(model_of(1e13)), loads, START)
    before, after = (np.asarray(LOADS(slots, loads)).max(axis=1) for slots in (START, tuned))
    assert (after < 0.8 * before).all()


def test_where_reading_weights_is_all_copies_are_left_out(loads):
    """A second expert doubles what a device reads, and there is nothing to gain."""
    slow = model_of(1e8)
    tuned = chosen(rule_of(slow), loads, START)
    greedy = chosen(ShadowSlots(DISTANCE, 1), loads, START)
    assert (seconds(slow, greedy, loads) > 1.5 * seconds(slow, tuned, loads)).all()


def test_the_dearer_moves_are_the_fewer_there_are(loads):
    model = model_of(1e13)
    hops = []
    for price in (0.0, 2e-6, 1.0):
        tuned = chosen(rule_of(model, price), loads, START)
        hops.append(float(moves_between(START, tuned, DISTANCE, None).hops.sum()))
    assert hops[0] >= hops[1] >= hops[2] == 0


def test_it_balances_as_eplb_does_and_moves_less_than_half(loads):
    """Loads that drift, decision after decision."""
    rule = rule_of(model_of(1e13), 1e-9, objective="loads")
    slots = {"eplb": START, "gradient": START}
    moved, worst = dict.fromkeys(slots, 0.0), {name: [] for name in slots}
    rng = np.random.default_rng(1)
    for _ in range(6):
        loads = loads * jnp.asarray(rng.uniform(0.8, 1.25, loads.shape), jnp.float32) + 20
        for name, each in (("eplb", Eplb()), ("gradient", rule)):
            after = chosen(each, loads, slots[name])
            moved[name] += float(moves_between(slots[name], after, DISTANCE, None).per_layer.sum())
            worst[name].append(excess(after, loads).mean())
            slots[name] = after
    assert moved["gradient"] < 0.5 * moved["eplb"]
    assert np.mean(worst["gradient"]) < np.mean(worst["eplb"]) + 0.05


# Budgets.


def test_budgets_relieve_the_node_whose_links_are_slow():
    budgets = jax.jit(lambda rule: rule.budgets(jnp.asarray(1600.0)))
    slow = rule_of(model_of(1e13, corner=1e7))
    budget = budgets(slow)
    assert float(budget.sum()) == pytest.approx(1, rel=1e-5)
    assert float(budget[0]) == pytest.approx(float(budget.min()), rel=1e-5)  # its neighbours share the slow links
    relaxed = jax.jit(lambda loads: slow.relaxed(loads, HardMax()))
    assert float(relaxed(1600 * budget)) < 0.9 * float(relaxed(full(NODES, 100.0)))
    # Where nodes compute longer than links are busy, none should have more than any other.
    np.testing.assert_allclose(budgets(rule_of(model_of(1e13))), 1 / NODES, rtol=1e-5)


def test_gradient_of_the_relaxed_layer_against_differences():
    rule = rule_of(model_of(1e11, corner=1e7))

    @jax.jit
    def cost(weights):
        return jnp.log(rule.relaxed(1600 * jax.nn.softmax(weights), SmoothMax(jnp.asarray(0.1))))

    rng = np.random.default_rng(1)
    weights, way = (jnp.asarray(rng.standard_normal(NODES).astype(np.float32)) for _ in range(2))
    told, step = float((jax.jit(jax.grad(cost))(weights) * way).sum()), 1e-2
    found = (float(cost(weights + step * way)) - float(cost(weights - step * way))) / (2 * step)
    assert told == pytest.approx(found, rel=2e-2)


def test_a_hop_keeps_all_links_busy_together():
    # 48 links of 1e10 B/s; the busiest one has five times the mean.
    assert float(hop_price(model_of(1e13).machine, jnp.asarray(4.8e11))) == pytest.approx(5.0)


def test_numbers_of_the_rule_do_not_recompile(loads):
    rule = rule_of(model_of(1e13))
    call = jax.jit(lambda rule, loads: rule(loads, START))
    call(rule, loads)
    size = call._cache_size()
    call(replace(rule, hop_seconds=jnp.asarray(3e-6)), loads)
    assert call._cache_size() == size
