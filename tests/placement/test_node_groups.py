"""Groups of a machine, rings through them, and the strategies that ship with the exchanges they run under."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.hardware import Mesh, ring
from jaxmoe.hardware.networks import hop_counts, num_links
from jaxmoe.network import build_exchange
from jaxmoe.placement import Placement
from jaxmoe.placement.exchange import ExchangeError, Rings
from jaxmoe.placement.strategies import complete_hybrids, groups_of, ring_orders, shipped_replicas, shipped_strategies


def mesh(x: int, y: int) -> Mesh:
    links = num_links((x, y))
    return Mesh(jnp.ones(links), jnp.zeros(links), shape=(x, y))


RING_OF_SIX = ring(6, bandwidth=1.0, latency=0.0)


@pytest.mark.parametrize(
    ("cut", "topology", "groups"),
    [
        ((1, 2), mesh(2, 4), [0, 0, 1, 1, 0, 0, 1, 1]),
        ((2, 1), mesh(2, 4), [0, 0, 0, 0, 1, 1, 1, 1]),
        ((2, 2), mesh(2, 2), [0, 1, 2, 3]),
        ((2,), mesh(2, 3), [0, 0, 0, 1, 1, 1]),
        ((3,), RING_OF_SIX, [0, 0, 1, 1, 2, 2]),
        ((1,), RING_OF_SIX, [0] * 6),
    ],
)
def test_groups_by_hand(cut, topology, groups):
    np.testing.assert_array_equal(groups_of(Rings(cut), topology), groups)


@pytest.mark.parametrize(
    ("cut", "topology", "remedy"),
    [
        ((2, 3), RING_OF_SIX, "rings_2x3 cuts a mesh into rectangles, and the network is a .*use rings_6"),
        ((4,), RING_OF_SIX, "rings_4 needs equal groups of 6 nodes; use one of 1, 2, 3, 6"),
        ((3, 1), mesh(2, 4), "rings_3x1: "),
    ],
)
def test_groups_that_do_not_divide_the_machine_are_refused(cut, topology, remedy):
    with pytest.raises(ExchangeError, match=remedy):
        groups_of(Rings(cut), topology)
    with pytest.raises(ExchangeError, match=remedy):
        build_exchange(Rings(cut), topology)


@pytest.mark.parametrize(("shape", "cut"), [((2, 4), (1, 1)), ((4, 4), (2, 2)), ((3, 4), (1, 2)), ((4, 6), (2, 1))])
def test_neighbours_on_a_ring_are_neighbours_in_the_mesh(shape, cut):
    topology, hops = mesh(*shape), hop_counts(shape)
    orders = ring_orders(Rings(cut), topology)
    group = groups_of(Rings(cut), topology)
    assert sorted(orders.ravel().tolist()) == list(range(topology.num_nodes))
    for index, order in enumerate(orders):
        assert (group[order] == index).all()
        assert (hops[order, np.roll(order, -1)] == 1).all() or len(order) % 2  # an odd rectangle has no such cycle


def test_other_groups_ring_in_the_order_of_their_numbers():
    np.testing.assert_array_equal(ring_orders(Rings((2,)), RING_OF_SIX), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(ring_orders(Rings((2,)), mesh(2, 4)), [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_uneven_nodes_have_strategies_by_pace_beside_the_even_ones():
    frequency, pace = np.random.default_rng(0).dirichlet(np.ones(10), 3), np.linspace(1, 2, 6)
    even = shipped_strategies(frequency, RING_OF_SIX, ("least_loaded",), seed=0)
    every = shipped_strategies(frequency, RING_OF_SIX, ("least_loaded",), seed=0, pace=pace)
    added = every[len(even) :]
    assert [each.name for each in every[: len(even)]] == [each.name for each in even]
    alike = [each.name for each in even if each.name not in ("ep", "ep_random")]
    assert [each.name for each in added] == [f"{name}_by_pace" for name in alike]
    assert [each.by_pace for each in every] == [False] * len(even) + [True] * len(added)
    for each in added:
        Placement(each.share, None, "sharded", (0, 1, 2))
    work = np.einsum("le,len->ln", frequency, added[0].share)
    np.testing.assert_allclose(work, np.broadcast_to(pace / pace.sum(), work.shape), rtol=1e-5)


def test_complete_hybrids_are_every_cut_into_at_most_as_many_groups_as_experts():
    cuts = {rings.groups for rings in complete_hybrids(mesh(4, 8), 8)}
    assert cuts == {(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2)}
    assert (4, 4) in {rings.groups for rings in complete_hybrids(mesh(4, 8), 64)}
    assert {rings.groups for rings in complete_hybrids(RING_OF_SIX, 64)} == {(2,), (3,)}
    assert {rings.groups for rings in complete_hybrids(RING_OF_SIX, 2)} == {(2,)}
    assert complete_hybrids(mesh(1, 2), 64) == []  # a group of one node is expert parallelism
    assert all(rings.both_ways and rings.between for rings in complete_hybrids(mesh(4, 8), 64))


@pytest.mark.parametrize("topology", [mesh(2, 4), RING_OF_SIX], ids=["mesh", "ring"])
def test_every_strategy_is_legal_and_its_exchanges_can_be_built(topology):
    frequency = np.random.default_rng(0).dirichlet(np.ones(10), 3)
    strategies = shipped_strategies(frequency, topology, ("least_loaded", "reduce_scatter"), seed=0)
    names = [strategy.name for strategy in strategies]
    assert names[:4] == ["tp", "ep_random", "ep_balanced", "ep"]
    assert len(names) == len(set(names)) == 4 + len(complete_hybrids(topology, 10))
    for strategy in strategies:
        Placement(strategy.share, None, "sharded", (0, 1, 2))  # rows that do not sum to 1 are refused
        assert strategy.exchanges
        for name in strategy.exchanges:
            build_exchange(name, topology)
    for strategy in strategies[4:]:
        name, *gathers = strategy.exchanges
        assert gathers == ["least_loaded", "reduce_scatter"]
        group = np.asarray(build_exchange(name, topology).group)
        # An expert lives on all nodes of one group, evenly.
        for held in strategy.share.reshape(-1, topology.num_nodes):
            (home,) = np.unique(group[held > 0])
            np.testing.assert_allclose(held, (group == home) / (group == home).sum(), rtol=1e-6)


def test_replicas_that_ship_fit_their_slots():
    frequency = np.random.default_rng(0).dirichlet(np.full(10, 0.5), 3)
    strategies = shipped_replicas(frequency, np.array([4.0, 3, 3, 2]), ("least_loaded",), seed=0)
    assert [strategy.name for strategy in strategies] == ["ep_random", "ep_balanced", "replicated_by_load"]
    held = (strategies[-1].share > 0).sum(axis=1)
    assert (held <= [4, 3, 3, 2]).all()
    assert (held.sum(axis=1) > 10).all()  # free slots get replicas
    unlimited = shipped_replicas(frequency, np.full(4, np.inf), ("least_loaded",), seed=0)[-1].share
    np.testing.assert_allclose(unlimited, 0.25)  # everyone has everything
