"""Least congested exchanges: choices by hand, the simulator's own, prices, and what gradients see."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats
from oracles.exchange import LEAST_CONGESTED
from oracles.topologies import NETWORKS, mesh

from jaxmoe.des import fabric_of
from jaxmoe.des.congested import chosen_ways
from jaxmoe.hardware import wafers
from jaxmoe.network import Visits, build_exchange, sharded_visits
from jaxmoe.network.congested import ChosenRoutes, LeastCongestedExchange, link_prices
from jaxmoe.placement.exchange import ExchangeError, exchange_of
from jaxmoe.relax import HardSupport, SmoothMax, SoftSupport

SLOW_BORDER = wafers((2, 2), (1, 2), 1.0, 0.0, 0.5, 0.0)


def visits_of(visited, source=None, weight=1.0) -> Visits:
    """Tokens that visit these nodes."""
    visited = floats(visited)
    tokens, nodes = visited.shape
    source = jnp.zeros(tokens, jnp.int32) if source is None else jnp.asarray(source)
    empty = jnp.zeros((1, nodes))
    return Visits(
        visited, None, source, empty[0], empty, empty, empty[0], jnp.full(tokens, weight), jnp.zeros(tokens), source
    )


def choices(name, topology, visited, source=None):
    exchange = build_exchange(name, topology)
    found = eqx.filter_jit(exchange.choices)(topology, visits_of(visited, source))
    return [np.asarray(each).tolist() for each in found[:2]]


def test_halves_take_what_the_first_has_left_free():
    # A 2x2 mesh; the token visits 0 and 3. Towards 0 there is one link along x and one along y: 3>1>0 in the order of
    # the machine (x first), 3>2>0 in the other. The first half meets at 0 the first way; then these links are dear.
    homes, routes = choices("least_congested", mesh((2, 2)), [[1, 0, 0, 1]])
    assert (homes[0], routes[0]) == ([0], [0])
    # What is left: 3>2>0 across, or 0>2>3 and 0>1>3 towards 3, or one link from each to 1 or 2: towards 1 along 0>1,
    # which is free, and 3>1, which is not; the machine's own order and the lowest number come first.
    assert (homes[1], routes[1]) == ([2], [0])


def test_a_home_that_is_given_leaves_only_the_paths_to_choose():
    visited = np.eye(9)[[8, 8, 8]]
    homes, routes = choices("least_congested_token_home", mesh((3, 3)), visited, source=[0, 0, 0])
    assert homes == [[0, 0, 0]] * 2
    assert sorted(np.ravel(routes)) == [0, 0, 0, 1, 1, 1]


def test_visited_nodes_alone_if_so_asked():
    visited = np.zeros((5, 9))
    visited[:, [0, 8]] = 1
    homes, _ = choices("least_congested_visited", mesh((3, 3)), visited)
    assert set(np.ravel(homes)) == {0, 8}
    free, _ = choices("least_congested", mesh((3, 3)), visited)
    assert set(np.ravel(free)) - {0, 8}


def test_prices_double_by_sixteenths_and_slow_links_are_dearer():
    prices = link_prices(floats([0, 7.5, 15.5, 15.5]), floats([1, 1, 1, 1]))
    assert prices.tolist() == [1, 2**8, 2**16, 2**16]
    assert link_prices(floats([0, 3.5]), floats([4, 1])).tolist() == [2**8, 2**16]


@pytest.mark.parametrize("name", [each for each in LEAST_CONGESTED if "visited" not in each])
@pytest.mark.parametrize("network", ["mesh", "yx_mesh", "torus", "clusters", "dragonfly", "detours", "wafers"])
def test_the_simulator_chooses_alike(network, name):
    topology = SLOW_BORDER if network == "wafers" else NETWORKS[network]
    rng = np.random.default_rng(len(name))
    nodes = topology.num_nodes
    visited = rng.random((40, nodes)) < 0.4
    source = rng.integers(nodes, size=40)
    found = choices(name, topology, visited, source)
    expected = chosen_ways(exchange_of(name), fabric_of(topology, None), visited, source)
    somewhere = visited.any(axis=1)
    for seen, known in zip(found, expected, strict=True):
        assert (np.asarray(seen) == known)[:, somewhere].all()


@pytest.mark.parametrize("name", ["least_congested_by_3", "least_congested_visited", "least_congested_unicast"])
@pytest.mark.parametrize("network", ["mesh", "torus"])
def test_many_at_once_choose_as_one_by_one(network, name):
    """Mapped over machines that differ, and over batches inside; what is not mapped over is the same for all."""
    topology, rng = NETWORKS[network], np.random.default_rng(1)
    exchange = build_exchange(name, topology)
    batches = floats(rng.random((2, 10, topology.num_nodes)) < 0.4)
    bandwidths = topology.link_bandwidth * floats(rng.choice([1, 2], (3, topology.num_links)))

    def chosen(bandwidth, visited):
        machine = eqx.tree_at(lambda each: each.link_bandwidth, topology, bandwidth)
        return exchange.choices(machine, replace(visits_of(np.zeros(visited.shape)), visited=visited))

    found = jax.jit(jax.vmap(jax.vmap(chosen, (None, 0)), (0, None)))(bandwidths, batches)
    for machine, bandwidth in enumerate(bandwidths):
        for number, batch in enumerate(batches):
            alone = jax.jit(chosen)(bandwidth, batch)
            for many, one in zip(found, alone, strict=True):
                assert (many[machine, number] == one).all()


def test_tokens_that_choose_at_once_crowd_but_little():
    """Prices of the last choices alone do not make all tokens go one way: with 8 at once loads grow by some percent."""
    topology, rng = mesh((6, 6)), np.random.default_rng(0)
    visited = rng.random((256, 36)) < 0.15

    def most(name):
        exchange = build_exchange(name, topology)
        (flows,) = exchange(topology, visits_of(visited))
        congestion = cases.TIME_MODELS["stored"](topology)
        return sum(congestion.of_flows(topology, each, jnp.ones(())).link_bytes for each in flows).max()

    one_by_one, eight, corners = (
        float(most(name)) for name in ("least_congested", "least_congested_by_8", "corner_host_split_tree")
    )
    assert one_by_one <= eight < 1.05 * one_by_one
    assert eight < 0.85 * corners


@pytest.mark.parametrize(
    ("name", "in_rounds"),
    [
        ("least_congested_visited", "least_congested_visited_by_4"),
        ("least_congested_by_8", "least_congested_by_8"),
        ("least_loaded", "least_loaded"),
    ],
)
def test_an_exchange_in_rounds(name, in_rounds):
    assert build_exchange(name, mesh((2, 2))).in_rounds(4).name == in_rounds


class Given(LeastCongestedExchange):
    """The exchange with choices that are made already; what links carry is found by following the trees."""

    made: ChosenRoutes | None = None

    def choices(self, topology, visits):
        return self.made

    def __call__(self, topology, visits):
        (flows,) = super().__call__(topology, visits)
        return (tuple(replace(each, carried=None) for each in flows),)


def relaxed(exchange, topology, share, batch, width, temperature):
    visits = sharded_visits(share, batch, SoftSupport(jnp.asarray(width)))
    (flows,) = exchange(topology, visits)
    congestion = cases.TIME_MODELS["stored"](topology)
    loads = sum(congestion.of_flows(topology, each, jnp.ones(())).link_bytes for each in flows)
    return SmoothMax(jnp.asarray(temperature))(loads)


@pytest.mark.parametrize("name", ["least_congested", "least_congested_token_home_unicast"])
@pytest.mark.parametrize("topology", [mesh((2, 3)), SLOW_BORDER], ids=["mesh", "wafers"])
def test_relaxed_loads_have_gradients_and_go_to_the_exact_ones(topology, name):
    rng, nodes = np.random.default_rng(3), topology.num_nodes
    share, batch = floats(cases.random_share(rng, 6, nodes)), cases.batch(cases.random_tokens(rng, 12, 6, 2))
    exchange = build_exchange(name, topology)
    slope = jax.grad(relaxed, argnums=2)(exchange, topology, share, batch, 0.3, 0.1)
    step = jnp.asarray(rng.normal(size=share.shape), jnp.float32) * 1e-3
    # To a gradient choices are given.
    made = exchange.choices(topology, sharded_visits(share, batch, SoftSupport(jnp.asarray(0.3))))
    given = Given(exchange.description, made)
    ends = [relaxed(given, topology, share + sign * step, batch, 0.3, 0.1) for sign in (1, -1)]
    assert float((slope * step).sum()) == pytest.approx(float(ends[0] - ends[1]) / 2, rel=0.05, abs=1e-4)
    exact = sharded_visits(share, batch, HardSupport())
    (flows,) = exchange(topology, exact)
    congestion = cases.TIME_MODELS["stored"](topology)
    loads = sum(congestion.of_flows(topology, each, jnp.ones(())).link_bytes for each in flows)
    assert float(relaxed(exchange, topology, share, batch, 1e-4, 1e-4)) == pytest.approx(float(loads.max()), rel=1e-3)


@pytest.mark.parametrize("name", ["least_congested_by_0", "least_congested_corner", "least_congested_unicast_visited"])
def test_names_that_are_none_are_refused(name):
    with pytest.raises(ExchangeError, match="least_congested"):
        exchange_of(name)
