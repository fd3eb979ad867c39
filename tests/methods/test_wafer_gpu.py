"""The wafer-scale GPU as a system: what it composes, what it replays, and what it refuses."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import full

from jaxmoe.config import build_machine, load_hardware, load_scenario
from jaxmoe.engine import Overlap, Serial
from jaxmoe.errors import InputError
from jaxmoe.methods import DeploymentSetting, UnsuitableSystemError, system_of
from jaxmoe.methods.wafer_gpu.system import popular_copies
from jaxmoe.models import ElementBytes, MoEModel
from jaxmoe.placement.placement import PlanError
from jaxmoe.traces import Batch, GatingTrace, TraceError, request_batches, synthetic_trace

LAYERS, EXPERTS, STEPS, REQUESTS = 2, 32, 3, 200


def trace_of(tokens=2048):
    return synthetic_trace(tokens, [0, 1], EXPERTS, 4, 0.5, 0.2, 0.3, 0)


@pytest.fixture
def setting() -> DeploymentSetting:
    rng = np.random.default_rng(0)
    machine = build_machine(load_hardware("configs/hardware/dojo_5x5.yaml"))
    home = np.stack([rng.permutation(np.arange(EXPERTS) % 25) for _ in range(LAYERS)])
    return DeploymentSetting(
        share=np.eye(25, dtype=np.float32)[home],
        mode="sharded",
        exchange=("lowest_host",) * LAYERS,
        model=cases.model_on(machine, costs=replace(cases.COSTS, expert_bytes=20e6, flops_per_token_expert=40e6)),
        moe=MoEModel("small", 64, 128, EXPERTS, 4, (0, 1), 2),
        bytes=ElementBytes(1.0, 1.0, 1.0, 1.0, 1.0),
        batch_tokens=REQUESTS,
        context_tokens=16,
        build_exchange=pytest.fail,
        describe=lambda mode, exchange: pytest.fail(exchange),
        trace=trace_of(),
        history=trace_of(),
    )


def steps_of(trace=None) -> Batch:
    return request_batches(trace_of() if trace is None else trace, REQUESTS, STEPS, 0)[0]


def at(batch: Batch, row: int, step: int) -> Batch:
    return jax.tree.map(lambda leaf: np.asarray(leaf[row, step]), batch)


def test_rolled_out_layers_are_replayed_alike(setting):
    batch = steps_of()
    runs = system_of("wafer_gpu").runs(setting)
    assert [*runs] == ["base", "expert_parallelism", "wafer_gpu"]
    rolled = {name: run.rollout(batch) for name, run in runs.items()}
    for name, run in runs.items():
        assert rolled[name].time.total.shape == (STEPS, LAYERS)
        for step, row in ((0, 1), (2, 0)):
            seconds = run.replay(rolled[name], at(batch, row, step), step, row)
            assert rolled[name].time.total[step, row] == pytest.approx(seconds, rel=0.15)
    counts = [np.bincount(np.asarray(batch.experts)[1, 2].ravel(), minlength=EXPERTS)]
    np.testing.assert_array_equal(rolled["base"].kept["requests"][2, 1].sum(axis=1), counts[0])
    assert rolled["wafer_gpu"].figures["hops"] < rolled["base"].figures["hops"]
    assert rolled["base"].figures["local_write"] == 0 == rolled["expert_parallelism"].figures["hops"]


@pytest.mark.parametrize("name", ["base", "wafer_gpu"])
def test_times_on_a_machine_are_functions_of_its_numbers(setting, name):
    batch, machine, run = steps_of(), setting.model.machine, system_of("wafer_gpu").runs(setting)[name]
    np.testing.assert_allclose(run.timed(batch, machine).total, run.rollout(batch).time.total, rtol=1e-6)

    def total(factor):
        links = replace(machine.topology, link_bandwidth=machine.topology.link_bandwidth * factor)
        memory = tuple(replace(level, bandwidth=level.bandwidth * factor) for level in machine.memory)
        return run.timed(batch, replace(machine, topology=links, memory=memory)).total.astype(np.float32).sum()

    _, slope = jax.jvp(total, (1.0,), (1.0,))
    assert float(slope) == pytest.approx(float(total(1.005) - total(0.995)) / 0.01, rel=0.05)
    assert slope < 0


def test_overlap_is_what_the_simulator_does(setting):
    """Reads and products are side by side anyhow: the time under `serial`, and within 3 % of the simulator's."""
    batch = steps_of()
    both = [replace(setting, model=replace(setting.model, schedule=each)) for each in (Serial(), Overlap())]
    serial, overlap = (system_of("wafer_gpu").runs(each) for each in both)
    for name, run in overlap.items():
        rolled = run.rollout(batch)
        np.testing.assert_array_equal(rolled.time.total, serial[name].rollout(batch).time.total)
        ways = [(step, row) for step in range(STEPS) for row in range(LAYERS)]
        replayed = [run.replay(rolled, at(batch, row, step), step, row) for step, row in ways]
        modelled = [rolled.time.total[way] for way in ways]
        assert np.mean(np.abs(np.divide(modelled, replayed) - 1)) < 0.03


def test_the_host_adds_its_time_to_every_layer(setting):
    batch = steps_of()
    plain = system_of("wafer_gpu").runs(setting)["wafer_gpu"].rollout(batch)
    runs = system_of("wafer_gpu", host_link_GB_per_s=64.0, host_fixed_us=10.0).runs(setting)
    hosted = runs["wafer_gpu"].rollout(batch)
    added = 10e-6 + EXPERTS * (5 + 25 / 8 + 40) / 64e9
    np.testing.assert_allclose(hosted.time.total - plain.time.total, added, rtol=1e-6)
    assert "host" not in runs["base"].rollout(batch).time.stages


@pytest.mark.parametrize("name", [pytest.param("gradient", marks=pytest.mark.slow), "linear_program"])
def test_allocations_by_optimisation_are_runs_like_others(setting, name):
    """They compute every request, are replayed, and no run beats the bound."""
    batch = steps_of()
    own = system_of("wafer_gpu", allocation=name, prediction="none", bound=True).runs(setting)["wafer_gpu"]
    rolled = own.rollout(batch)
    counts = np.bincount(np.asarray(batch.experts)[1, 2].ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(rolled.kept["requests"][2, 1].sum(axis=1), counts)
    assert rolled.figures["bound_s"] <= rolled.time.total.sum() * (1 + 1e-5)
    assert rolled.time.total[1, 0] == pytest.approx(own.replay(rolled, at(batch, 0, 1), 1, 0), rel=0.15)


def test_what_the_llc_was_filled_with_is_replayed(setting):
    """The second layer reads from the LLC, in the model and as many bytes in the simulator."""
    run = system_of("wafer_gpu", llc_prefetch=True).runs(setting)["wafer_gpu"]
    rolled = run.rollout(steps_of())
    assert rolled.kept["hits"][:, 0].max() == 0 < rolled.kept["hits"][:, 1].max()
    assert rolled.figures["llc_read"] > 0


def test_popular_experts_are_copied_as_far_as_they_fit():
    load = np.array([[5, 9, 1, 7]])
    home = np.array([[0, 1, 2, 0]])
    held = popular_copies(load, home, np.full(3, 2.0), 2)
    np.testing.assert_array_equal(np.argwhere(held[0]), [[1, 0], [1, 2], [3, 1], [3, 2]])
    assert popular_copies(load, home, np.full(3, 1.0), 2).sum() == 2


def test_requests_are_kept_apart():
    trace = trace_of()
    batch, before = request_batches(trace, 4, 3, 0)
    experts = np.asarray(batch.experts)
    # Sequences start every 512 tokens: their first windows come first.
    for request, start in enumerate((0, 512, 1024, 1536)):
        np.testing.assert_array_equal(experts[:, :, request], np.moveaxis(trace.experts[start : start + 3], 1, 0))
    assert not before.any()


def test_decode_tokens_are_taken_and_the_prefill_is_what_was_seen():
    plain = trace_of(1024)
    phase = (np.arange(1024) % 512 >= 100).astype(np.int8)
    trace = GatingTrace(plain.experts, EXPERTS, plain.layer_ids, plain.seq_start, None, plain.facts, phase=phase)
    batch, before = request_batches(trace, 2, 5, 0)
    np.testing.assert_array_equal(np.asarray(batch.experts)[:, 0, 1], trace.experts[612])
    np.testing.assert_array_equal(np.flatnonzero(before), [*range(100), *range(512, 612)])


def test_a_batch_larger_than_the_trace_has_requests_is_refused():
    with pytest.raises(TraceError, match=r"200 requests of 20 tokens each is more than the 100 in the trace"):
        request_batches(trace_of(), 200, 20, 0)


@pytest.mark.parametrize("switching", ["cut_through", "store_and_forward"])
def test_reads_in_turn_are_those_of_the_simulator(setting, switching):
    batch, keys = steps_of(), {"outstanding": 1, "switching": switching, "split": 1}
    runs = system_of("wafer_gpu", **keys).runs(setting)
    for run in runs.values():
        rolled = run.rollout(batch)
        assert rolled.time.total[1, 0] == pytest.approx(run.replay(rolled, at(batch, 0, 1), 1, 0), rel=0.02)
    stream = system_of("wafer_gpu", split=1).runs(setting)["base"].rollout(batch)
    assert (runs["base"].rollout(batch).time.total > stream.time.total).all()


def test_a_stream_is_not_stored_and_forwarded(setting):
    with pytest.raises(UnsuitableSystemError, match=r"store_and_forward, but dies read in a stream.* to 1 or more"):
        system_of("wafer_gpu", switching="store_and_forward").runs(setting)


def test_slices_that_do_not_divide_an_expert_are_refused(setting):
    with pytest.raises(UnsuitableSystemError, match=r"system.slices is 3, expected a divisor of the 128 columns"):
        system_of("wafer_gpu", slices=3).runs(setting)


@pytest.mark.parametrize(("key", "known"), [("allocation", "allo"), ("prediction", "perfect"), ("eviction", "keep")])
def test_an_unknown_policy_of_a_scenario_is_refused(key, known):
    with pytest.raises(InputError, match=rf"system\.{key} is .nonsense.; expected .*'{known}'.* for example"):
        load_scenario("configs/scenarios/wafer_gpu/qwen3-235b-a22b_dojo_5x5.yaml", [f"system.{key}=nonsense"])


def test_home_experts_that_do_not_fit_are_refused(setting):
    level = setting.model.machine.memory[-1]
    small = replace(setting.model.machine, memory=(level, replace(level, capacity=full(25, 1e4))))
    with pytest.raises(PlanError, match=r"die \d+ is home to \d experts of .* spread the experts evenly"):
        system_of("wafer_gpu").runs(replace(setting, model=replace(setting.model, machine=small)))


def test_a_machine_without_an_llc_is_refused(setting):
    bare = replace(setting.model.machine, memory=setting.model.machine.memory[1:])
    with pytest.raises(UnsuitableSystemError, match=r"LLC and HBM, but the machine states 1 levels"):
        system_of("wafer_gpu").runs(replace(setting, model=replace(setting.model, machine=bare)))


def test_plans_that_split_experts_are_refused(setting):
    share = setting.share.copy()
    share[1, 5] = 1 / 25
    with pytest.raises(UnsuitableSystemError, match=r"expert 5 of its layer 1 on 25 nodes"):
        system_of("wafer_gpu").runs(replace(setting, share=share))


def test_memory_without_an_end_holds_all_popular_copies():
    load, home = np.array([[3, 9, 1]]), np.array([[0, 1, 0]])
    held = popular_copies(load, home, np.full(2, np.inf), 5)
    np.testing.assert_array_equal(held, [[[False, True], [True, False], [False, True]]])  # everywhere but at home
