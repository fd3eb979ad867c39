"""Priced exchanges: chances by hand, the simulator's own draws, what relaxed loads tend to, and their gradients."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats
from oracles.topologies import NETWORKS, mesh

from jaxmoe.des import fabric_of
from jaxmoe.des.priced import drawn_ways
from jaxmoe.hardware import Mesh, clusters, torus, wafers
from jaxmoe.network import Visits, build_exchange, sharded_visits
from jaxmoe.network.priced import drawn
from jaxmoe.placement.exchange import PRICED, ExchangeError, PricedLinks
from jaxmoe.relax import HardSupport, SmoothMax, SoftSupport
from jaxmoe.testing import check_exchange

# Links of a 2x2 mesh: 0>2, 1>3, 2>0, 3>1, 0>1, 2>3, 1>0, 3>2. From 3 to 0 the machine's own way is 3>1>0.
OWN, ACROSS = (3, 6), (7, 2)
SLOW_BORDER = wafers((2, 2), (1, 2), 1.0, 0.0, 0.5, 0.0)
DEAR = tuple(np.log(3.0) * (np.arange(8) == OWN[0]))  # of a softness of 1: a third as likely as what costs nothing


def visits_of(visited, source=None, draw=None) -> Visits:
    """Tokens that visit these nodes."""
    visited = floats(visited)
    tokens, nodes = visited.shape
    source = jnp.zeros(tokens, jnp.int32) if source is None else jnp.asarray(source)
    draw = jnp.zeros(tokens) if draw is None else floats(draw)
    empty = jnp.zeros((1, nodes))
    return Visits(visited, None, source, empty[0], empty, empty, empty[0], jnp.ones(tokens), draw, source)


def link_loads(exchange, topology, visits):
    (flows,) = exchange(topology, visits)
    congestion = cases.TIME_MODELS["stored"](topology)
    return sum(congestion.of_flows(topology, each, jnp.ones(())).link_bytes for each in flows)


def test_ways_are_as_likely_as_their_prices_say():
    exchange = build_exchange(PricedLinks("token_home", DEAR, softness=1.0), mesh((2, 2)))
    visits = visits_of([[0, 0, 0, 1]] * 3, draw=[0.2, 0.3, 0.74])
    chance = exchange.chances(mesh((2, 2)), visits)
    np.testing.assert_allclose(chance[:, :, 0], [[0.25, 0.75]] * 3, rtol=1e-6)
    assert float(abs(chance[:, :, 1:]).max()) == 0
    # The second half's number is half of all chances further on: 0.7, 0.8 and 0.24.
    home, route = drawn(chance, visits.draw)
    assert home.tolist() == [[0, 0, 0]] * 2
    assert route.tolist() == [[0, 1, 1], [1, 1, 0]]
    expected = np.zeros(8)
    expected[[*OWN]], expected[[*ACROSS]] = 1.0, 2.0
    np.testing.assert_allclose(link_loads(exchange, mesh((2, 2)), visits), expected, rtol=1e-6)
    expected[[*OWN]], expected[[*ACROSS]] = 0.75, 2.25
    relaxed = link_loads(exchange, mesh((2, 2)), replace(visits, relaxed=True))
    np.testing.assert_allclose(relaxed, expected, rtol=1e-6)


def test_by_name_alone_short_trees_are_the_likely_ones():
    topology = mesh((3, 3))
    visits = visits_of([[1, 0, 1, 0, 0, 0, 0, 0, 0], np.eye(9)[4]])
    chance = build_exchange("priced", topology).chances(topology, visits).sum(axis=1)
    # Anywhere between 0 and 2 takes two links, further rows one link more for each.
    np.testing.assert_allclose(chance[0, :3], chance[0, 0], rtol=1e-6)
    assert float(chance[0, 4] / chance[0, 1]) == pytest.approx(np.exp(-1 / 0.5) * 0.5 + np.exp(-2 / 0.5) * 0.5)
    assert int(chance[1].argmax()) == 4


def test_results_meet_only_where_they_may():
    topology, visited = mesh((3, 3)), np.zeros((50, 9))
    visited[:, [0, 8]] = 1
    source, draw = np.arange(50) % 9, np.linspace(0, 1, 50, endpoint=False)
    for name, able in (("priced_visited", {0, 8}), ("priced", set(range(9)))):
        visits = visits_of(visited, source, draw)
        home, _ = drawn(build_exchange(name, topology).chances(topology, visits), visits.draw)
        assert set(np.ravel(home)) == able, name
    home, _ = drawn(build_exchange("priced_token_home", topology).chances(topology, visits), visits.draw)
    assert (np.asarray(home) == source).all()


def table(topology, seed=0) -> tuple[float, ...]:
    return tuple(np.random.default_rng(seed).uniform(0, 3, topology.num_links).astype(np.float32).tolist())


@pytest.mark.parametrize("name", PRICED)
@pytest.mark.parametrize("network", ["mesh", "yx_mesh", "torus", "clusters", "dragonfly", "detours", "wafers"])
def test_the_simulator_draws_alike(network, name):
    topology = SLOW_BORDER if network == "wafers" else NETWORKS[network]
    rng = np.random.default_rng(len(name))
    visited = rng.random((60, topology.num_nodes)) < 0.4
    source, draw = rng.integers(topology.num_nodes, size=60), rng.random(60, np.float32)
    priced = PricedLinks(build_exchange(name, topology).meeting, table(topology), 0.7)
    exchange, visits = build_exchange(priced, topology), visits_of(visited, source, draw)
    assert exchange.described == replace(priced, softness=float(np.float32(0.7)))
    found = eqx.filter_jit(lambda visits: drawn(exchange.chances(topology, visits), visits.draw))(visits)
    expected = drawn_ways(priced, fabric_of(topology, None), visited, source, draw)
    somewhere = visited.any(axis=1)
    for seen, known in zip(found, expected, strict=True):
        assert (np.asarray(seen) == known)[:, somewhere].all()


FAST = {
    "priced": Mesh.uniform(50e9, 1e-7, shape=(2, 4)),
    "priced_visited": torus((2, 4), 50e9, 1e-7),
    "priced_token_home": clusters(2, 4, 50e9, 1e-7, 25e9, 2e-7),
}


@pytest.mark.parametrize("name", FAST)
def test_a_layer_keeps_the_promises_of_exchanges_and_its_replay_is_near(name):
    check_exchange(name, FAST[name])


def relaxed(exchange, topology, share, batch, width, temperature):
    visits = sharded_visits(share, batch, SoftSupport(jnp.asarray(width)))
    return SmoothMax(jnp.asarray(temperature))(link_loads(exchange, topology, visits))


@pytest.mark.parametrize("name", PRICED)
@pytest.mark.parametrize("topology", [mesh((2, 3)), SLOW_BORDER], ids=["mesh", "wafers"])
def test_prices_softness_and_shares_have_gradients(topology, name):
    rng, nodes = np.random.default_rng(3), topology.num_nodes
    share, batch = floats(cases.random_share(rng, 6, nodes)), cases.batch(cases.random_tokens(rng, 12, 6, 2))
    meeting = build_exchange(name, topology).meeting
    exchange = build_exchange(PricedLinks(meeting, table(topology), 0.8), topology)
    value = eqx.filter_jit(lambda given: relaxed(given[0], topology, given[1], batch, 0.3, 0.1))
    slope = eqx.filter_grad(value)((exchange, share))
    for at in (lambda given: given[0].price, lambda given: given[0].softness, lambda given: given[1]):
        step = jnp.asarray(rng.normal(size=at(slope).shape), jnp.float32) * 3e-3
        ends = [value(eqx.tree_at(at, (exchange, share), at((exchange, share)) + sign * step)) for sign in (1, -1)]
        told = float((at(slope) * step).sum())
        assert told == pytest.approx(float(ends[0] - ends[1]) / 2, rel=0.05, abs=2e-5)
        assert told != 0


def test_relaxed_loads_tend_to_the_mean_of_exact_ones_over_draws():
    topology, rng = mesh((2, 3)), np.random.default_rng(3)
    share, batch = floats(cases.random_share(rng, 6, 6)), cases.batch(cases.random_tokens(rng, 12, 6, 2))
    exchange = build_exchange(PricedLinks("any", table(topology), 0.8), topology)
    exact = sharded_visits(share, batch, HardSupport())
    draws = jax.random.uniform(jax.random.key(0), (4000, 12))
    seen = jax.lax.map(lambda draw: link_loads(exchange, topology, replace(exact, draw=draw)), draws, batch_size=100)
    soft = sharded_visits(share, batch, SoftSupport(jnp.asarray(1e-4)))
    assert soft.relaxed
    assert not exact.relaxed
    mean = link_loads(exchange, topology, soft)
    np.testing.assert_allclose(mean, seen.mean(axis=0), atol=0.15)
    assert float(mean.max()) < float(seen.max(axis=1).mean()) + 0.1
    one_draw = link_loads(exchange, topology, exact)
    assert float(abs(mean - one_draw).max()) > 0.5  # it does not tend to those of the draws at hand


STEPS, TOKENS = 6, 256


def test_prices_of_the_last_step_do_not_make_tokens_herd():
    """A link that was busy in the last step is dear in this one.

    Tokens that all take the cheapest way crowd the links that were idle, step after step. Tokens that draw softly share
    them out: their busiest links carry about what they carry without prices.
    """
    topology, rng = mesh((4, 4)), np.random.default_rng(0)
    batches = [visits_of(rng.random((TOKENS, 16)) < 0.15, None, rng.random(TOKENS)) for _ in range(STEPS)]

    @jax.jit
    def loads(prices, softness, visits):
        exchange = eqx.tree_at(
            lambda each: (each.price, each.softness), build_exchange("priced", topology), (prices, softness)
        )
        return link_loads(exchange, topology, visits)

    def busiest(softness):
        """Load of the busiest link, mean over steps, each of which has the prices that the one before leaves."""
        prices, most = jnp.ones(topology.num_links), []
        for visits in batches:
            load = loads(prices, jnp.asarray(softness), visits)
            prices = load / load.mean()
            most.append(float(load.max()))
        return np.mean(most[1:])

    without = np.mean([float(loads(jnp.ones(topology.num_links), jnp.asarray(0.5), each).max()) for each in batches])
    hard, soft = busiest(1e-3), busiest(4.0)
    assert hard > 1.5 * max(soft, without)
    assert soft < 1.25 * without


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"price": (1.0,) * 7}, "priced has prices of 7 links, but the machine has 8"),
        ({"price": (1.0,) * 7 + (-0.5,)}, "priced has a price of -0.5, expected"),
        ({"price": (1.0,) * 7 + (np.nan,)}, "priced has a price of nan, expected"),
        ({"softness": 0.0}, "priced has a softness of 0, expected"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(ExchangeError, match=message):
        build_exchange(PricedLinks(**table), mesh((2, 2)))


def test_free_links_are_no_trouble():
    topology = mesh((2, 2))
    exchange = build_exchange(PricedLinks("visited", (0.0,) * 8, 1e-3), topology)
    chance = exchange.chances(topology, visits_of([[1, 0, 0, 1], [0, 0, 0, 0]]))
    np.testing.assert_allclose(chance[0].sum(axis=0), [0.5, 0, 0, 0.5])
    assert bool(jnp.isfinite(chance).all())
