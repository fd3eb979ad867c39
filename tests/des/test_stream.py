"""Several layers with weights that migrate: regular work is never later, and times agree with the count model."""

import sys
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full
from oracles.slots import in_order

from jaxmoe.des import LayerDescription, Memory, fabric_of, timeline_events
from jaxmoe.des.layers_in_turn import Phase, most_moves, moves, run_layers, weight_transfers
from jaxmoe.engine import LayerCosts, Migration, SlotDecisions
from jaxmoe.engine.counts import CountModel, paths_of
from jaxmoe.engine.demand import Steps, Work
from jaxmoe.engine.schedule import AbstractSchedule, Serial, schedule_of
from jaxmoe.engine.stage import Stage
from jaxmoe.engine.times import ATTENTION
from jaxmoe.hardware import Die, Machine, node_memory
from jaxmoe.hardware.networks import hop_counts, wafers
from jaxmoe.methods.moentwine.migration import moves_between
from jaxmoe.network import Congestion, link_loads
from jaxmoe.network.token_communication import all_reduce_rounds
from jaxmoe.placement.token_layout import TokenLayout, token_layout
from jaxmoe.relax import HardMax

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "moentwine"))
from counted_layer import counted_layer

sys.path.pop(0)

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


def count_model(layout: TokenLayout, machine: Machine, schedule: AbstractSchedule) -> CountModel:
    """The costs of the layers of `layer_of`."""
    costs = LayerCosts(*(jnp.asarray(value) for value in (BYTES, BYTES, EXPERT, 1e6, 128.0, 3.0)))
    reduced = Steps(all_reduce_rounds(layout), jnp.asarray(REDUCED), Congestion(jnp.asarray(16.0)))
    alone = (
        Stage("attention", Work(2e-5 * machine.die.flops, full(NODES, 0.0), full(NODES, 0.0)), (), ATTENTION, "even"),
        Stage("all_reduce", reduced, ("attention",), ATTENTION, "even"),
    )
    before = tuple(eqx.filter_jit(Stage.priced)(stage, machine, HardMax()) for stage in alone)
    return CountModel(machine, costs, jnp.asarray(layout.parts), paths_of(TOPOLOGY, layout.parts), before, schedule)


@pytest.mark.parametrize("name", ["baseline", "er"])
def test_stages_agree_with_the_count_model(name):
    """Congestion against messages: within 5 % at 300 and more vectors a node."""
    layout = token_layout(name, SHAPE, 4)
    machine = Machine(TOPOLOGY, Die(full(NODES, 1e12)), node_memory(full(NODES, 1e10), None))
    model = eqx.filter_jit(count_model(layout, machine, Serial()))
    for seed in range(3):
        told = model(jnp.asarray(slots_of(seed)), jnp.asarray(loads_of(seed), jnp.float32))
        ran = run_layers(described().fabric, [layer_of(layout, seed)])
        np.testing.assert_allclose(ran.layer_ends[0], told.total, rtol=0.05)
        alone = run_layers(described().fabric, [[layer_of(layout, seed)[3]]])
        np.testing.assert_allclose(alone.layer_ends[0], told.stages["compute"], rtol=1e-5)


CUTS = {"pipelined(2)": 2, "overlap": 64}  # overlap is the limit of many micro-batches


@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.parametrize("rate", [5e13, 1e13])  # of a die, FLOP/s: links take longer, then nodes do
def test_schedules_take_as_long_as_in_the_simulator(layout, schedule, rate):
    """Within 3 %, with weights that inference waits for."""
    memory, loads = node_memory(full(NODES, 1e10), None), loads_of(0) * 4
    machine = Machine(TOPOLOGY, Die(full(NODES, rate)), memory)
    model = count_model(layout, machine, schedule_of(schedule))
    before, after = (jnp.asarray(slots_of(seed)) for seed in (1, 2))
    moved = moves_between(before[None], after[None], jnp.asarray(hop_counts(SHAPE), jnp.float32), None)
    migration = Migration(link_loads(TOPOLOGY, moved.traffic), jnp.ones(()))
    decisions = SlotDecisions(after, NODES, movement=migration)
    told = eqx.filter_jit(CountModel.time)(model, decisions, jnp.asarray(loads, jnp.float32))
    assert told.stages["migration"] > 0.02 * told.total
    fabric = described(256.0).fabric
    layer = replace(described(256.0), flops=np.full(NODES, rate))
    pairs = np.array([*moves(*map(np.asarray, (before, after)), hop_counts(SHAPE))])
    weights = weight_transfers(fabric, pairs[:, 0], pairs[:, 1], EXPERT)
    phases = counted_layer(layer, layout, np.asarray(after), loads, np.full(NODES, 2e-5), REDUCED)
    ran = run_layers(fabric, [phases], weights, "waited_for", micro_batches=CUTS[schedule])
    assert ran.layer_ends[0] == pytest.approx(float(told.total), rel=0.03)
    slower = run_layers(fabric, [phases], weights, "waited_for")
    assert ran.layer_ends[0] < 0.95 * slower.layer_ends[0]


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
