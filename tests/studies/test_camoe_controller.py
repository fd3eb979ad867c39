"""The controller on a network that changes: what it learns, when it probes, and what it leaves alone."""

import sys
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full

from jaxmoe.hardware import fully_connected
from jaxmoe.network import AlphaBeta
from jaxmoe.network.pairwise import AllToAll, same_models

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "camoe"))
from gate_control import GateController, Observed

sys.path.pop(0)

NODES, EXPERTS = 4, 8
SHARE = jnp.asarray(np.repeat(np.eye(NODES, dtype=np.float32), 2, axis=0))
COPIES = jnp.asarray(np.random.default_rng(0).uniform(1000, 3000, (NODES, NODES)), jnp.float32)
NETWORK = fully_connected(NODES, 1e9, 0.0)
AWAY = ~np.eye(NODES, dtype=bool)


def exchange_of(slowness) -> AllToAll:
    model = AlphaBeta(full((NODES, NODES), 1e-3), 1e-8 * jnp.asarray(slowness, jnp.float32))
    return AllToAll(same_models(model), *(jnp.asarray(size) for size in (512.0, 4100.0, 4096.0)))


CONTROLLER = GateController(exchange_of(np.ones((NODES, NODES))), COPIES, SHARE, 0.2)


@eqx.filter_jit
def seconds_of(exchange: AllToAll) -> dict[str, jax.Array]:
    return exchange.seconds(NETWORK, COPIES)


@eqx.filter_jit
def stepped(controller: GateController, state, seen: Observed):
    return controller.step(state, seen)


def run(slowness, iterations: int, noise: float = 0.0, controller: GateController = CONTROLLER):
    """States of a controller under a network, and bytes probed."""
    seconds, rng = jax.tree.map(np.asarray, seconds_of(exchange_of(slowness))), np.random.default_rng(1)
    state, states, probed = controller.init(), [], 0
    lone = 1e-3 + 1e-8 * np.asarray(slowness) * float(controller.probe_bytes)
    for _ in range(iterations):
        probes = np.where(np.asarray(state.probe), lone, 0)
        probed += int(np.asarray(state.probe).sum())
        shake = partial(rng.normal, 1, noise)
        seen = Observed(
            COPIES,
            jnp.asarray(seconds["dispatch"] * shake(), jnp.float32),
            jnp.asarray(seconds["combine"] * shake(), jnp.float32),
            jnp.asarray(probes * shake(size=probes.shape), jnp.float32),
        )
        state = stepped(controller, state, seen)
        states.append(state)
    return states, probed


def test_where_times_are_as_predicted_nothing_is_probed_but_in_turn():
    states, probed = run(np.ones((NODES, NODES)), 49)
    assert probed == 0
    np.testing.assert_allclose(states[-1].strength, 0.2, rtol=1e-4)
    states, probed = run(np.ones((NODES, NODES)), 50 * NODES * (NODES - 1) + 1)
    assert probed == NODES * (NODES - 1)


@pytest.mark.parametrize("pair", [(0, 1), (3, 2)])
def test_a_link_that_slows_down_is_found(pair):
    slowness = np.ones((NODES, NODES))
    slowness[pair] = 4
    states, _ = run(slowness, 20, noise=0.03)
    found = np.asarray(states[-1].slowness)
    assert found[pair] == pytest.approx(4, rel=0.15)
    others = AWAY.copy()
    others[pair] = False
    np.testing.assert_allclose(found[others], 1, atol=0.2)


def test_lambda_rises_while_times_are_off_and_comes_back():
    slowness = np.ones((NODES, NODES))
    slowness[0, 1] = 4
    states, _ = run(slowness, 40)
    strengths = [float(state.strength) for state in states]
    assert max(strengths) > 0.21
    assert max(strengths) <= 0.3 + 1e-6
    assert strengths[-1] == pytest.approx(0.2, rel=0.05)


def test_a_link_that_becomes_faster_is_found_in_turn():
    slowness = np.ones((NODES, NODES))
    slowness[0, 1] = 0.25
    states, _ = run(slowness, 50 * NODES * (NODES - 1) + 2)
    assert float(states[-1].slowness[0, 1]) == pytest.approx(0.25, rel=1e-3)


def test_the_bias_follows_what_is_believed():
    slowness = np.ones((NODES, NODES))
    slowness[0, 1] = 4
    states, _ = run(slowness, 40)
    before, after = (np.asarray(CONTROLLER.bias(state)) for state in (CONTROLLER.init(), states[-1]))
    assert after[0, 2] < before[0, 2] - 0.05  # experts 2 and 3 are at node 1
    assert jax.tree.all(jax.tree.map(lambda leaf: bool(np.isfinite(leaf).all()), after))
