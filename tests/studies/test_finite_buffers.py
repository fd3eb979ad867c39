"""Trees that nodes carry out in the simulator: messages between neighbours, by hand, and with finite buffers."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles.arrays import floats
from oracles.topologies import mesh

from jaxmoe.des import fabric_of
from jaxmoe.des.exchanges import stage_transfers
from jaxmoe.hardware import Router
from jaxmoe.placement.exchange import exchange_of

ROOT = Path(__file__).resolve().parents[2]
RATE, LATENCY, CHUNK = 1e9, 1e-6, 1000.0  # a chunk takes a microsecond on a link


@pytest.fixture(scope="module")
def finite():
    """The module of the study of placement tuning."""
    folder = str(ROOT / "studies" / "placement_tuning")
    sys.path.insert(0, folder)
    try:
        import finite_buffers

        yield finite_buffers
    finally:
        sys.path.remove(folder)
        sys.modules.pop("finite_buffers", None)


def line(router: Router | None = None):
    """Three nodes in a row, whose ports are as fast as two links."""
    port = floats(np.full(3, 2 * RATE))
    ports = {"injection_bandwidth": port, "ejection_bandwidth": port, "endpoint_latency": floats(LATENCY)}
    return replace(mesh((1, 3), RATE, LATENCY), **ports, router=router)


def combined(fabric):
    """One token whose results from all three nodes meet at node 2, along a tree."""
    visited, home = np.ones((1, 3), bool), np.array([2])
    return stage_transfers(exchange_of("token_home_tree"), fabric, visited, home, CHUNK, False)


def test_a_tree_is_carried_out_by_messages_between_neighbours(finite):
    fabric = fabric_of(line(), CHUNK)
    (tree,) = combined(fabric)
    # Routers: into the tree at node 0 through a port, over two links, out of it through a port.
    assert finite.makespan(fabric, [tree]) == pytest.approx((0.5 + 2 * (1 + 1) + 0.5 + 1) * 1e-6)
    between = finite.between_neighbours(fabric, tree)
    links = [path for path in map(between.paths.__getitem__, range(len(between))) if path]
    ends = [(path[0] - fabric.injection, *fabric.ends[path[1]], path[2] - fabric.ejection) for path in links]
    assert sorted(ends) == [(0, 0, 1, 1), (1, 1, 2, 2)]
    # Nodes: twice through a port, over a link and through a port.
    assert finite.makespan(fabric, [between]) == pytest.approx(2 * (0.5 + 1 + 1 + 0.5 + 1) * 1e-6)


def test_messages_stay_as_they_are(finite):
    fabric = fabric_of(line(), CHUNK)
    (sent,) = stage_transfers(exchange_of("token_home"), fabric, np.ones((1, 3), bool), np.array([2]), CHUNK, False)
    again = finite.between_neighbours(fabric, sent)
    np.testing.assert_array_equal(again.paths.start, sent.paths.start)
    np.testing.assert_array_equal(again.paths.items, sent.paths.items)


def test_buffers_that_are_finite_take_longer_where_they_fill(finite):
    """Twelve tokens, one flit a chunk: with one buffer of a flit credits come back too late to keep links busy."""

    def seconds(router):
        fabric = fabric_of(line(router), CHUNK)
        visited, home = np.ones((12, 3), bool), np.full(12, 2)
        parts = stage_transfers(exchange_of("token_home_tree"), fabric, visited, home, CHUNK, False)
        return finite.makespan(fabric, [finite.between_neighbours(fabric, part) for part in parts])

    buffers = {size: Router(1, size, CHUNK / 4, ports_per_node=2) for size in (4, 64)}
    few, many = (seconds(router) for router in buffers.values())
    unbounded = seconds(None)
    assert few > 1.2 * many
    assert many == pytest.approx(unbounded, rel=0.2)
