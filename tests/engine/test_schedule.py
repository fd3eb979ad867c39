"""Schedules against a simulation of the order that they document, and by hand."""

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

from jaxmoe.engine import Decisions, Movement, Pipelined, Priced, ScheduleError, Serial, Usage, schedule_of
from jaxmoe.engine.price import price
from jaxmoe.network import build_exchange
from jaxmoe.relax import HardMax
from jaxmoe.traces.batches import Batch, micro_batches

SHAPE, NODES, EXPERTS, TOKENS, TOP_K = (2, 3), 6, 5, 7, 2


CARRIED = ("dispatch", "combine", "movement")


SERVERS = {"attention": "nodes", "compute": "nodes"}


def stages_of(seconds) -> list[Priced]:
    """Stages one after the other, by name, from the seconds of their parts."""
    made: list[Priced] = []
    for name, each in seconds.items():
        usage = Usage(each, {}, {}, jnp.zeros_like(each))
        block = "attention" if name in ("attention", "all_reduce") else "experts"
        before = tuple(stage.name for stage in made if stage.block == block)[-1:]
        made.append(Priced(name, usage, SERVERS.get(name, "network"), before, block, "tokens", "stage"))
    return made


def whole(name: str, seconds) -> float:
    names = tuple(seconds)
    total = jax.jit(lambda given: schedule_of(name).total(stages_of(dict(zip(names, given, strict=True))), HardMax()))
    return float(total(tuple(seconds.values())))


def total(name: str, *stages) -> float:
    return whole(name, dict(zip(("dispatch", "compute", "combine"), map(floats, stages), strict=True)))


def simulated_pipeline(dispatch: list[float], compute: list[float], combine: list[float]) -> float:
    """Two servers take their tasks in order, each when it and what the task waits for are done."""
    parts = len(dispatch)
    network = [("dispatch", 0)]
    for part in range(1, parts):
        network += [("dispatch", part), ("combine", part - 1)]
    network.append(("combine", parts - 1))
    orders = {"network": network, "nodes": [("compute", part) for part in range(parts)]}
    before = {"compute": "dispatch", "combine": "compute"}
    seconds = {"dispatch": dispatch, "compute": compute, "combine": combine}
    free, done = {"network": 0.0, "nodes": 0.0}, {}
    while any(orders.values()):
        for server, tasks in orders.items():
            if tasks and (tasks[0][0] == "dispatch" or (before[tasks[0][0]], tasks[0][1]) in done):
                stage, part = tasks.pop(0)
                ready = done.get((before[stage], part), 0.0) if stage in before else 0.0
                free[server] = done[stage, part] = max(free[server], ready) + seconds[stage][part]
    return max(free.values())


lengths = st.floats(0, 8, width=16)


@given(st.integers(1, 5).flatmap(lambda m: st.lists(st.tuples(lengths, lengths, lengths), min_size=m, max_size=m)))
def test_pipelines_equal_a_simulation_of_their_order(parts):
    stages = [list(stage) for stage in zip(*parts, strict=True)]
    assert total(f"pipelined({len(parts)})", *stages) == pytest.approx(simulated_pipeline(*stages), rel=1e-6, abs=1e-6)


def test_a_pipeline_by_hand():
    # Network: D1 0-1, D2 1-2, C1 5-6 (computed at 5), C2 9-10. Nodes: 1-5, 5-9.
    assert total("pipelined(2)", [1, 1], [4, 4], [1, 1]) == 10
    # Network alone is busy: D1 0-3, D2 3-6, C1 6-9, C2 9-12.
    assert total("pipelined(2)", [3, 3], [1, 1], [3, 3]) == 12


def test_serial_and_overlap_by_hand():
    assert total("serial", [2.0], [5.0], [1.0]) == total("idle_links", [2.0], [5.0], [1.0]) == 8
    assert total("overlap", [2.0], [5.0], [1.0]) == 5
    assert total("overlap", [4.0], [5.0], [3.0]) == 7


@pytest.mark.parametrize(
    ("schedule", "limits"), [("serial", "compute"), ("overlap", "dispatch"), ("pipelined(2)", "dispatch")]
)
def test_the_stage_that_limits_is_of_the_server_that_is_done_last(schedule, limits):
    """Compute takes longest alone, dispatch and combine together; attention is of another block."""
    seconds = {"attention": 1.0, "dispatch": 4.0, "compute": 5.0, "combine": 3.0}
    stages = tuple(stages_of({name: jnp.asarray(each) for name, each in seconds.items()}))
    machine = cases.layer_model(cases.random_machine(np.random.default_rng(0), SHAPE)).machine
    time = price(machine, schedule_of(schedule), stages, HardMax())
    assert time.longest_stage == limits
    shorter = eqx.tree_at(lambda each: each.stages["combine"], time, jnp.asarray(0.5))
    assert shorter.longest_stage == "compute"


def test_phases_follow_each_other():
    names = ("attention", "all_reduce", "metadata", "dispatch", "compute", "combine", "closing")
    stages = {name: jnp.asarray([2.0**at] * 2) for at, name in enumerate(names)}
    assert whole("serial", stages) == 2 * (2**7 - 1)
    # The larger of attention and its all-reduce, and of experts and the messages around them.
    assert whole("overlap", stages) == 2 * 2 + 2 * (4 + 8 + 32 + 64)
    # Attention 0-1, 1-2, its all-reduce 1-3, 3-5. Then dispatch 0-12, 12-24, experts 12-28, 28-44, results 28-124-220.
    assert whole("pipelined(2)", stages) == 5 + 220
    without = {name: stages[name] for name in ("dispatch", "compute", "combine")}
    assert whole("serial", without) == 2 * (8 + 16 + 32)


@pytest.mark.parametrize("name", ["Serial", "pipelined", "pipelined(0)", "pipelined(-1)", "pipelined(2.5)", "", "both"])
def test_other_names_are_refused(name):
    with pytest.raises(ScheduleError, match="expected one of serial, overlap, pipelined"):
        schedule_of(name)


def random_case(schedule: str, seed: int = 0, exchange: str = "fewest_hops_tree"):
    rng = np.random.default_rng(seed)
    machine = cases.random_machine(rng, SHAPE, ports=True, memory=True)
    model = cases.layer_model(machine, "sharded", exchange, schedule=schedule_of(schedule))
    share = floats(cases.random_share(rng, EXPERTS, NODES))
    return model, share, cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))


run = eqx.filter_jit(lambda model, share, batch: model(share, batch))
decide = eqx.filter_jit(lambda model, decisions, batch: model.time(decisions, batch))


def test_a_pipeline_of_one_part_is_serial():
    model, share, batch = random_case("pipelined(1)")
    one, other = run(model, share, batch), run(eqx.tree_at(lambda m: m.schedule, model, Serial()), share, batch)
    for first, second in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6)


def tokens_of(batch: Batch, which: slice) -> Batch:
    return jax.tree.map(lambda leaf: leaf[which], batch)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)])
def test_micro_batches_are_successive_tokens_each_with_stages_of_its_own(parts):
    model, share, batch = random_case(f"pipelined({parts})")
    serial = eqx.tree_at(lambda m: m.schedule, model, Serial())
    size = -(-TOKENS // parts)
    alone = [run(serial, share, tokens_of(batch, slice(at, at + size))) for at in range(0, TOKENS, size)]
    layer = run(model, share, batch)
    stages = [[float(part.stages[name]) for part in alone] for name in ("dispatch", "compute", "combine")]
    stages = [stage + [0.0] * (parts - len(alone)) for stage in stages]
    for name, seconds in zip(("dispatch", "compute", "combine"), stages, strict=True):
        assert float(layer.stages[name]) == pytest.approx(sum(seconds), rel=1e-5)
    assert float(layer.total) == pytest.approx(simulated_pipeline(*stages), rel=1e-5)
    np.testing.assert_allclose(layer.node_time, sum(part.node_time for part in alone), rtol=1e-5)
    np.testing.assert_allclose(layer.combine_link_time, sum(part.combine_link_time for part in alone), rtol=1e-5)


def test_the_last_micro_batch_is_filled_up_with_tokens_of_weight_0():
    _, _, batch = random_case("serial")
    parts = micro_batches(batch, 3)
    assert parts.weight.shape == (3, 3)
    assert parts.weight[2, 1:].tolist() == [0, 0]
    np.testing.assert_array_equal(parts.weight.ravel()[:TOKENS], batch.weight)
    np.testing.assert_array_equal(parts.experts.reshape(-1, TOP_K)[:TOKENS], batch.experts)


def test_choices_decided_at_run_time_are_of_whole_batches():
    model, share, batch = random_case("pipelined(2)")
    with pytest.raises(ValueError, match="use a schedule without micro-batches"):
        model.time(Decisions(share, served=jnp.full((TOKENS, TOP_K), -1)), batch)


def moving(share, seed: int) -> Decisions:
    """Some experts travel to nodes that do not hold them."""
    rng = np.random.default_rng(seed)
    wanted = floats((rng.random(share.shape) < 0.4) & (np.asarray(share) == 0))
    return Decisions(share, movements=(Movement(wanted),))


def busiest(layer) -> float:
    """Seconds that the busiest link or port works for stages and movement."""
    served = [np.concatenate([layer.busy[name][kind] for kind in ("link", "port")]) for name in CARRIED]
    return float(sum(served).max())


@pytest.mark.parametrize(
    "schedule",
    ["serial", *(pytest.param(name, marks=pytest.mark.slow) for name in ("overlap", "pipelined(1)")), "pipelined(3)"],
)
def test_a_movement_comes_before_the_stages(schedule):
    model, share, batch = random_case(schedule)
    layer, still = decide(model, moving(share, 1), batch), run(model, share, batch)
    # Weights travel once, into however many parts the batch is cut.
    whole = decide(random_case("serial")[0], moving(share, 1), batch)
    assert float(layer.stages["movement"]) == pytest.approx(float(whole.stages["movement"]), rel=1e-6)
    assert float(layer.stages["movement"]) > 0
    assert float(layer.total) == pytest.approx(float(still.total) + float(layer.stages["movement"]), rel=1e-5)


@pytest.mark.parametrize("schedule", ["serial", pytest.param("overlap", marks=pytest.mark.slow), "idle_links"])
def test_a_hidden_movement_is_told_and_not_charged(schedule):
    model, share, batch = random_case(schedule)
    charged, still = moving(share, 1), run(model, share, batch)
    layer = decide(model, Decisions(share, movements=(Movement(charged.movements[0].destination, hidden=True),)), batch)
    assert float(layer.total) == pytest.approx(float(still.total), rel=1e-6)
    assert layer.stages["movement"] == decide(model, charged, batch).stages["movement"]


def test_a_movement_on_idle_links_is_free_until_a_link_has_no_idle_time_left():
    model, share, batch = random_case("idle_links")
    decisions, still = moving(share, 1), float(run(model, share, batch).total)
    free = eqx.tree_at(lambda m: m.costs.expert_bytes, model, model.costs.expert_bytes * 1e-6)
    # What memory reads changes with the size of experts, so both are without weights to read.
    small, alone = decide(free, decisions, batch), run(free, share, batch)
    assert float(small.total) == pytest.approx(float(alone.total), rel=1e-6)
    large = decide(model, decisions, batch)
    assert busiest(large) > still
    bound = max(busiest(large), float(large.stages["movement"]))
    assert float(large.total) == pytest.approx(bound, rel=1e-6)


@settings(max_examples=10)
@given(st.integers(0, 2**31), st.floats(-5, 1))
def test_idle_links_take_as_long_as_the_stages_the_movement_or_the_busiest_link_or_port(seed, exponent):
    model, share, batch = random_case("idle_links", seed % 3)
    model = eqx.tree_at(lambda m: m.costs.expert_bytes, model, model.costs.expert_bytes * 10.0**exponent)
    layer, still = decide(model, moving(share, seed), batch), run(model, share, batch)
    expected = max(float(still.total), busiest(layer), float(layer.stages["movement"]))
    assert float(layer.total) == pytest.approx(expected, rel=1e-5)


def test_a_moved_expert_by_hand():
    # On a line of three, expert 0 lives half on node 0 and half on node 1, and goes to node 2 as a whole. From node 0
    # half of it takes two links, from node 1 half takes one: the last link carries both, 1.5 MB + 1.5 MB at 1 GB/s.
    machine = cases.random_machine(np.random.default_rng(0), (1, 3))
    machine.link_bandwidth[:], machine.link_latency[:] = 1e9, 1e-6
    model = cases.layer_model(machine)
    decisions = Decisions(floats([[0.5, 0.5, 0]]), movements=(Movement(floats([[0.0, 0, 1]])),))
    tokens = cases.random_tokens(np.random.default_rng(0), 1, 1, 1)
    layer = decide(model, decisions, cases.batch(tokens))
    np.testing.assert_allclose(layer.busy["movement"]["link"], [1.5e-3, 3e-3, 0, 0], rtol=1e-5)


def test_exchanges_may_be_decided():
    model, share, batch = random_case("serial")
    ring = build_exchange("ring", model.machine.topology)
    expected = run(eqx.tree_at(lambda m: m.exchange, model, ring, is_leaf=lambda x: x is model.exchange), share, batch)
    assert float(decide(model, Decisions(share, ring), batch).total) == pytest.approx(float(expected.total), rel=1e-6)
    assert isinstance(schedule_of("pipelined(12)"), Pipelined)


def test_choices_and_where_tokens_live_may_be_decided():
    model, share, batch = random_case("serial")
    home = build_exchange("token_home", model.machine.topology)
    source = jnp.asarray(np.random.default_rng(5).integers(NODES, size=TOKENS), jnp.int32)
    experts = (batch.experts + 1) % EXPERTS
    changed = dataclasses.replace(batch, experts=experts, source=source)
    expected, plain = decide(model, Decisions(share, home), changed), decide(model, Decisions(share, home), batch)
    decided = decide(model, Decisions(share, home, experts=experts, source=source), batch)
    assert float(decided.total) == pytest.approx(float(expected.total), rel=1e-6)
    assert float(decided.total) != pytest.approx(float(plain.total), rel=1e-3)


def test_few_experts_that_move_take_as_long_as_among_all():
    model, share, batch = random_case("serial")
    destination = full(share.shape, 0.0).at[jnp.asarray([1, 3])].set(1.0)
    one, other = (
        decide(model, Decisions(share, movements=(Movement(destination, most=most),)), batch) for most in (None, 2)
    )
    assert float(one.stages["movement"]) > 0
    np.testing.assert_allclose(one.stages["movement"], other.stages["movement"], rtol=1e-6)
    np.testing.assert_allclose(one.busy["movement"]["link"], other.busy["movement"]["link"], rtol=1e-6)
