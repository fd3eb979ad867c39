"""Slots tuned for the time of a layer: the rules of choice, both objectives alike, optima, moving, and refusals."""

from dataclasses import replace
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.engine import Decisions, Layer, LayerCosts
from jaxmoe.engine.copies import ReplicaModel, replica_model
from jaxmoe.hardware import Die, Machine, Mesh, clusters, node_memory
from jaxmoe.network import Congestion, build_exchange
from jaxmoe.placement.placement import PlanError
from jaxmoe.placement.replica_choice import REPLICA_CHOICES, ranked_distance, serving_nodes, serving_parts
from jaxmoe.placement.slots import copies_of_slots
from jaxmoe.traces import Batch
from jaxmoe.tune.replica_placement import ReplicaProblem, rounded, slot_values, spread_slots, tuned_slots
from jaxmoe.tune.replica_search import _begun, _p95, _times
from jaxmoe.tune.replica_weights import weights_of

NODES, EXPERTS = 4, 6
HOPS = np.array([[0, 1, 1, 2], [1, 0, 2, 1], [1, 2, 0, 1], [2, 1, 1, 0]])


PARTS = jax.jit(serving_parts, static_argnums=(2, 3))


@eqx.filter_jit
def priced(model, *given):
    return model(*given)


def layer_model(network: str = "mesh", ports: bool = False) -> Layer:
    if network == "mesh":
        topology = Mesh(jnp.full(8, 1e9), jnp.zeros(8), shape=(2, 2))
    else:
        topology = clusters(2, 2, 4e9, 0.0, 1e9, 0.0)
    if ports:
        topology = replace(topology, injection_bandwidth=jnp.full(4, 1.5e9), ejection_bandwidth=jnp.full(4, 0.7e9))
    machine = Machine(topology, Die(jnp.full(NODES, 1e12)), node_memory(jnp.full(NODES, 1e12), None))
    costs = LayerCosts(*(jnp.asarray(value) for value in (64.0, 32.0, 1e6, 2e6, 128.0, 3.0)))
    model = Congestion(jnp.asarray(64.0), cut_through=True)
    return Layer(machine, costs, model, build_exchange("token_home", topology), "sharded")


@pytest.fixture(scope="module")
def loads() -> np.ndarray:
    return np.random.default_rng(0).gamma(0.7, 200, (2, 3, EXPERTS)).round()


SLOTS = np.array([[0, 1, 0, 2, 3, 4, 5, 1], [0, 1, 2, 3, 4, 5, 0, 2]])


def held_of(slots: np.ndarray) -> jax.Array:
    return jnp.asarray(copies_of_slots(slots, EXPERTS, NODES), jnp.float32)


def parts_of(held: np.ndarray, choice: str, hops: np.ndarray = HOPS) -> np.ndarray:
    tier, tiers = ranked_distance(hops)
    return np.asarray(PARTS(jnp.asarray(held, jnp.float32), jnp.asarray(tier), tiers, choice))


def test_who_serves_by_hand():
    held = np.array([[1, 0, 0, 1]])  # at both ends of a diagonal
    assert parts_of(held, "even")[0].tolist() == [[0.5, 0, 0, 0.5]] * 4
    # Nodes 1 and 2 are as near to both.
    assert parts_of(held, "nearest")[0].tolist() == [[1, 0, 0, 0], [0.5, 0, 0, 0.5], [0.5, 0, 0, 0.5], [0, 0, 0, 1]]
    assert parts_of(held, "fixed")[0].argmax(axis=1).tolist() == [0, 3, 0, 3]  # rank r takes copy r mod 2


def nearest_by_loop(held: np.ndarray, hops: np.ndarray) -> np.ndarray:
    parts = np.zeros((*held.shape[:1], *hops.shape))
    for expert, source in np.ndindex(len(held), len(hops)):
        least = min(hops[source, node] for node in range(len(hops)) if held[expert, node])
        equal = [node for node in range(len(hops)) if held[expert, node] and hops[source, node] == least]
        for node in equal:
            parts[expert, source, node] = held[expert, node] / sum(held[expert, other] for other in equal)
    return parts


def test_who_serves_against_a_loop_and_relaxed():
    rng = np.random.default_rng(1)
    held = (rng.random((5, NODES)) < 0.4).astype(float)
    held[np.arange(5), rng.integers(NODES, size=5)] += 1  # one copy at least, and now and then two on a node
    np.testing.assert_allclose(parts_of(held, "nearest"), nearest_by_loop(held, HOPS), atol=1e-6)
    for choice in REPLICA_CHOICES:
        np.testing.assert_allclose(parts_of(held, choice).sum(axis=2), 1, atol=1e-6)
        np.testing.assert_allclose(parts_of(rng.random((5, NODES)), choice).sum(axis=2), 1, atol=1e-5)


def test_choices_follow_their_parts():
    parts = parts_of(held_of(SLOTS[:1])[0], "even")
    experts = np.array([[0, 3, -1]]).repeat(4000, axis=0)
    draw = np.random.default_rng(2).random(experts.shape)
    node = serving_nodes(parts, experts, np.zeros(4000, int), draw)
    assert (node[:, 2] == -1).all()
    assert (node[:, 1] == 2).all()  # its only copy
    assert np.bincount(node[:, 0], minlength=4)[[0, 1]] / 4000 == pytest.approx([0.5, 0.5], abs=0.03)


@pytest.mark.parametrize("choice", ["nearest", "fixed"])
def test_counts_price_what_tokens_take(choice):
    """One token of every rank for every expert, one choice each: the counts tell all there is."""
    layer = layer_model()
    model = replica_model(layer, choice)
    source, expert = np.divmod(np.arange(NODES * EXPERTS), EXPERTS)
    held = held_of(np.array([[0, 1, 0, 2, 3, 4, 5, 3]]))[0]  # copies side by side: of no two a node is as near to both
    parts = np.asarray(PARTS(held, model.tier, model.tiers, choice))
    batch = Batch(
        jnp.asarray(expert[:, None], jnp.int32),
        jnp.zeros(len(expert)),
        jnp.zeros((len(expert), 1)),
        jnp.ones(len(expert)),
        jnp.asarray(source, jnp.int32),
    )
    served = serving_nodes(parts, expert[:, None], source, np.zeros((len(expert), 1)))
    decisions = Decisions(held / held.sum(axis=1, keepdims=True), served=jnp.asarray(served))
    exact = eqx.filter_jit(layer.time)(decisions, batch)
    counted = priced(model, held, jnp.full((1, EXPERTS), float(NODES)))
    for name, seconds in exact.stages.items():
        assert float(counted.stages[name][0]) == pytest.approx(float(seconds), rel=1e-5)


def search_value(model, weights, loads, slots):
    """The times of batches as the search sees them, s, without delays of paths."""
    held = slots.reshape(len(weights.origin), -1).astype(np.int64)
    nothing = np.ones((loads.shape[1], len(held)), bool)
    kind = REPLICA_CHOICES.index(model.choice)
    state = _begun(weights, np.ascontiguousarray(loads, np.float64), held, kind, nothing, np.zeros_like(nothing, int))
    return _times(weights, state[3], state[4])


@pytest.mark.parametrize("choice", REPLICA_CHOICES)
@pytest.mark.parametrize(("network", "ports"), [("mesh", False), ("mesh", True), ("clusters", False)])
def test_the_search_sees_what_the_model_says(loads, choice, network, ports):
    model = replica_model(layer_model(network, ports), choice, np.array([1.0, 2, 3, 4]))
    seconds = priced(model, held_of(SLOTS)[0], jnp.asarray(loads[0])).total  # without latency and with cut-through
    np.testing.assert_allclose(search_value(model, weights_of(model), loads[0], SLOTS[0]), seconds, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 20, 21, 64])
def test_the_percentile_is_that_of_numpy(count):
    times = np.random.default_rng(count).integers(0, 9, count).astype(float)  # some are equal
    assert _p95.py_func(times) == pytest.approx(np.quantile(times, 0.95), rel=1e-12)


@pytest.mark.parametrize("choice", [pytest.param("even", marks=pytest.mark.slow), "nearest"])
def test_small_optimum_and_never_worse_than_a_start(choice):
    loads = np.array([[[900.0, 200, 100]], [[300, 300, 300]]])
    model = replica_model(layer_model(), choice)
    problem = ReplicaProblem(model, loads, NODES)
    tuned = tuned_slots(problem, moves=400, steps=20)
    every = np.array([each for each in product(range(3), repeat=NODES) if len({*each}) == 3])
    values = np.array([slot_values(problem, np.stack([each, each])) for each in every])
    np.testing.assert_allclose(tuned.values["tuned"], values.min(axis=0), rtol=1e-5)
    for name, value in tuned.values.items():
        assert (tuned.values["tuned"] <= value * (1 + 1e-6)).all(), name


@pytest.mark.slow
def test_moving_counts_and_a_short_horizon_keeps_what_is_there(loads):
    model = replica_model(layer_model(), "even")
    held = held_of(SLOTS)
    before = held[0]
    # Expert 3 comes from node 2 to node 0: one link, 1e6 B at 1e9 B/s.
    one = before.at[3, 0].set(1.0)
    assert float(model.moving(one, before)) == pytest.approx(1e-3)
    assert float(model.moving(before, before)) == 0
    short = tuned_slots(ReplicaProblem(model, loads, 8, before=SLOTS, horizon=1e-3), moves=200, steps=5)
    np.testing.assert_array_equal(held_of(short.slots), held)
    long = tuned_slots(ReplicaProblem(model, loads, 8, before=SLOTS, horizon=1e9), moves=400, steps=5)
    assert (long.values["tuned"] <= short.values["tuned"] * (1 + 1e-6)).all()


def test_gradients_are_those_of_finite_differences(loads):
    model: ReplicaModel = replica_model(layer_model(), "nearest")
    held = jnp.asarray(np.random.default_rng(3).uniform(0.2, 0.7, (EXPERTS, NODES)), jnp.float32)

    @jax.jit
    def cost(held: jax.Array) -> jax.Array:
        return model(held, jnp.asarray(loads[0], jnp.float32)).total.mean() * 1e6

    slope, rng = jax.jit(jax.grad(cost))(held), np.random.default_rng(4)
    for _ in range(4):
        way = jnp.asarray(rng.normal(size=held.shape), jnp.float32)
        step = 1e-3
        change = (cost(held + step * way) - cost(held - step * way)) / (2 * step)
        assert float((slope * way).sum()) == pytest.approx(float(change), rel=0.05, abs=0.05)


def test_copies_that_are_spread_are_near_to_everybody():
    tier = np.array([[0, 1, 2, 2], [1, 0, 2, 2], [2, 2, 0, 1], [2, 2, 1, 0]])  # two pairs of nodes
    twice = np.array([[0, 1, 2, 3, 0, 1, 2, 3]])
    spread = spread_slots(np.ones((1, 4)), twice, tier)[0]
    assert sorted(spread[:4]) == sorted(spread[4:]) == [0, 1, 2, 3]  # both pairs have all experts
    draw = np.random.default_rng(3)
    for copies in ([4, 1, 1, 1, 1, 4], [1, 2, 3, 2, 3, 1], [2, 2, 2, 2, 2, 2]):
        slots = np.repeat(np.arange(6), copies)[None]
        held = copies_of_slots(spread_slots(draw.random((1, 6)), slots, tier), 6, 4)
        assert held.max() == 1
        np.testing.assert_array_equal(held.sum(axis=(1, 2)), 12)
        assert (held.sum(axis=2) > 0).all()


def test_rounding_gives_every_expert_a_slot_and_no_rank_one_twice():
    held = np.random.default_rng(5).random((3, EXPERTS, NODES)) ** 4
    copies = copies_of_slots(rounded(held, 12), EXPERTS, NODES)
    assert (copies.sum(axis=2) > 0).all()
    assert copies.max() == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slots": 7}, "multiple of the 4 ranks"),
        ({"slots": 4}, "each of the 6 experts"),
        ({"loads": np.full((1, 1, EXPERTS), -1.0)}, "not negative"),
        ({"horizon": 0.0}, "horizon"),
        ({"before": np.zeros((1, 8), int)}, "same layers"),
    ],
)
def test_what_cannot_be_is_refused(loads, changes, said):
    with pytest.raises(PlanError, match=said):
        ReplicaProblem(**({"model": replica_model(layer_model(), "even"), "loads": loads, "slots": 8} | changes))
    with pytest.raises(PlanError, match="expected one of even"):
        replica_model(layer_model(), "closest")
