"""The recurrence of streaming experts: cases worked by hand, gradients, and agreement with the event simulator."""

import sys
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats, full

from jaxmoe.latency.offloading import offloaded_seconds, turns_of
from jaxmoe.latency.streaming import StreamCosts, asked_of, grouped, stream_time
from jaxmoe.policies.streaming import group_members, groups_in_order, loading_dies, ring_of, trajectories

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "expert_streaming"))
import agreement as study
from order import tuned_order

CASE = study.Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 16e6, 8)


def costs_of(case: study.Drawn = CASE, control: float = 0.0) -> StreamCosts:
    return StreamCosts(
        study.machine_of(case),
        study.costs_of("phi-3.5-moe"),
        jnp.asarray(float(case.micro_slices)),
        full(4, case.sram),
        jnp.asarray(control),
    )


@eqx.filter_jit
def alone(costs: StreamCosts, tokens: jax.Array):
    """Seconds of a micro-slice and of a whole expert for so many tokens on a die, and of a micro-slice to the next."""
    one = jnp.full((1, 4), tokens)
    return costs.compute(one)[0, 0], costs.whole(one)[0, 0], costs.send[0, 1]


offloaded = jax.jit(offloaded_seconds, static_argnames="prefetch")


@eqx.filter_jit
def seconds(costs: StreamCosts, tokens: np.ndarray, paired: bool = False) -> jax.Array:
    counts = jnp.asarray(tokens, jnp.float32)
    needed, following = trajectories(counts, ring_of(costs.machine.topology))
    asked = asked_of(costs, counts, needed, following, loading_dies(needed, True))
    members = group_members(groups_in_order(counts, paired), len(tokens))
    return stream_time(costs, grouped(asked, members)).seconds


EVEN = np.full((8, 4), 2)


def test_few_tokens_take_as_long_as_their_weights_from_ddr():
    costs = costs_of()
    size = float(costs.costs.expert_bytes)
    loads = 8 * size / (4 * 25.6e9)
    compute, _, send = alone(costs, jnp.asarray(2.0))
    found, last = float(seconds(costs, EVEN)), 4 * float(compute) + 3 * float(send)
    np.testing.assert_allclose(found, loads, rtol=last / loads)
    assert found > loads


def test_many_tokens_take_as_long_as_their_products():
    costs = costs_of(CASE._replace(ddr=400e9, d2d=4e12))
    busy = 8 * float(alone(costs, jnp.asarray(800.0))[1])
    found = float(seconds(costs, np.full((8, 4), 800)))
    assert busy < found < 1.08 * busy


def test_a_channel_begins_after_its_latency():
    costs = costs_of()
    slow = eqx.tree_at(lambda c: c.machine.memory[-1].latency, costs, floats(np.full(4, 1e-4)))
    np.testing.assert_allclose(float(seconds(slow, EVEN)) - float(seconds(costs, EVEN)), 1e-4, rtol=1e-3)


def test_experts_without_tokens_cost_nothing():
    with_idle = np.concatenate([EVEN, np.zeros((3, 4), int)])
    np.testing.assert_allclose(seconds(costs_of(), with_idle), seconds(costs_of(), EVEN), rtol=1e-6)


def scaled(costs: StreamCosts, scales: jax.Array) -> StreamCosts:
    """DDR, D2D, MACs, buffer and micro-slices times `scales`."""
    ddr, d2d, macs, sram, cut = scales
    topology = costs.machine.topology
    rates = ("link_bandwidth", "injection_bandwidth", "ejection_bandwidth")
    faster = replace(topology, **{rate: getattr(topology, rate) * d2d for rate in rates})
    return eqx.tree_at(
        lambda c: (
            c.machine.memory[-1].bandwidth,
            c.machine.topology,
            c.machine.die.flops,
            c.buffer_bytes,
            c.micro_slices,
        ),
        costs,
        (
            costs.machine.memory[-1].bandwidth * ddr,
            faster,
            costs.machine.die.flops * macs,
            costs.buffer_bytes * sram,
            costs.micro_slices * cut,
        ),
    )


@pytest.mark.parametrize("tokens", [pytest.param(8, marks=pytest.mark.slow), 200])
def test_gradients_are_finite_differences(tokens):
    # Tokens differ from die to die, so that no two maxima are equal.
    with jax.enable_x64(True):
        counts = jnp.asarray(np.random.default_rng(1).integers(tokens, 2 * tokens, (6, 4)) + 0.0)
        base = jax.tree.map(lambda leaf: floats(np.asarray(leaf)) if leaf.dtype == jnp.float32 else leaf, costs_of())
        base = eqx.tree_at(lambda c: c.buffer_bytes, base, jnp.asarray(np.full(4, 9e6)))
        # Without tiles: their rounding has the gradient of what is not rounded.
        base = eqx.tree_at(lambda c: c.machine.die.gemm, base, None)
        at = jax.jit(jax.value_and_grad(lambda scales: seconds(scaled(base, scales), counts, paired=True)))
        one, step = np.ones(5), 1e-6
        slope = np.asarray(at(one)[1])
        expected = [float(at(one + each)[0] - at(one - each)[0]) / (2 * step) for each in step * np.eye(5)]
        np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-9)
        assert slope[2 if tokens == 200 else 0] < 0  # MACs, or DDR


def test_model_and_simulator_agree_on_random_machines():
    rng, errors = np.random.default_rng(11), []
    for number in range(12):
        model = "phi-3.5-moe"
        case = study.drawn(rng, float(study.costs_of(model).expert_bytes))._replace(shape=(2, 2))
        tokens = study.tokens_of(model, study.TOKENS[number % 4], 4, rng)
        for strategy in ("fse", "fse_paired"):
            found, simulated = study.both(case, model, tokens, strategy)
            errors.append(abs(found / simulated - 1))
    assert np.mean(errors) < 0.05
    assert max(errors) < 0.3


def test_dies_that_load_their_own_experts_one_after_the_other():
    costs = costs_of()
    host = jnp.asarray(np.eye(4)[[0, 0, 1, 2]], jnp.float32)
    tokens = floats([64.0, 64, 64, 0])
    load = float(costs.costs.expert_bytes) / 25.6e9
    product = float(alone(costs, jnp.asarray(64.0))[1])
    assert turns_of(host).tolist() == [0, 2, 3, 1]
    serial, busy = offloaded(costs, tokens, host, prefetch=False)
    np.testing.assert_allclose(serial, 2 * (load + product), rtol=1e-5)
    np.testing.assert_allclose(busy, [2 * product, product, 0, 0], rtol=1e-5)
    ahead, _ = offloaded(costs, tokens, host, prefetch=True)
    np.testing.assert_allclose(ahead, load + max(load, product) + product, rtol=1e-5)


@pytest.mark.slow
def test_the_tuned_order_is_no_worse_than_paired_load_and_near_the_optimum():
    costs, asked, paired = study.small_asked(0, 4)
    found = tuned_order(costs, asked, np.stack([paired, np.arange(4)]), steps=10)
    assert sorted(found.order.tolist()) == [0, 1, 2, 3]
    assert found.seconds <= found.starts[0] * (1 + 1e-6)
    assert found.seconds <= 1.01 * study.best_of_all(costs, asked, 4)
