"""Copies under exchanges that choose by congestion or by prices: derivatives of a layer's time, and its limit.

On a network of every kind. In double precision.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats
from oracles.derivatives import check_slopes
from oracles.topologies import both_ways, graph_of, mesh

from jaxmoe.engine import AbstractServing, Decisions, Layer, serving_of
from jaxmoe.hardware import AbstractTopology, Die, Machine, clusters, torus, wafers
from jaxmoe.network import build_exchange
from jaxmoe.placement.exchange import PricedLinks, exchange_of
from jaxmoe.placement.regions import region_copies, regions_named
from jaxmoe.relax import SmoothMax, SoftSupport

EXPERTS, TOKENS, TOP_K, RATE = 3, 6, 2, 2e9
NETWORKS: dict[str, AbstractTopology] = {
    "mesh": mesh((2, 4), RATE),
    "torus": torus((2, 4), RATE, 0.0),
    "wafers": wafers((2, 2), (1, 2), RATE, 0.0, RATE / 2, 0.0),
    "clusters": clusters(2, 2, RATE, 0.0, RATE, 0.0),
    "graph": graph_of(4, both_ways((0, 1), (1, 2), (2, 3), (0, 3), (0, 2)), bandwidth=RATE),
}
# Every network has both kinds of exchange, and one, two and four copies.
CASES = [
    ("mesh", "least_congested", "regions_2_hybrid_2"),
    ("mesh", "priced", "regions_4_tp"),
    ("torus", "least_congested_visited", "regions_4_tp"),
    ("torus", "priced_token_home", "regions_1_hybrid_4"),
    ("wafers", "least_congested", "regions_2_tp"),
    ("wafers", "priced", "regions_4_hybrid_2"),
    ("clusters", "least_congested_token_home", "regions_2_tp"),
    ("clusters", "priced_visited", "regions_1_hybrid_2"),
    ("graph", "least_congested_unicast", "regions_1_hybrid_2"),
    ("graph", "priced", "regions_2_tp"),
]
EVERYDAY = CASES[4:6]
on_networks = pytest.mark.parametrize(
    ("network", "exchange", "regions"),
    [case if case in EVERYDAY else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def layer_on(network: str, exchange: str, regions: str) -> tuple[Layer, jax.Array, AbstractServing]:
    """A layer whose links and nodes have numbers of their own, shares of copies, and which serves whom."""
    rng, topology = np.random.default_rng(len(exchange)), NETWORKS[network]
    rates = floats(np.asarray(topology.link_bandwidth) * rng.uniform(0.8, 1.2, topology.num_links))
    topology = eqx.tree_at(lambda each: each.link_bandwidth, topology, rates)
    described = exchange_of(exchange)
    if isinstance(described, PricedLinks):
        prices = rng.uniform(0.5, 2.0, topology.num_links)
        described = PricedLinks(described.meeting, tuple(prices.tolist()), softness=1e-4)
    model = cases.model_on(Machine(topology, Die(floats(rng.uniform(1e12, 3e12, topology.num_nodes)))))
    model = eqx.tree_at(lambda each: each.exchange, model, build_exchange(described, topology))
    copies = region_copies(regions_named(regions), rng.uniform(1, 2, (1, EXPERTS)), topology)
    parts = copies.share[0] * rng.uniform(0.5, 1.5, copies.share[0].shape)  # no two alike, between which choices jump
    return (
        model,
        floats(parts / parts.sum(axis=1, keepdims=True)),
        jax.tree.map(lambda leaf: leaf[0], serving_of(copies)),
    )


@on_networks
def test_gradients_agree_with_central_differences(network, exchange, regions):
    model, share, serving = layer_on(network, exchange, regions)
    batch = cases.batch(cases.random_tokens(np.random.default_rng(0), TOKENS, EXPERTS, TOP_K))
    topology = model.machine.topology
    numbers = {"link_bandwidth": topology.link_bandwidth, "flops": model.machine.die.flops, "share": share}

    def times(values):
        where = (lambda m: m.machine.topology.link_bandwidth, lambda m: m.machine.die.flops)
        changed = eqx.tree_at(lambda m: [each(m) for each in where], model, [values["link_bandwidth"], values["flops"]])
        decided = Decisions(values["share"], serving=serving)
        layer = changed.time(decided, batch, SmoothMax(0.1), SoftSupport(0.1))
        return jnp.stack([layer.communication, layer.compute])

    communication, compute = check_slopes(times, numbers)
    assert communication == {"link_bandwidth", "share"}
    assert compute == {"flops", "share"}


@on_networks
def test_the_relaxed_time_tends_to_the_exact_one(network, exchange, regions):
    """Where prices are soft it tends to the mean over all draws; these are so hard that the draw does not matter."""
    model, share, serving = layer_on(network, exchange, regions)
    batch = cases.batch(cases.random_tokens(np.random.default_rng(0), 12, EXPERTS, TOP_K, missing=True))
    decided = Decisions(share, serving=serving)
    exact = float(eqx.filter_jit(lambda model: model.time(decided, batch).total)(model))

    @jax.jit
    def relaxed(sharpness):
        return jax.lax.map(lambda s: model.time(decided, batch, SmoothMax(s), SoftSupport(s)).total, sharpness)

    gaps = np.abs(np.asarray(relaxed(floats([0.1, 0.01, 1e-3, 1e-4, 1e-5]))) / exact - 1)
    assert gaps[-1] < 1e-5 < 1e-4 < gaps[0]
