"""The three stages of an all-to-all: worked by hand, against a plain loop, and as functions JAX can transform."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.arrays import floats, full

from jaxmoe.hardware import fully_connected, switch
from jaxmoe.network import AlphaBeta, Congestion
from jaxmoe.network.pairwise import AllToAll, same_models

SIZES = (512.0, 4160.0, 4096.0)


def of(models) -> AllToAll:
    return AllToAll(models, *(jnp.asarray(size, jnp.float32) for size in SIZES))


# Compiled whole, not operation by operation.
seconds_of = eqx.filter_jit(lambda exchange, network, copies: exchange.seconds(network, copies))


def tables(seed: int, nodes: int) -> dict[str, AlphaBeta]:
    rng = np.random.default_rng(seed)
    numbers = rng.uniform(1e-5, 1e-3, (3, nodes, nodes)), 1 / rng.uniform(1e8, 1e9, (3, nodes, nodes))
    alpha, beta = (each.astype(np.float32) for each in numbers)
    return {
        name: AlphaBeta(jnp.asarray(alpha[row]), jnp.asarray(beta[row]))
        for row, name in enumerate(("metadata", "dispatch", "combine"))
    }


def test_two_nodes_by_hand():
    same = AlphaBeta(full((2, 2), 1e-3), floats([[0.0, 1e-8], [2e-8, 0.0]]))
    copies = floats([[7.0, 100.0], [10.0, 3.0]])
    found = seconds_of(of(same_models(same)), fully_connected(2, 1e9, 0.0), copies)
    assert float(found["metadata"]) == pytest.approx(1e-3 + 2e-8 * 512, rel=1e-6)
    assert float(found["dispatch"]) == pytest.approx(1e-3 + 1e-8 * 416000, rel=1e-6)
    # Back from 1 to 0 go the 100, over the slower way.
    assert float(found["combine"]) == pytest.approx(1e-3 + 2e-8 * 409600, rel=1e-6)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31))
def test_every_stage_is_its_slowest_pair(seed):
    nodes, models = 4, tables(seed, 4)
    copies = np.random.default_rng(seed).integers(0, 50, (nodes, nodes)).astype(np.float32)
    found = seconds_of(of(models), fully_connected(nodes, 1e9, 0.0), jnp.asarray(copies))
    constants = {name: (np.asarray(model.alpha), np.asarray(model.beta)) for name, model in models.items()}
    for name, size in zip(models, SIZES, strict=True):
        slowest = 0.0
        for source in range(nodes):
            for destination in range(nodes):
                count = {"metadata": 1, "dispatch": copies[source, destination]}.get(name, copies[destination, source])
                if source != destination and count > 0:
                    alpha, beta = (float(table[source, destination]) for table in constants[name])
                    slowest = max(slowest, alpha + beta * count * size)
        assert float(found[name]) == pytest.approx(slowest, rel=1e-5)


def test_another_time_model_prices_the_same_traffic():
    network, copies = switch(3, 1e6, 0.0), floats([[0.0, 2.0, 2.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = seconds_of(of(same_models(Congestion(jnp.asarray(1.0)))), network, copies)
    assert float(found["dispatch"]) == pytest.approx(4 * 4160e-6, rel=1e-3)  # both share the link up to the switch
    assert float(found["combine"]) == pytest.approx(4 * 4096e-6, rel=1e-3)


def test_derivatives_by_the_hardware_and_no_new_compilation():
    network, copies = fully_connected(3, 1e9, 0.0), jnp.asarray(np.arange(9.0).reshape(3, 3), jnp.float32)
    models = tables(1, 3)
    compiled = jax.jit(lambda exchange: exchange.total(network, copies))
    for factor in (1.0, 2.0):
        compiled(
            of({name: replace(model, beta=floats(factor * np.asarray(model.beta))) for name, model in models.items()})
        )
    assert compiled._cache_size() == 1
    gradient = jax.device_get(jax.jit(jax.grad(lambda exchange: exchange.total(network, copies)))(of(models)))
    # One pair sets the time of each stage: what a byte more costs there is its bytes.
    assert float(gradient.models["dispatch"].beta.max()) in [count * SIZES[1] for count in copies.ravel().tolist()]
    assert int((gradient.models["dispatch"].alpha > 0).sum()) == 1
