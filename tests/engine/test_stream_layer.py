"""Layers whose experts come from memory: what they ask of resources, energy, schedules, and relaxed times."""

import sys
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats, full

from jaxmoe.des.streaming import SEND, stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.engine import EvenPart, LoadRules, StreamLayer, StreamTokens, schedule_of
from jaxmoe.engine.circulation import RingDecisions
from jaxmoe.engine.offloading import HostDecisions
from jaxmoe.engine.schedule import ScheduleError
from jaxmoe.engine.times import ATTENTION
from jaxmoe.hardware import Energy
from jaxmoe.methods.expert_streaming.trajectories import ring_of, streams
from jaxmoe.network import Congestion
from jaxmoe.network.exchange import build_exchange
from jaxmoe.relax import SmoothMax
from jaxmoe.traces import Batch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "expert_streaming"))
import agreement as study

CASE = study.Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 16e6, 4)
MODEL, EXPERTS, TOKENS = "qwen3-30b-a3b", 6, 24


def layer(schedule: str = "serial") -> StreamLayer:
    machine = study.machine_of(CASE)
    energy = Energy(jnp.asarray(2e-12), {"ddr": jnp.asarray(5e-12)}, {"d2d": full(machine.topology.num_links, 3e-12)})
    return StreamLayer(
        replace(machine, energy=energy),
        study.slices_of(MODEL, CASE.micro_slices, CASE.sram, 4),
        EvenPart(*floats([1e7, 1e6, 1e4])),
        jnp.asarray(5e-7),
        Congestion(jnp.asarray(0.0)),
        build_exchange("token_home", machine.topology),
        schedule_of(schedule),
    )


def tokens() -> StreamTokens:
    """Every die has tokens of every expert but the last, which nobody chose."""
    counts = np.random.default_rng(4).integers(1, 9, (EXPERTS, 4)) * (np.arange(EXPERTS) < EXPERTS - 1)[:, None]
    return StreamTokens(floats(counts), jnp.asarray(float(TOKENS)))


def batch() -> Batch:
    rng = np.random.default_rng(5)
    experts = jnp.asarray(np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :2], jnp.int32)
    return Batch(experts, floats(rng.random(TOKENS)), floats(rng.random((TOKENS, 2))), jnp.ones(TOKENS))


def decided(kind: str):
    """Decisions of a kind, and the tokens that they are for."""
    machine, given = layer().machine, tokens()
    match kind:
        case "stream":
            return streams(machine.topology, given, LoadRules()), given
        case "host":
            return HostDecisions(jnp.eye(4)[np.arange(EXPERTS) % 4], prefetch=True), batch()
    return RingDecisions(given.on_dies, tuple(ring_of(machine.topology).tolist()), prefetch=False), given


@eqx.filter_jit
def timed(layer: StreamLayer, kind: str, smooth: float | None = None):
    return layer.time(*decided(kind), None if smooth is None else SmoothMax(jnp.asarray(smooth)))


def test_energy_is_of_flops_and_of_bytes_that_the_simulator_moves():
    made, time = layer(), timed(layer(), "stream")
    decisions, given = decided("stream")
    counts, sizes = np.asarray(given.on_dies, int), made.costs.costs
    found = stream(
        flow_of(
            study.described(made.machine, sizes),
            Slicing(CASE.micro_slices, CASE.sram, study.CONTROL),
            counts,
            np.asarray(decisions.groups),
            np.asarray(decisions.following).argmax(axis=-1),
            np.asarray(decisions.loaders) > 0,
        ),
        record=True,
    )
    size = float(made.costs.slice_bytes)
    hops = (found.services.kind == SEND).sum()  # from neighbour to neighbour
    assert float(time.stages["attention"]) > 0
    alone = timed(replace(made, attention=None), "stream")
    np.testing.assert_allclose(alone.energy["memory_ddr"], found.loaded * size * 5e-12, rtol=1e-5)
    np.testing.assert_allclose(alone.energy["d2d"], hops * size * 3e-12, rtol=1e-5)
    flops = counts.sum() * float(sizes.flops_per_token_expert)
    np.testing.assert_allclose(alone.energy["compute"], flops * 2e-12, rtol=1e-5)
    assert all(float(time.energy[name]) > float(alone.energy[name]) for name in alone.energy)
    np.testing.assert_allclose(alone.busy["stream"]["ddr"], found.load_busy, rtol=1e-5)
    np.testing.assert_allclose(alone.busy["stream"]["compute"], found.compute_busy, rtol=1e-5)


@pytest.mark.parametrize("kind", ["host", "ring"])
def test_every_expert_with_tokens_is_loaded_once(kind):
    time, sizes = timed(replace(layer(), attention=None), kind), layer().costs.costs
    _, given = decided(kind)
    counts = np.asarray(given.on_dies if kind == "ring" else np.eye(EXPERTS)[np.asarray(given.experts)].sum(axis=1).T)
    loads = (counts.sum(axis=1) > 0).sum()
    np.testing.assert_allclose(time.energy["memory_ddr"], loads * float(sizes.expert_bytes) * 5e-12, rtol=1e-5)
    flops = counts.sum() * float(sizes.flops_per_token_expert)
    np.testing.assert_allclose(time.energy["compute"], flops * 2e-12, rtol=1e-5)
    if kind == "ring":  # three hops with partial results, and one home
        hop = 3 * float(sizes.dispatch_bytes) + 4 * float(sizes.combine_bytes)
        np.testing.assert_allclose(time.energy["d2d"], counts.sum() * hop * 3e-12, rtol=1e-5)


def test_what_limits_is_named():
    assert timed(layer(), "stream").limit("stream").kind == "ddr"
    assert timed(layer(), "stream").order == ("attention", "stream")
    fast = eqx.tree_at(lambda each: each.machine.memory[-1].bandwidth, layer(), full(4, 1e13))
    assert timed(fast, "stream").limit("stream").kind in ("compute", "port")


@pytest.mark.parametrize("kind", ["stream", "host", "ring"])
def test_overlap_hides_what_leaves_the_rest_of_the_machine_alone(kind):
    """Streams and circulation need arrays, channels and links; loads of a die's own experts leave the links alone."""
    serial, beside = timed(layer(), kind), timed(layer("overlap"), kind)
    whole = sum(float(serial.stages[name]) for name in serial.order)
    np.testing.assert_allclose(serial.total, whole, rtol=1e-6)
    if kind == "host":
        sent = float(serial.dispatch + serial.combine)
        whole = float(serial.stages["attention"]) + max(sent, float(serial.compute))
        assert sent > 0
    np.testing.assert_allclose(beside.total, whole, rtol=1e-6)
    np.testing.assert_allclose(timed(layer("idle_links"), kind).total, serial.total, rtol=1e-6)


@pytest.mark.parametrize(("kind", "stage"), [("stream", "stream"), ("host", "compute"), ("ring", "compute")])
def test_experts_are_not_loaded_again_for_every_part_of_a_batch(kind, stage):
    with pytest.raises(ScheduleError, match=rf"but the stage {stage} is of whole batches; use serial or overlap"):
        timed(layer("pipelined(2)"), kind)


@pytest.mark.parametrize("kind", ["stream", "host", "ring"])
def test_relaxed_times_become_exact_ones(kind):
    exact = float(timed(layer(), kind).total)
    errors = [abs(float(timed(layer(), kind, smooth).total) / exact - 1) for smooth in (0.1, 1e-4)]
    assert errors[1] < 1e-3
    assert errors[1] <= errors[0]


def test_the_time_has_a_slope_for_every_rate():
    def seconds(scale: jax.Array) -> jax.Array:
        made = eqx.tree_at(lambda each: each.machine.memory[-1].bandwidth, layer(), full(4, 25.6e9) * scale)
        return timed(made, "host").total * 1e6

    compiled = jax.jit(jax.value_and_grad(seconds))
    slope = compiled(jnp.asarray(1.0))[1]
    ahead, behind = (compiled(jnp.asarray(each))[0] for each in (1.01, 0.99))
    np.testing.assert_allclose(slope, (ahead - behind) / 0.02, rtol=0.01)
    assert dict(timed(layer(), "host").blocks)[ATTENTION] == ("attention",)
