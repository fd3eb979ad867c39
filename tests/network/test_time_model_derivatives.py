"""Derivatives of every time model by all numbers of a network and by traffic, in double precision."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats
from oracles.cases import CHUNK, TIME_MODELS
from oracles.derivatives import check_slopes
from oracles.topologies import NETWORKS, with_random_numbers

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import AlphaBeta, Congestion, Flows
from jaxmoe.network.loads import path_sums
from jaxmoe.relax import HardMax, SmoothMax

REDUCTIONS = (HardMax(), SmoothMax(0.1))
FIELDS = (
    "link_bandwidth",
    "link_latency",
    "injection_bandwidth",
    "ejection_bandwidth",
    "endpoint_latency",
    "efficiency",
)
ALL = {*FIELDS, "traffic"}
OF_PAIRS = {"link_bandwidth", "link_latency", "efficiency", "traffic"}

# What the time of each model depends on.
DEPENDS = {"stored": ALL, "cut_through": ALL, "uncongested": OF_PAIRS, "alpha_beta": OF_PAIRS, "pipelined": OF_PAIRS}


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def random_case(name: str) -> tuple[AbstractTopology, dict[str, jax.Array]]:
    """A network, and numbers of double precision for it and its traffic, of which no two are alike."""
    rng = np.random.default_rng(6)
    topology = with_random_numbers(NETWORKS[name], rng)
    numbers = {field: floats(getattr(topology, field)) for field in FIELDS}
    numbers["traffic"] = jnp.asarray(rng.uniform(1e5, 2e6, (topology.num_nodes, topology.num_nodes)))
    return topology, numbers


def with_numbers(topology: AbstractTopology, numbers: dict[str, jax.Array]) -> AbstractTopology:
    fields = [field for field in numbers if field != "traffic"]
    return eqx.tree_at(lambda t: [getattr(t, field) for field in fields], topology, [numbers[f] for f in fields])


@pytest.mark.parametrize("model", TIME_MODELS)
@pytest.mark.parametrize("network", ["mesh", "dragonfly", pytest.param("spines", marks=pytest.mark.slow)])
def test_gradients_agree_with_central_differences(network, model):
    topology, numbers = random_case(network)

    def times(values):
        changed = with_numbers(topology, values)
        stage = TIME_MODELS[model](changed)(changed, values["traffic"])
        return jnp.stack([stage.total(reduction) for reduction in REDUCTIONS])

    hard, smooth = check_slopes(times, numbers)
    assert smooth == DEPENDS[model]
    assert {"efficiency", "traffic"} <= hard <= smooth


def test_gradients_of_measured_constants_agree_with_central_differences():
    topology, numbers = random_case("mesh")
    rng = np.random.default_rng(0)
    numbers = {
        "alpha": jnp.asarray(rng.uniform(1e-6, 1e-5, (6, 6))),
        "beta": jnp.asarray(rng.uniform(1e-10, 1e-9, (6, 6))),
        "traffic": numbers["traffic"],
    }

    def times(values):
        stage = AlphaBeta(values["alpha"], values["beta"])(topology, values["traffic"])
        return jnp.stack([stage.total(reduction) for reduction in REDUCTIONS])

    assert check_slopes(times, numbers) == [{"alpha", "beta", "traffic"}] * 2


@pytest.mark.parametrize("model", TIME_MODELS)
@pytest.mark.parametrize("network", ["mesh", "torus"])
def test_gradients_at_ties_are_finite_and_share_what_bandwidth_brings(network, model):
    """Where all links, ports and messages are alike: without latencies, twice the bandwidth is half the time."""
    topology = NETWORKS[network]
    names = ("link_bandwidth", "injection_bandwidth", "ejection_bandwidth")
    sizes = (topology.num_links, topology.num_nodes, topology.num_nodes)
    numbers = {name: jnp.asarray(np.ones(size)) for name, size in zip(names, sizes, strict=True)}
    topology = dataclasses.replace(topology, link_latency=jnp.asarray(np.zeros(topology.num_links)), **numbers)
    traffic = jnp.asarray(np.full((topology.num_nodes, topology.num_nodes), 2 * CHUNK))

    def time(values):
        changed = with_numbers(topology, values)
        return TIME_MODELS[model](changed)(changed, traffic).total(HardMax())

    total, gradient = jax.jit(jax.value_and_grad(time))(numbers)
    assert sum(np.asarray(part).sum() for part in gradient.values()) == pytest.approx(-float(total), rel=1e-6)


@pytest.mark.parametrize("amount", [0.1, 1.0])  # of messages: all pairs of nodes have less than one, or some have more
def test_a_delay_towards_many_nodes_has_the_derivative_of_the_longest_path(amount):
    rng = np.random.default_rng(4)
    topology = with_random_numbers(NETWORKS["mesh"], rng)
    nodes = topology.num_nodes
    source, towards = (jnp.asarray(amount * rng.random((5, nodes))) for _ in range(2))
    assert ((source.T @ towards).max() > 1) == (amount == 1)
    latency = path_sums(topology, topology.link_latency) + topology.endpoint_latency * (1 - jnp.eye(nodes))

    def longest(source, towards, latency):
        return (jnp.minimum(source.T @ towards, 1) * latency).max()

    def modelled(source, towards):
        flows = Flows(source, towards, jnp.ones(()))
        return Congestion(jnp.asarray(0.0), cut_through=True).of_flows(topology, flows, jnp.ones(())).path_delay

    for each in (0, 1):
        expected = jax.grad(longest, argnums=each)(source, towards, latency)
        np.testing.assert_allclose(jax.grad(modelled, argnums=each)(source, towards), expected, rtol=1e-9)


def test_a_delay_to_one_node_each_has_the_derivative_of_the_longest_path():
    rng = np.random.default_rng(5)
    topology = with_random_numbers(NETWORKS["mesh"], rng)
    nodes = topology.num_nodes
    source, weight, latency = (jnp.asarray(rng.random(shape)) for shape in ((5, nodes), 5, topology.num_links))
    home = jnp.asarray(rng.integers(nodes, size=5))

    def longest(source, weight, latency):
        delay = path_sums(topology, latency) + topology.endpoint_latency * (1 - jnp.eye(nodes))
        return (jnp.minimum(source, 1) * jnp.minimum(weight, 1)[:, None] * delay[:, home].T).max()

    def modelled(source, weight, latency):
        changed = dataclasses.replace(topology, link_latency=latency)
        flows = Flows(source, home, jnp.ones(()), weight)
        return Congestion(jnp.asarray(0.0), cut_through=True).of_flows(changed, flows, jnp.ones(())).path_delay

    for scale in (1.0, 4.0):  # parts of a message, and some whole ones
        given = (scale * source, scale * weight, latency)
        slopes, expected = (jax.grad(each, argnums=(0, 1, 2))(*given) for each in (modelled, longest))
        for slope, other in zip(slopes, expected, strict=True):
            np.testing.assert_allclose(slope, other, rtol=1e-9)
