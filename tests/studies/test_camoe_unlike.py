"""Copies that the biased gate sends between unlike GPUs, against the package's own passes."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.hardware import fully_connected
from jaxmoe.methods.camoe.gate import GateProblem, evaluate_gate, unbiased, unbiased_copies
from jaxmoe.network import AlphaBeta
from jaxmoe.network.pairwise import AllToAll, same_models

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "camoe"))
from unlike import copies_of

sys.path.pop(0)


def batch_of(seed: int) -> GateProblem:
    random = np.random.default_rng(seed)
    models = same_models(AlphaBeta(jnp.full((4, 4), 1e-6), jnp.full((4, 4), 1e-9)))
    return GateProblem(
        exchange=AllToAll(models, *(jnp.asarray(size) for size in (32.0, 4100.0, 4096.0))),
        topology=fully_connected(4, 1e9, 1e-6),
        logits=jnp.asarray(random.normal(size=(2, 24, 8)), jnp.float32),
        source=jnp.asarray(np.arange(24) * 4 // 24, jnp.int32),
        share=jnp.broadcast_to(jnp.repeat(jnp.eye(4), 2, axis=0), (2, 8, 4)),
        weight=jnp.asarray(3.0),
        top_k=2,
    )


def test_without_a_bias_copies_are_those_of_the_unbiased_pass():
    batch = batch_of(0)
    assert copies_of(batch, unbiased(batch)) == pytest.approx(unbiased_copies(batch))


def test_copies_under_a_bias_have_the_time_of_the_gate():
    batch = batch_of(1)
    bias = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, 8)), jnp.float32)
    seconds = [float(batch.exchange.total(batch.topology, copies)) for copies in copies_of(batch, bias)]
    assert seconds == pytest.approx(np.asarray(evaluate_gate(batch, bias).seconds))
    assert copies_of(batch, bias).sum(axis=(1, 2)) == pytest.approx(3 * 24 * 2)
