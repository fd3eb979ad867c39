"""Balancers over iterations on counts: what moves, when it serves, what it costs; errors."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats, full
from oracles.slots import in_order
from oracles.stages import known_attention

from jaxmoe.des.layers_in_turn import moves as loop_moves
from jaxmoe.engine import LayerCosts, rollout
from jaxmoe.engine.counts import CountModel, paths_of
from jaxmoe.engine.schedule import Pipelined, Serial
from jaxmoe.hardware import Die, Machine, node_memory
from jaxmoe.hardware.networks import wafers
from jaxmoe.methods.forecast import MovingAverage, PerfectForecast
from jaxmoe.methods.moentwine import migration
from jaxmoe.methods.moentwine.balancing import (
    Balancer,
    BalancerError,
    Eplb,
    KeepSlots,
    ShadowSlots,
    check_slots_fit,
    facts_alone,
)
from jaxmoe.methods.moentwine.migration import Windows, edge_entries, iterations_needed
from jaxmoe.network import link_loads
from jaxmoe.placement.slots import excess_over_mean, node_loads
from jaxmoe.placement.token_layout import links_inside_domains, token_layout

SHAPE, NODES, LAYERS = (4, 4), 16, 3
# Compiled whole: step by step, every step of every shape is compiled by itself.
moves_between = eqx.filter_jit(migration.moves_between)


def balanced_rollout(balancer, model, loads):
    """Times and facts [step, layer] of a balancer over the loads of iterations."""
    return rollout(balancer, model, jnp.swapaxes(loads, 0, 1), keep=facts_alone)


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_model(bandwidth=1e9, before=(1e-5, 2e-6)):
    topology = wafers(SHAPE, (1, 1), bandwidth, 0.0, bandwidth, 0.0)
    memory = node_memory(full(NODES, 1e10), full(NODES, 1e6))
    machine = Machine(topology, Die(full(NODES, 1e12)), memory)
    costs = LayerCosts(*(jnp.asarray(value) for value in (64.0, 32.0, 5e3, 1e6, 128.0, 3.0)))
    layout = token_layout("er", SHAPE, 4)
    attention = known_attention(jnp.asarray(before[0]), jnp.asarray(before[1]), full(topology.num_links, 0.0))
    paths = paths_of(topology, layout.parts)
    return CountModel(machine, costs, jnp.asarray(layout.parts), paths, attention, Serial())


@eqx.filter_jit
def timed(model, slots, loads):
    return model(slots, loads)


def hops(model):
    return jnp.asarray(model.machine.topology.hop_counts(), jnp.float32)


def inside(model):
    return links_inside_domains(token_layout("er", SHAPE, 4), model.machine.topology.link_ends)


def loads_of(steps=12, seed=0):
    """Loads [step, layer, expert] in which one expert is far above the others, from the middle on another one."""
    rng = np.random.default_rng(seed)
    loads = rng.integers(10, 20, (steps, LAYERS, NODES)).astype(np.float32)
    loads[: steps // 2, :, 5] = 200
    loads[steps // 2 :, :, 9] = 200
    return jnp.asarray(loads)


def balancer_of(model, rule, alpha=0.1, beta=0.0, windows=None, forecast=None, shadow=1, entry=None):
    forecast = forecast or MovingAverage(full((LAYERS, NODES), 1 / NODES), jnp.asarray(1.0))
    start = jnp.asarray(in_order(LAYERS, NODES, NODES, shadow))
    numbers = (jnp.asarray(float(alpha)), jnp.asarray(float(beta)))
    sizes = {"expert_bytes": model.costs.expert_bytes, "experts": NODES}
    return Balancer(rule, forecast, start, hops(model), *numbers, windows, entry, **sizes)


# Moves.


def test_moves_come_from_the_nearest_copy_by_hand(model):
    before = jnp.full((1, NODES, 2), -1).at[0, :, 0].set(jnp.arange(NODES)).at[0, 15, 1].set(0)
    after = before.at[0, 14, 1].set(0).at[0, 1, 1].set(0)
    moves = moves_between(before, after, hops(model), None)
    expected = np.zeros((NODES, NODES))
    expected[15, 14] = expected[0, 1] = 1  # each from its neighbour, not from the native copy at 0 for both
    np.testing.assert_array_equal(moves.traffic, expected)
    assert float(moves.hops[0]) == 2
    assert float(moves.per_layer[0]) == 2
    seconds = link_loads(model.machine.topology, moves.traffic) * 5e3 / model.machine.topology.link_rate
    np.testing.assert_allclose(np.sort(seconds)[-3:], [0, 5e-6, 5e-6], rtol=1e-6)


def test_moves_from_the_edge(model):
    entry = edge_entries(model.machine.topology)
    assert entry[5] in (1, 4)
    assert entry[3] == 3
    before = jnp.asarray(in_order(1, NODES, NODES, 1))
    moves = moves_between(before, before.at[0, 5, 1].set(9), hops(model), jnp.asarray(entry))
    assert float(moves.traffic[entry[5], 5]) == 1
    assert float(moves.hops[0]) == 1


def test_the_same_expert_twice_on_a_node_moves_once(model):
    before = jnp.asarray(in_order(1, NODES, NODES, 2))
    after = before.at[0, 3, 1].set(7).at[0, 3, 2].set(7)
    assert float(moves_between(before, after, hops(model), None).per_layer[0]) == 1


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_moves_of_many_rounds_against_loops(model, monkeypatch, at_once):
    monkeypatch.setattr(migration, "MOVES_AT_ONCE", at_once)
    rng = np.random.default_rng(at_once)
    before = np.concatenate([in_order(LAYERS, NODES, NODES, 0), rng.integers(-1, NODES, (LAYERS, NODES, 2))], axis=2)
    after = rng.integers(-1, NODES, before.shape)
    after[1] = before[1]
    distance = np.asarray(model.machine.topology.hop_counts())
    traffic, far = np.zeros((NODES, NODES)), np.zeros(LAYERS)
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        for source, destination in loop_moves(old, new, distance):
            traffic[source, destination] += 1
            far[layer] += distance[source, destination]
    told = jax.jit(lambda *slots: migration.moves_between(*slots, hops(model), None))(
        jnp.asarray(before), jnp.asarray(after)
    )
    np.testing.assert_array_equal(told.traffic, traffic)
    np.testing.assert_array_equal(told.hops, far)
    assert float(told.per_layer[1]) == 0
    assert float(told.per_layer.sum()) == traffic.sum() > 40


def test_weights_wait_for_the_link_with_the_least_idle_time():
    assert float(iterations_needed(floats([1.0, 3.0, 0.0]), floats([1.0, 2.0, 0.0]))) == 1.5
    assert float(iterations_needed(floats([1.0]), floats([0.0]))) == np.inf


# Balancers.


def test_no_balancer_is_the_static_placement(model):
    loads = loads_of()
    ran = balanced_rollout(balancer_of(model, KeepSlots()), model, loads)
    slots = jnp.asarray(in_order(1, NODES, NODES, 1))[0]
    alone = jax.jit(jax.vmap(jax.vmap(lambda given: model(slots, given))))(loads)
    np.testing.assert_allclose(ran.time.total, alone.total, rtol=1e-6)
    np.testing.assert_allclose(
        ran.kept["excess"], np.asarray(loads).max(axis=2) / np.asarray(loads).mean(axis=2) - 1, rtol=1e-5
    )


@pytest.mark.parametrize("choice", ["nearest", "coldest"])
def test_copies_lower_the_excess_an_iteration_after_the_change(model, choice):
    ran = balanced_rollout(balancer_of(model, ShadowSlots(hops(model), 1, choice)), model, loads_of())
    excess = np.asarray(ran.kept["excess"]).mean(axis=1)
    assert excess[0] > 4  # nothing is known yet
    assert excess[1:6].max() < 1.5
    assert excess[6] > 4  # the change cannot be foreseen
    assert excess[7:].max() < 1.5


def test_an_oracle_is_not_surprised(model):
    oracle = balancer_of(model, ShadowSlots(hops(model), 1), forecast=PerfectForecast())
    assert float(balanced_rollout(oracle, model, loads_of()).kept["excess"].max()) < 1.5


def test_invasive_waits_for_the_busiest_link(model):
    ran = balanced_rollout(balancer_of(model, ShadowSlots(hops(model), 1)), model, loads_of())
    waits = np.asarray(ran.time.stages["migration"]).sum(axis=1)
    moved = np.asarray(ran.kept["experts_moved"]).sum(axis=1)
    assert (waits[moved > 0] >= 5e-6 * 0.999).all()  # at least one expert over one link
    assert (waits[moved == 0] == 0).all()
    np.testing.assert_allclose(waits, np.asarray(ran.kept["needed"])[:, 0], rtol=1e-5)


def test_beta_keeps_interruptions_apart(model):
    ran = balanced_rollout(balancer_of(model, ShadowSlots(hops(model), 1), beta=3), model, loads_of(24))
    begun = np.flatnonzero(np.asarray(ran.kept["experts_moved"]).sum(axis=1))
    assert len(begun) > 1
    assert (np.diff(begun) > 3).all()


def test_alpha_above_all_imbalance_never_moves(model):
    ran = balanced_rollout(balancer_of(model, ShadowSlots(hops(model), 1), alpha=1e3), model, loads_of())
    assert float(ran.kept["experts_moved"].sum()) == 0


def test_non_invasive_costs_nothing_and_serves_when_all_has_arrived():
    model, loads = make_model(before=(1e-5, 2e-5)), loads_of(20)
    windows, rule = Windows.alternating(inside(model)), ShadowSlots(hops(model), 1)
    hidden = balanced_rollout(balancer_of(model, rule, windows=windows), model, loads)
    waiting = balanced_rollout(balancer_of(model, rule), model, loads)
    assert float(hidden.time.stages["migration"].max()) == 0
    assert float(waiting.time.stages["migration"].sum()) > 0
    # Weights need a link between domains for 95 us. It has no other traffic: an all-to-all leaves it idle throughout.
    begun = int(np.flatnonzero(np.asarray(hidden.kept["needed"][:, 0]))[0])
    np.testing.assert_allclose(hidden.kept["needed"][begun], 95e-6, rtol=1e-5)
    idle = sum(float(hidden.time.stages[name][begun].sum()) for name in ("dispatch", "combine"))
    arrival = begun + int(np.ceil(95e-6 / idle))
    assert arrival == begun + 4
    excess = np.asarray(hidden.kept["excess"]).mean(axis=1)
    assert excess[begun:arrival].min() > 4
    assert excess[arrival] < 1.5


def test_links_that_are_never_idle_never_deliver(model):
    windows = Windows(jnp.zeros(48, bool), jnp.zeros(48, bool))
    ran = balanced_rollout(balancer_of(model, ShadowSlots(hops(model), 1), windows=windows), model, loads_of())
    assert float(ran.kept["excess"].mean(axis=1).min()) > 4


def test_eplb_balances_all_slots_anew(model):
    ran = balanced_rollout(balancer_of(model, Eplb()), model, loads_of())
    shadow = balanced_rollout(balancer_of(model, ShadowSlots(hops(model), 1)), model, loads_of())
    assert np.asarray(ran.kept["excess"])[1:6].mean() < 1
    assert float(ran.kept["expert_hops"].sum()) > 2 * float(shadow.kept["expert_hops"].sum())


def test_eplb_renamed_balances_alike_and_moves_less(model):
    """Loads that hardly change: packs stay nearly the same, but EPLB numbers them anew."""
    loads = loads_of(12).at[6:].set(loads_of(6, seed=1)[:1])
    plain, renamed = (
        balanced_rollout(balancer_of(model, Eplb(renamed=renamed)), model, loads) for renamed in (False, True)
    )
    np.testing.assert_allclose(renamed.kept["excess"], plain.kept["excess"], rtol=1e-5)
    assert float(renamed.kept["experts_moved"].sum()) < 0.8 * float(plain.kept["experts_moved"].sum())


def test_groups_alike_and_group_by_group_agree(model):
    slots = jnp.asarray(in_order(1, NODES, NODES, 1))[0].at[2, 1].set(5)
    loads = loads_of(1)[0, 0]
    whole, groups = timed(model, slots, loads), timed(model, slots, jnp.tile(loads / 4, (4, 1)))
    np.testing.assert_allclose(groups.total, whole.total, rtol=1e-5)
    np.testing.assert_allclose(groups.busy["dispatch"]["link"], whole.busy["dispatch"]["link"], rtol=1e-4, atol=1e-12)


def test_times_by_hand(model):
    """One expert with 16 choices, four from each group, on node 5 of domain {0, 1, 4, 5}."""
    loads = full(NODES, 0.0).at[5].set(16.0)
    time = timed(model, jnp.asarray(in_order(1, NODES, NODES, 1)[0]), loads)
    # Four come from each of nodes 0, 1, 4 over links into node 5: those of 0 and 1 or 4 share the last link.
    np.testing.assert_allclose(time.stages["dispatch"], 8 * 32 / 1e9, rtol=1e-5)
    np.testing.assert_allclose(time.stages["combine"], 8 * 64 / 1e9, rtol=1e-5)
    np.testing.assert_allclose(time.stages["compute"], max(16 * 1e6 / 1e12, (5e3 + 16 * 96) / 1e10), rtol=1e-5)
    np.testing.assert_allclose(
        time.total, 12e-6 + sum(float(time.stages[s]) for s in ("dispatch", "compute", "combine")), rtol=1e-5
    )


def test_micro_batches_take_no_longer_than_one_batch(model):
    loads, slots = loads_of(1)[0, 0], jnp.asarray(in_order(1, NODES, NODES, 1))[0]
    serial, piped = timed(model, slots, loads), timed(replace(model, schedule=Pipelined(4)), slots, loads)
    np.testing.assert_allclose(piped.stages["compute"], serial.stages["compute"])
    assert float(piped.total) < float(serial.total)
    assert float(piped.total) > float(serial.stages["attention"] + serial.stages["compute"])


def test_derivatives_with_respect_to_bandwidth_and_loads():
    loads = loads_of(1)[0, 0]
    slots = jnp.asarray(in_order(1, NODES, NODES, 1))[0]

    @jax.jit
    def seconds(rate):
        return make_model(bandwidth=rate)(slots, loads).total

    slope = jax.jit(jax.grad(seconds))(1e9)
    step = 1e6
    difference = (float(seconds(1e9 + step)) - float(seconds(1e9 - step))) / (2 * step)
    np.testing.assert_allclose(float(slope), difference, rtol=1e-2)
    assert float(jax.jit(jax.grad(lambda given: make_model()(slots, given).total))(loads)[9]) > 0


def test_imbalance_of_eq_2_by_hand():
    slots = jnp.asarray([[0, -1], [1, 0]])
    np.testing.assert_allclose(node_loads(slots, floats([6.0, 2.0])), [3, 5])
    assert float(excess_over_mean(floats([3.0, 5.0]))) == pytest.approx(0.25)
    assert float(excess_over_mean(full(2, 0.0))) == 0


@pytest.mark.parametrize(("alpha", "beta", "name"), [(-1, 0, "alpha is -1"), (0, -2, "beta is -2")])
def test_negative_thresholds(model, alpha, beta, name):
    with pytest.raises(BalancerError, match=name):
        balancer_of(model, KeepSlots(), alpha, beta)


def test_slots_that_do_not_fit(model):
    check_slots_fit(in_order(LAYERS, NODES, NODES, 1), 5e3, model.machine)
    with pytest.raises(BalancerError, match=r"67 slots on each of 16 nodes in 3 layers .* at most 66 slots"):
        check_slots_fit(in_order(LAYERS, NODES, NODES, 66), 5e3, model.machine)
    # 66 fit alone, but not while another one arrives beside them.
    check_slots_fit(in_order(LAYERS, NODES, NODES, 65), 5e3, model.machine)
    with pytest.raises(BalancerError, match=r"room for 1 more that arrive meanwhile, .* at most 65 slots"):
        check_slots_fit(in_order(LAYERS, NODES, NODES, 65), 5e3, model.machine, arriving=1)


def test_first_slots_of_few_and_many_experts():
    np.testing.assert_array_equal(in_order(1, 4, 2, 1)[0], [[0, 1, -1], [2, 3, -1]])
    np.testing.assert_array_equal(in_order(1, 2, 4, 0)[0], [[0], [-1], [1], [-1]])
