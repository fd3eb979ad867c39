"""Energy of a layer: by hand, as a sum of parts that go with their own numbers, and whatever is priced for time."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cases
from oracles.arrays import floats, full

from jaxmoe.engine import (
    Decisions,
    Layer,
    LayerCosts,
    LayerTime,
    Movement,
    Pipelined,
    evaluate,
    rollout,
)
from jaxmoe.hardware import Die, Energy, Machine, Mesh, node_memory
from jaxmoe.methods import StaticPlan
from jaxmoe.network import Congestion, Uncongested, alpha_beta, build_exchange
from jaxmoe.relax import SmoothMax, SoftSupport
from jaxmoe.traces import Batch

run = eqx.filter_jit(lambda model, *args: model(*args))
NUMBERS = {"compute": 2.0, "memory": 3.0, "link": 5.0, "idle": 7.0}


def energy(links: int, compute=2.0, memory=3.0, link=5.0, idle=7.0) -> Energy:
    return Energy(
        floats(compute),
        {"memory": floats(memory)},
        {"link": full(links, link)},
        floats(idle),
    )


def two_nodes(exchange: str = "lowest_host", **parts) -> Layer:
    """A line of two nodes: 10 B/s and no latency, 4 FLOP/s, 20 B/s of memory."""
    line = Mesh(full(2, 10.0), full(2, 0.0), shape=(1, 2))
    machine = Machine(line, Die(full(2, 4.0)), node_memory(full(2, 20.0)), energy(2))
    # Combine 60 B, dispatch 100 B, an expert of 1000 B and 40 FLOPs.
    costs = LayerCosts(*map(jnp.asarray, (60.0, 100.0, 1000.0, 40.0, 1.0, 1.0)))
    model = Layer(machine, costs, Congestion(jnp.asarray(0.0)), build_exchange(exchange, line), "sharded")
    return dataclasses.replace(model, **parts)


ONE_TOKEN = Batch(jnp.array([[0, 1]]), floats([0.1]), floats([[0.5, 0.5]]), full(1, 1.0))


def test_one_token_on_two_nodes_by_hand():
    """Its experts are on both nodes, its home is node 0: one vector there over a link of 10 B/s, and one back."""
    times = run(two_nodes(), floats(np.eye(2)), ONE_TOKEN)
    assert float(times.total) == pytest.approx(100 / 10 + (1000 + 160) / 20 + 60 / 10)
    expected = {
        "compute": 2 * (2 * 40),
        "memory": 3 * 2 * (1000 + 100 + 60),  # weights in; a vector in and out at both
        "link": 5 * (100 + 60),
        "idle": 7 * 2 * 74,  # watts x nodes x seconds
    }
    assert {name: float(joules) for name, joules in times.energy.items()} == pytest.approx(expected)
    assert float(times.total_energy) == pytest.approx(sum(expected.values()))


def test_a_ring_of_two_sends_halves_each_way():
    """Reduce-scatter: every node sends half a vector, in dispatch and in combine."""
    times = run(two_nodes("ring"), full((2, 2), 0.5), ONE_TOKEN)
    assert float(times.energy["link"]) == pytest.approx(5 * 2 * (100 + 60) / 2)
    assert float(times.energy["compute"]) == pytest.approx(2 * 2 * 40)


@pytest.mark.parametrize("hidden", [True, False])
def test_weights_that_move_are_counted_hidden_or_not(hidden):
    model, share = two_nodes(), floats(np.eye(2))
    plain = run(model, share, ONE_TOKEN)
    everywhere = floats([[1.0, 1.0], [0.0, 0.0]])  # expert 0, which node 0 has, to both
    moved = run(model.time, Decisions(share, movements=(Movement(everywhere, hidden=hidden),)), ONE_TOKEN)
    assert float(moved.energy["link"] - plain.energy["link"]) == pytest.approx(5 * 1000)
    longer = 0 if hidden else 1000 / 10
    assert float(moved.energy["idle"] - plain.energy["idle"]) == pytest.approx(7 * 2 * longer, abs=1e-3)


def test_a_link_that_is_passed_on_counts_every_hop():
    line = Mesh(full(6, 10.0), full(6, 0.0), shape=(1, 4))
    model = eqx.tree_at(lambda m: m.machine, two_nodes(), Machine(line, Die(full(4, 4.0)), energy=energy(6)))
    share = jnp.asarray(np.eye(4, dtype=np.float32)[[0, 3]])
    assert float(run(model, share, ONE_TOKEN).energy["link"]) == pytest.approx(5 * 3 * (100 + 60))


def test_a_machine_that_states_no_energy_has_none():
    model = eqx.tree_at(lambda m: m.machine.energy, two_nodes(), None)
    times = run(model, floats(np.eye(2)), ONE_TOKEN)
    assert times.energy == {}
    with pytest.raises(ValueError, match="states no energy"):
        _ = times.total_energy


def random_model(rule="lowest_host", seed=0, **parts) -> tuple[Layer, jax.Array, Batch]:
    rng = np.random.default_rng(seed)
    machine = cases.as_machine(cases.random_machine(rng, (2, 3), memory=True))
    machine = dataclasses.replace(machine, energy=energy(machine.topology.num_links))
    share = floats(cases.random_share(rng, 5, 6))
    return cases.model_on(machine, "sharded", rule, **parts), share, cases.batch(cases.random_tokens(rng, 9, 5, 2))


@eqx.filter_jit
def joules(model, share, batch, known):
    return eqx.tree_at(lambda m: m.machine.energy, model, known)(share, batch).energy


@settings(max_examples=15)
@given(st.lists(st.floats(0, 100), min_size=4, max_size=4))
def test_every_part_goes_with_its_own_number_alone(factors):
    model, share, batch = random_model("corner_host_split_tree")
    links = model.machine.topology.num_links
    one = joules(model, share, batch, energy(links))
    scaled = {name: NUMBERS[name] * factor for name, factor in zip(NUMBERS, factors, strict=True)}
    many = joules(model, share, batch, energy(links, **scaled))
    for name, factor in zip(NUMBERS, factors, strict=True):
        assert float(many[name]) == pytest.approx(factor * float(one[name]), rel=1e-5)


def test_kinds_of_links_add_up_to_all_links():
    model, share, batch = random_model("reduce_scatter")
    links = model.machine.topology.num_links
    first = np.where(np.arange(links) < links // 2, 5.0, 0)
    parted = Energy(links={"link": floats(first), "border": floats(5.0 - first)})
    parts = joules(model, share, batch, parted)
    assert parts.keys() == {"link", "border"}
    assert min(map(float, parts.values())) > 0
    assert float(sum(parts.values())) == pytest.approx(float(joules(model, share, batch, energy(links))["link"]))


def test_the_links_carry_the_same_whatever_the_time_model_and_schedule():
    model, share, batch = random_model("fewest_hops")
    topology, plain = model.machine.topology, float(run(model, share, batch).energy["link"])
    for other in (Uncongested(), alpha_beta(topology)):
        changed = run(dataclasses.replace(model, time_model=other), share, batch)
        assert float(changed.energy["link"]) == pytest.approx(plain, rel=1e-5)
    times = run(dataclasses.replace(model, schedule=Pipelined(3)), share, batch)
    assert float(times.energy["link"]) == pytest.approx(plain, rel=1e-5)
    assert float(times.energy["idle"]) == pytest.approx(7 * 6 * float(times.total), rel=1e-5)


def test_tensor_parallelism_reads_every_expert_once_whatever_the_batch():
    model, _, batch = random_model("ring")
    times = run(model, full((5, 6), 1 / 6), batch)
    vectors = 6 * float(batch.weight.sum()) * (cases.COSTS.dispatch_bytes + cases.COSTS.combine_bytes)
    assert float(times.energy["memory"]) == pytest.approx(3 * (5 * cases.COSTS.expert_bytes + vectors), rel=1e-5)


@pytest.mark.parametrize("rule", ["corner_host_split_tree", "reduce_scatter"])
def test_relaxed_energy_tends_to_the_exact_one(rule):
    model, share, batch = random_model(rule)
    exact = float(run(model, share, batch).total_energy)

    def relaxed(width):
        return float(run(model, share, batch, None, SmoothMax(width), SoftSupport(width)).total_energy)

    assert relaxed(0.2) != pytest.approx(exact, rel=1e-3)
    assert relaxed(1e-3) == pytest.approx(exact, rel=1e-3)


def test_many_batches_at_once():
    model, share, batch = random_model()
    leaves = jax.tree.map(lambda leaf: jnp.asarray(np.stack([leaf, leaf[::-1]])[None]), batch)
    times: LayerTime = evaluate(model, share[None], leaves)
    assert {leaf.shape for leaf in times.energy.values()} == {(1, 2)}
    alone = run(model, share, jax.tree.map(lambda leaf: jnp.asarray(leaf[::-1]), jax.device_get(batch))).total_energy
    assert float(np.asarray(times.total_energy)[0, 1]) == pytest.approx(float(alone), rel=1e-5)
    assert times.first_batches(1).total_energy.shape == (1, 1)


def test_a_rollout_has_the_energy_of_every_step():
    model, steps = two_nodes(), jax.tree.map(lambda leaf: jnp.asarray(np.stack([leaf] * 3)[None]), ONE_TOKEN)
    _, times, _ = rollout(StaticPlan(floats(np.eye(2))[None]), model, steps)
    assert times.total_energy.shape == (3, 1)
    np.testing.assert_allclose(
        times.total_energy, float(run(model, floats(np.eye(2)), ONE_TOKEN).total_energy), rtol=1e-6
    )
