"""The recurrence of streaming experts: cases worked by hand, gradients, and agreement with the event simulator."""

import sys
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats

from jaxmoe.engine import LoadRules, OffloadPipeline, SliceCosts, StreamPipeline, StreamTokens
from jaxmoe.engine.offloading import turns_of
from jaxmoe.hardware import Machine
from jaxmoe.methods.expert_streaming.trajectories import streams
from jaxmoe.relax import HardMax

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "expert_streaming"))
import agreement as study
from order import tuned_order

CASE = study.Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 16e6, 8)


Case = tuple[Machine, SliceCosts]


def case_of(case: study.Drawn = CASE) -> Case:
    return study.machine_of(case), study.slices_of("phi-3.5-moe", case.micro_slices, case.sram, 4, control=0.0)


@eqx.filter_jit
def alone(case: Case, tokens: jax.Array):
    """Seconds of a micro-slice and of a whole expert for so many tokens on a die, and of a micro-slice to the next."""
    (machine, costs), one = case, jnp.full((1, 4), tokens)
    whole = costs.part(machine, one, jnp.ones(()))
    return costs.compute(machine, one)[0, 0], whole[0, 0], costs.send(machine)[0, 1]


@eqx.filter_jit
def offloaded(case: Case, tokens: jax.Array, host: jax.Array, prefetch: bool):
    usage = OffloadPipeline(case[1], tokens, host, prefetch).usage(case[0], HardMax())
    return usage.seconds, usage.busy["compute"]


@eqx.filter_jit
def used(case: Case, tokens: np.ndarray, paired: bool = False, everywhere: bool = True):
    machine, costs = case
    counts = StreamTokens(jnp.asarray(tokens, jnp.float32), jnp.zeros(()))
    decided = streams(machine.topology, counts, LoadRules(matched=False), paired, everywhere)
    return StreamPipeline(costs, decided).usage(machine, HardMax())


def seconds(case: Case, tokens: np.ndarray, paired: bool = False) -> jax.Array:
    return used(case, tokens, paired).seconds


EVEN = np.full((8, 4), 2)


def test_few_tokens_take_as_long_as_their_weights_from_ddr():
    case = case_of()
    size = float(case[1].costs.expert_bytes)
    loads = 8 * size / (4 * 25.6e9)
    compute, _, send = alone(case, jnp.asarray(2.0))
    found, last = float(seconds(case, EVEN)), 4 * float(compute) + 3 * float(send)
    np.testing.assert_allclose(found, loads, rtol=last / loads)
    assert found > loads


def test_dies_that_load_their_own_experts_do_not_wait_for_others_buffers():
    """Of eight experts in turn on die 0 and on another: die 0 loads four, however long those of the others are kept."""
    case = case_of(CASE._replace(sram=6e6))
    tokens = np.zeros((8, 4), int)
    tokens[::2, 0] = 2
    tokens[1::2, 1:] = 800 * np.eye(3, dtype=int)[[0, 1, 2, 0]]
    loads = 4 * float(case[1].costs.expert_bytes) / 25.6e9
    own = float(used(case, tokens * [1, 0, 0, 0], everywhere=False).seconds)
    np.testing.assert_allclose(own, loads + float(alone(case, jnp.asarray(2.0))[0]), rtol=1e-5)
    busiest = 2 * float(alone(case, jnp.asarray(800.0))[1])  # of die 1, which has two of the others
    together = float(used(case, tokens, everywhere=False).seconds)
    assert max(own, busiest) < together < 1.1 * max(own, busiest)


def test_many_tokens_take_as_long_as_their_products():
    case = case_of(CASE._replace(ddr=400e9, d2d=4e12))
    busy = 8 * float(alone(case, jnp.asarray(800.0))[1])
    found = float(seconds(case, np.full((8, 4), 800)))
    assert busy < found < 1.08 * busy


def test_a_channel_begins_after_its_latency():
    case = case_of()
    slow = eqx.tree_at(lambda c: c[0].memory[-1].latency, case, floats(np.full(4, 1e-4)))
    np.testing.assert_allclose(float(seconds(slow, EVEN)) - float(seconds(case, EVEN)), 1e-4, rtol=1e-3)


def test_experts_without_tokens_cost_nothing():
    with_idle = np.concatenate([EVEN, np.zeros((3, 4), int)])
    np.testing.assert_allclose(seconds(case_of(), with_idle), seconds(case_of(), EVEN), rtol=1e-6)


def scaled(case: Case, scales: jax.Array) -> Case:
    """DDR, D2D, MACs, buffer and micro-slices times `scales`."""
    ddr, d2d, macs, sram, cut = scales
    machine, costs = case
    topology = machine.topology
    rates = ("link_bandwidth", "injection_bandwidth", "ejection_bandwidth")
    faster = replace(topology, **{rate: getattr(topology, rate) * d2d for rate in rates})
    return eqx.tree_at(
        lambda c: (
            c[0].memory[-1].bandwidth,
            c[0].topology,
            c[0].die.flops,
            c[1].buffer_bytes,
            c[1].micro_slices,
        ),
        case,
        (
            machine.memory[-1].bandwidth * ddr,
            faster,
            machine.die.flops * macs,
            costs.buffer_bytes * sram,
            costs.micro_slices * cut,
        ),
    )


@pytest.mark.parametrize("tokens", [pytest.param(8, marks=pytest.mark.slow), 200])
def test_gradients_are_finite_differences(tokens):
    # Tokens differ from die to die, so that no two maxima are equal.
    with jax.enable_x64(True):
        counts = jnp.asarray(np.random.default_rng(1).integers(tokens, 2 * tokens, (6, 4)) + 0.0)
        base = jax.tree.map(lambda leaf: floats(np.asarray(leaf)) if leaf.dtype == jnp.float32 else leaf, case_of())
        base = eqx.tree_at(lambda c: c[1].buffer_bytes, base, jnp.asarray(np.full(4, 9e6)))
        # Without tiles: their rounding has the gradient of what is not rounded.
        base = eqx.tree_at(lambda c: c[0].die.gemm, base, None)
        at = jax.jit(jax.value_and_grad(lambda scales: seconds(scaled(base, scales), counts, paired=True)))
        one, step = np.ones(5), 1e-6
        slope = np.asarray(at(one)[1])
        expected = [float(at(one + each)[0] - at(one - each)[0]) / (2 * step) for each in step * np.eye(5)]
        np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-9)
        assert slope[2 if tokens == 200 else 0] < 0  # MACs, or DDR


@pytest.mark.parametrize("strategies", [("fse", "fse_paired"), tuple(study.OWN_DIES)], ids=["all dies", "own dies"])
def test_model_and_simulator_agree_on_random_machines(strategies):
    rng, errors = np.random.default_rng(11), []
    for number in range(12):
        model = "phi-3.5-moe"
        case = study.drawn(rng, float(study.costs_of(model).expert_bytes))._replace(shape=(2, 2))
        tokens = study.tokens_of(model, study.TOKENS[number % 4], 4, rng)
        for strategy in strategies:
            found, simulated = study.both(case, model, tokens, strategy)
            errors.append(abs(found / simulated - 1))
    assert np.mean(errors) < 0.05
    assert max(errors) < 0.2


def test_dies_that_load_their_own_experts_one_after_the_other():
    case = case_of()
    host = jnp.asarray(np.eye(4)[[0, 0, 1, 2]], jnp.float32)
    tokens = floats([64.0, 64, 64, 0])
    load = float(case[1].costs.expert_bytes) / 25.6e9
    product = float(alone(case, jnp.asarray(64.0))[1])
    assert turns_of(host).tolist() == [0, 2, 3, 1]
    serial, busy = offloaded(case, tokens, host, prefetch=False)
    np.testing.assert_allclose(serial, 2 * (load + product), rtol=1e-5)
    np.testing.assert_allclose(busy, [2 * product, product, 0, 0], rtol=1e-5)
    ahead, _ = offloaded(case, tokens, host, prefetch=True)
    np.testing.assert_allclose(ahead, load + max(load, product) + product, rtol=1e-5)


@pytest.mark.slow
def test_the_tuned_order_is_no_worse_than_paired_load_and_near_the_optimum():
    streams, paired = study.small_streams(0, 4)
    found = tuned_order(streams, np.stack([paired, np.arange(4)]), steps=10)
    assert sorted(found.order.tolist()) == [0, 1, 2, 3]
    assert found.seconds <= found.starts[0] * (1 + 1e-6)
    assert found.seconds <= 1.01 * study.best_of_all(streams, 4)
