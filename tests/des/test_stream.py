"""Several layers with weights that migrate: regular work is never later, and times agree with the count model."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from oracles.slots import in_order

from jaxmoe.des import LayerDescription, Memory, fabric_of, timeline_events
from jaxmoe.des.layers_in_turn import Phase, counted_layer, most_moves, moves, run_layers, weight_transfers
from jaxmoe.engine import LayerCosts
from jaxmoe.engine.counts import CountModel, attention_seconds, paths_of
from jaxmoe.engine.schedule import Serial
from jaxmoe.hardware import Die, Machine, node_memory
from jaxmoe.hardware.networks import hop_counts, wafers
from jaxmoe.methods.moentwine.migration import moves_between
from jaxmoe.network import Congestion
from jaxmoe.network.collectives import price_rounds
from jaxmoe.network.token_communication import all_reduce_rounds, scaled
from jaxmoe.placement.token_layout import TokenLayout, token_layout
from jaxmoe.relax import HardMax

SHAPE, NODES, BYTES, EXPERT, REDUCED = (4, 4), 16, 64.0, 2e5, 4096.0
TOPOLOGY = wafers(SHAPE, (1, 1), 1e9, 0.0, 1e9, 0.0)


def described(chunk: float = 16.0) -> LayerDescription:
    memory = (Memory(np.full(NODES, 1e10), np.zeros(NODES), np.arange(NODES)),)
    sizes = {"dispatch_bytes": BYTES, "combine_bytes": BYTES, "expert_bytes": EXPERT, "flops_per_token_expert": 1e6}
    return LayerDescription(fabric_of(TOPOLOGY, chunk), np.full(NODES, 1e12), **sizes, mode="replicated", memory=memory)


def loads_of(seed: int, groups: int = 4) -> np.ndarray:
    return (
        np.random.default_rng(seed).multinomial(600, np.random.default_rng(seed).dirichlet(np.ones(NODES)), groups)
        * 1.0
    )


def slots_of(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    slots = in_order(1, NODES, NODES, 1)[0].copy()
    some = rng.permutation(NODES)[:5]
    slots[some, 1] = rng.integers(0, NODES, 5)
    return slots


def layer_of(layout: TokenLayout, seed: int, chunk: float = 16.0) -> list[Phase]:
    return counted_layer(described(chunk), layout, slots_of(seed), loads_of(seed), np.full(NODES, 2e-5), REDUCED)


@pytest.fixture(scope="module")
def layout() -> TokenLayout:
    return token_layout("er", SHAPE, 4)


def weights_of(count: int = 12):
    rng = np.random.default_rng(5)
    return weight_transfers(described().fabric, rng.integers(0, NODES, count), rng.integers(0, NODES, count), EXPERT)


def test_regular_work_is_not_later_by_one_bit_with_weights_in_the_background(layout):
    """moentwine V-A: migration that takes idle links costs nothing."""
    layers, fabric = [layer_of(layout, seed) for seed in range(3)], described().fabric
    alone = run_layers(fabric, layers)
    hidden = run_layers(fabric, layers, weights_of())
    beside = run_layers(fabric, layers, weights_of(), "beside")
    waited = run_layers(fabric, layers, weights_of(), "waited_for")
    np.testing.assert_array_equal(hidden.layer_ends, alone.layer_ends)
    regular = np.array(alone.stage) != "migration"
    np.testing.assert_array_equal(hidden.run.finish[: len(regular)], alone.run.finish)
    assert hidden.weights_end > 0
    assert beside.layer_ends[-1] > alone.layer_ends[-1] * 1.05  # as any other message it would be in the way
    np.testing.assert_allclose(waited.layer_ends, alone.layer_ends + waited.weights_end, rtol=1e-9)
    assert hidden.weights_end >= waited.weights_end


def test_a_timeline_of_two_layers_has_the_stream_of_weights(layout):
    fabric = described(1e9).fabric
    ran = run_layers(fabric, [layer_of(layout, seed, 1e9) for seed in range(2)], weights_of(), record=True)
    events = timeline_events(ran.run, fabric, TOPOLOGY.link_ends, ran.stage)
    names = {event["name"].split(" ")[0] for event in events if event["ph"] == "X"}
    assert {"migration", "dispatch", "combine", "all_reduce", "compute"} <= names


@pytest.mark.parametrize("name", ["baseline", "er"])
def test_stages_agree_with_the_count_model(name):
    """Congestion against messages: within 5 % at 300 and more vectors a node."""
    layout = token_layout(name, SHAPE, 4)
    machine = Machine(TOPOLOGY, Die(full(NODES, 1e12)), node_memory(full(NODES, 1e10), None))
    costs = LayerCosts(*(jnp.asarray(value) for value in (BYTES, BYTES, EXPERT, 1e6, 128.0, 3.0)))
    price = eqx.filter_jit(price_rounds)
    reduced = price(Congestion(jnp.asarray(16.0)), TOPOLOGY, scaled(all_reduce_rounds(layout), REDUCED), HardMax())
    before = attention_seconds(jnp.asarray(2e-5), reduced.seconds, reduced.link_time)
    paths = paths_of(TOPOLOGY, layout.parts)
    model = eqx.filter_jit(CountModel(machine, costs, jnp.asarray(layout.parts), paths, before, Serial()))
    for seed in range(3):
        told = model(jnp.asarray(slots_of(seed)), jnp.asarray(loads_of(seed), jnp.float32))
        ran = run_layers(described().fabric, [layer_of(layout, seed)])
        np.testing.assert_allclose(ran.layer_ends[0], told.total, rtol=0.05)
        alone = run_layers(described().fabric, [[layer_of(layout, seed)[3]]])
        np.testing.assert_allclose(alone.layer_ends[0], told.stages["compute"], rtol=1e-5)


def test_moves_are_those_of_the_model():
    before, after = slots_of(1), slots_of(2)
    told = eqx.filter_jit(moves_between)(
        jnp.asarray(before)[None], jnp.asarray(after)[None], jnp.asarray(hop_counts(SHAPE), jnp.float32), None
    )
    found = np.zeros((NODES, NODES))
    for source, destination in moves(before, after, hop_counts(SHAPE)):
        found[source, destination] += 1
    np.testing.assert_array_equal(found, told.traffic)


def test_the_step_and_layers_with_most_moves_by_hand():
    before = np.repeat(in_order(3, NODES, NODES, 1)[None], 3, axis=0)
    assert most_moves(before, before, hop_counts(SHAPE), 2)[2].shape == (0, 2)
    after = before.copy()
    after[1, 0, 3, 1] = 7  # in step 1 one expert moves in layer 0,
    after[2, 1:, 0, 1] = 5  # in step 2 one in layer 1 and one in layer 2
    step, rows, pairs = most_moves(before, after, hop_counts(SHAPE), 2)
    assert (step, [*rows]) == (2, [1, 2])
    assert pairs.tolist() == [[5, 0], [5, 0]]
