"""Tokens that go round dies with slices of experts: a case worked by hand, and model against event simulator."""

import sys
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full

from jaxmoe.des.streaming_layer import circulated
from jaxmoe.engine import RingDecisions, RingPipeline, SliceCosts
from jaxmoe.hardware import Machine
from jaxmoe.relax import HardMax

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "expert_streaming"))
import agreement as study

RING = np.array([0, 1, 3, 2])
CASE = study.Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 8e6, 1)
MODEL, CONTROL = "qwen3-30b-a3b", 2e-7


Case = tuple[Machine, SliceCosts]


def case_of(case: study.Drawn = CASE) -> Case:
    return study.machine_of(case), study.slices_of(MODEL, 1, case.sram, 4, CONTROL)


@eqx.filter_jit
def used(case: Case, tokens: np.ndarray, prefetch: bool):
    decided = RingDecisions(jnp.asarray(tokens, jnp.float32), tuple(RING.tolist()), prefetch)
    return RingPipeline(case[1], decided).usage(case[0], HardMax())


def seconds(case: Case, tokens: np.ndarray, prefetch: bool) -> tuple[jax.Array, jax.Array]:
    usage = used(case, tokens, prefetch)
    return usage.seconds, usage.busy["compute"]


def test_one_token_passes_every_die_and_goes_home():
    case = case_of()
    size = 3 * 2048 * 768
    load = size / 4 / 25.6e9 + CONTROL
    # A tile of 8 rows and a quarter of the columns.
    product = 8 * 6 * 2048 * 768 / 4 / 3.2768e12 + CONTROL
    forth, back = (count * 2048 / 288e9 + 4.02e-9 + CONTROL for count in (2, 1))
    found, busy = seconds(case, np.array([[0, 1, 0, 0]]), False)
    np.testing.assert_allclose(found, load + 4 * product + 3 * forth + back, rtol=1e-5)
    np.testing.assert_allclose(busy, product, rtol=1e-5)


def test_an_expert_waits_for_the_one_before_but_for_a_second_buffer():
    case = case_of()
    load = 3 * 2048 * 768 / 4 / 25.6e9 + CONTROL
    tokens = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    serial, ahead = (float(seconds(case, tokens, prefetch)[0]) for prefetch in (False, True))
    once = float(seconds(case, tokens[:1], False)[0])
    assert 3 * once - 3 * 2e-6 < serial <= 3 * once
    np.testing.assert_allclose(ahead, 2 * load + once, rtol=0.02)  # loads are longer than the rest


@pytest.mark.parametrize("prefetch", [False, True])
def test_model_and_simulator_are_one(prefetch):
    rng = np.random.default_rng(2)
    for case, tokens in ((CASE, 40), (CASE._replace(ddr=400e9), 300), (CASE._replace(d2d=5e9), 40)):
        counts = study.tokens_of(MODEL, tokens, 4, rng)
        described = study.described(study.machine_of(case), study.costs_of(MODEL))
        described = replace(described, dispatch_bytes=2048.0, combine_bytes=2048.0)
        found = float(seconds(case_of(case), counts, prefetch)[0])
        np.testing.assert_allclose(found, circulated(described, counts, RING, prefetch, CONTROL), rtol=1e-4)


def test_gradients_are_finite_differences():
    tokens = np.random.default_rng(3).integers(0, 30, (5, 4))

    def at(scale: jax.Array) -> jax.Array:
        case = eqx.tree_at(lambda c: c[0].memory[-1].bandwidth, case_of(), full(4, 25.6e9) * scale)
        return seconds(case, tokens, True)[0] * 1e6

    compiled = jax.jit(jax.value_and_grad(at))
    slope = compiled(jnp.asarray(1.0))[1]
    ahead, behind = (compiled(jnp.asarray(each))[0] for each in (1.01, 0.99))
    np.testing.assert_allclose(slope, (ahead - behind) / 0.02, rtol=0.01)
    assert slope < 0
