"""Weights that travel: each movement has its own stage, is replayed, and limits a layer only where it takes time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe as jm
from jaxmoe.methods.system import UnsuitableSystemError

EXPERTS, NODES = 8, 8


@pytest.fixture(scope="module")
def mesh() -> jm.Mesh:
    return jm.mesh((2, 4), 50e9, 1e-7)


@pytest.fixture(scope="module")
def layer(mesh: jm.Mesh) -> jm.Layer:
    return jm.layer(jm.machine(mesh, 5e12), jm.model("mixtral-8x7b"))


@pytest.fixture(scope="module")
def trace() -> jm.GatingTrace:
    return jm.synthetic_trace(128, range(2), EXPERTS, 2, skew=0.6, coactivation=0.3, reuse=0.2, seed=0)


class Moving(jm.Method):
    """The plan, and these movements before every step."""

    share: jax.Array
    movements: tuple

    def init(self, machine):
        return ()

    def step(self, machine, state, tokens, last):
        return state, jm.Decisions(self.share, movements=self.movements)


def everywhere(*experts: int, **options: bool) -> jm.Movement:
    """These experts of both layers, to all nodes."""
    return jm.Movement(jnp.zeros((2, EXPERTS, NODES)).at[:, jnp.asarray(experts), :].set(1), **options)


@pytest.fixture(scope="module")
def run(mesh, layer, trace):
    share, steps = jm.expert_parallel(trace, mesh), jm.sample_batches(trace, 16, 1, seed=1)
    return lambda *movements: jm.rollout(Moving(share, movements), layer, steps)


def test_several_movements_add_up_in_any_order(run):
    one, other = everywhere(0), everywhere(1, 2)
    alone = run().time.total
    added = sum(run(each).time.total - alone for each in (one, other))
    for pair in ((one, other), (other, one)):
        made = run(*pair)
        np.testing.assert_allclose(made.time.total - alone, added, rtol=1e-5)
        assert {"movement", "movement_2"} <= set(made.time.stages)
        np.testing.assert_allclose(jm.replay(made, 0).movement, (made.time.total - alone)[0], rtol=0.02)


def test_a_hidden_movement_limits_nothing(run):
    shown, hidden = run(everywhere(0, 1)), run(everywhere(0, 1, hidden=True))
    assert shown.time.longest_stage == "movement"
    assert hidden.time.longest_stage == run().time.longest_stage != "movement"
    np.testing.assert_array_equal(hidden.time.total, run().time.total)


def test_a_movement_that_is_no_multicast_is_not_replayed(run):
    from jaxmoe.engine.decisions import Migration

    made = run(Migration(jnp.ones((2, 20)), jnp.ones(2)))
    with pytest.raises(UnsuitableSystemError, match="the movement Migration is not replayed"):
        jm.replay(made, 0)


def test_a_run_under_other_exchanges_is_not_replayed(mesh, layer, trace):
    from jaxmoe.engine import LayerExchanges
    from jaxmoe.network import build_exchange

    share, steps = jm.expert_parallel(trace, mesh), jm.sample_batches(trace, 16, 1, seed=1)
    other = LayerExchanges.from_names(["reduce_scatter"] * 2, lambda name: build_exchange(name, mesh))
    made = jm.rollout(Moving(share, ()), layer, steps, exchanges=other)
    with pytest.raises(jm.ArgumentError, match="the run has the options exchanges"):
        jm.replay(made, 0)


@pytest.mark.parametrize("name", ["ring", "ring_both_ways", "rings_2x2", "rings_4_both_ways"])
def test_rings_know_their_own_names_and_are_compiled_once(mesh, name):
    from jaxmoe.network import build_exchange

    made, other = build_exchange(name, mesh), build_exchange("rings_2x1", mesh)
    assert made.name == name
    assert jax.tree.structure(made) == jax.tree.structure(other)
