"""The longest path among the pairs of nodes in use: the times and derivatives of the longest of every flow."""

from dataclasses import replace

import equinox as eqx
import jax
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats, full
from oracles.topologies import mesh, with_random_numbers

from jaxmoe.engine import Layer
from jaxmoe.hardware import Die, Machine
from jaxmoe.network import Congestion
from jaxmoe.relax import HardMax, HardSupport, SoftSupport

EXPERTS, TOKENS = 8, 24


def case(exchange: str, seed: int):
    """A model whose links all differ, a placement and a batch, some of whose tokens have no weight."""
    rng = np.random.default_rng(seed)
    topology = with_random_numbers(mesh((2, 3)), rng)
    tokens = cases.random_tokens(rng, TOKENS, EXPERTS, 2)
    tokens.weight = rng.permutation(np.resize([1.0, 0.0, 3.0], TOKENS))
    share = floats(cases.random_share(rng, EXPERTS, topology.num_nodes))
    return cases.model_on(Machine(topology, Die(full(6, 1e15))), rule=exchange), share, cases.batch(tokens)


@eqx.filter_jit
def slopes(model: Layer, share, batch, support):
    """The total, and its derivatives by latency and bandwidth of every link and by the shares."""

    def total(numbers, share):
        latency, bandwidth = numbers
        changed = eqx.tree_at(
            lambda m: (m.machine.topology.link_latency, m.machine.topology.link_bandwidth), model, (latency, bandwidth)
        )
        return changed(share, batch, None, HardMax(), support).total

    network = model.machine.topology
    return jax.value_and_grad(total, (0, 1))((network.link_latency, network.link_bandwidth), share)


@pytest.mark.parametrize(
    ("exchange", "support"),
    [
        ("random_host", SoftSupport(0.1)),
        pytest.param("corner_host_tree", HardSupport(), marks=pytest.mark.slow),
        pytest.param("least_loaded_split_tree", SoftSupport(0.1), marks=pytest.mark.slow),
        pytest.param("rings_1x3", HardSupport(), marks=pytest.mark.slow),
    ],
)
def test_times_and_derivatives_are_those_of_flow_by_flow(exchange, support):
    for seed in range(3):
        model, share, batch = case(exchange, seed)
        assert isinstance(model.time_model, Congestion)
        paired = replace(model, time_model=replace(model.time_model, pair_by_pair=True))
        (expected, by_flow), (found, by_pair) = (slopes(each, share, batch, support) for each in (model, paired))
        assert float(found) == pytest.approx(float(expected), rel=1e-6)
        for one, other in zip(jax.tree.leaves(by_pair), jax.tree.leaves(by_flow), strict=True):
            assert np.abs(other).max() > 0
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())
