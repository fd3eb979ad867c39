"""The network as the simulator sees it: servers with rates and latencies, and the servers of every path."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.hardware import AbstractTopology, Router

# Lists of numbers of different lengths, one after the other: paths, and what tasks wait for.


@dataclass(frozen=True)
class Rows:
    """Row `i` is `items[start[i] : start[i + 1]]`."""

    start: Int[np.ndarray, " starts"]  # one more than rows
    items: Int[np.ndarray, " item"]

    def __len__(self) -> int:
        return len(self.start) - 1

    def __getitem__(self, row: int) -> tuple[int, ...]:
        return tuple(self.items[self.start[row] : self.start[row + 1]].tolist())

    @property
    def lengths(self) -> Int[np.ndarray, " row"]:
        return np.diff(self.start)

    @property
    def owner(self) -> Int[np.ndarray, " item"]:
        """The row of every item."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def take(self, rows: Int[np.ndarray, " taken"]) -> "Rows":
        """These rows, in this order."""
        lengths = self.lengths[rows]
        start = _starts(lengths)
        return Rows(start, self.items[np.repeat(self.start[rows] - start[:-1], lengths) + np.arange(start[-1])])


def rows_of(lists: Sequence[Sequence[int]]) -> Rows:
    """The rows of plain lists."""
    start = _starts(np.array([len(row) for row in lists], np.int64))
    return Rows(start, np.fromiter(chain.from_iterable(lists), np.int64, count=int(start[-1])))


def one_each(items: Int[np.ndarray, " row"]) -> Rows:
    """Rows of one item."""
    return Rows(np.arange(len(items) + 1), items)


def joined_rows(first: Rows, second: Rows) -> Rows:
    """Each row of the first, and behind it that of the second."""
    owner, items = (np.concatenate([getattr(rows, name) for rows in (first, second)]) for name in ("owner", "items"))
    return rows_by(owner, items, len(first))


def rows_by(owner: Int[np.ndarray, " item"], items: Int[np.ndarray, " item"], count: int) -> Rows:
    """`count` rows from their items in any order, each with the row it is in; a row keeps the order of its items."""
    return Rows(_starts(np.bincount(owner, minlength=count)), items[np.argsort(owner, kind="stable")])


def joined(parts: Iterable[Rows]) -> Rows:
    """The rows of all parts, one part after the other."""
    known = list(parts)
    start = _starts(np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in known)]))
    return Rows(start, np.concatenate([np.zeros(0, np.int64), *(part.items for part in known)]))


def _starts(lengths: Int[np.ndarray, " row"]) -> Int[np.ndarray, "row+1"]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


# Paths between all nodes of a network as flat lists, which a layer of many messages is laid on at once.


@dataclass(frozen=True)
class FabricPaths:
    """Servers, links and maybe ports, that a message passes in turn from every node to every other.

    The path from a node to itself is empty.
    """

    num_nodes: int
    rows: Rows  # that of source * num_nodes + destination

    def __getitem__(self, pair: tuple[int, int]) -> tuple[int, ...]:
        """The path from one node to another."""
        return self.rows[pair[0] * self.num_nodes + pair[1]]

    def between(self, source: Int[np.ndarray, " message"], destination: Int[np.ndarray, " message"]) -> Rows:
        """The paths of messages."""
        return self.rows.take(source * self.num_nodes + destination)

    @property
    def hops(self) -> Int[np.ndarray, "node node2"]:
        """Length of every path."""
        return self.rows.lengths.reshape(self.num_nodes, self.num_nodes)

    def mirrored(self, opposite: Int[np.ndarray, " link"]) -> "FabricPaths":
        """Paths from d to s that retrace the path from s to d over the `opposite` of every link."""
        source, destination = np.divmod(self.rows.owner[::-1], self.num_nodes)
        back = rows_by(destination * self.num_nodes + source, opposite[self.rows.items[::-1]], len(self.rows))
        return FabricPaths(self.num_nodes, back)

    def with_ports(self, injection: int | None, ejection: int | None) -> "FabricPaths":
        """Paths that pass the injection port of their source first and the ejection port of their destination last.

        `injection` and `ejection` are the numbers of the first port of each kind; `None`: there are no such ports.
        """
        nodes = self.num_nodes
        source, destination = np.divmod(np.arange(nodes**2), nodes)
        away = np.flatnonzero(source != destination)
        owner, items = [self.rows.owner], [self.rows.items]
        if injection is not None:
            owner, items = [away, *owner], [injection + source[away], *items]
        if ejection is not None:
            owner, items = [*owner, away], [*items, ejection + destination[away]]
        return FabricPaths(nodes, rows_by(np.concatenate(owner), np.concatenate(items), nodes**2))


def paths_of(topology: AbstractTopology) -> FabricPaths:
    """Links of the path between every two nodes of a topology."""
    hops, nodes = topology.hops(), topology.num_nodes
    start = _starts(np.bincount(np.asarray(hops.pair), minlength=nodes**2))
    return FabricPaths(nodes, Rows(start, np.asarray(hops.link, np.int64)))


@dataclass(frozen=True)
class Fabric:
    """Servers are the links, then the injection ports, then the ejection ports, where there are any.

    A message is cut in chunks of `chunk_bytes` (`None`: sent whole), which every server either receives whole
    before it sends them on or, with `cut_through`, passes on as they come. SI units.
    """

    num_nodes: int
    num_links: int
    rate: Float[np.ndarray, " server"]  # B/s
    latency: Float[np.ndarray, " server"]  # s
    routes: FabricPaths  # links alone
    crossed: FabricPaths | None  # links of the paths along the other direction first; None: there are none
    opposite: Int[np.ndarray, " link"]  # the link that runs the other way
    ends: Int[np.ndarray, "link 2"]  # vertex where every link starts and where it ends
    port_order: Int[np.ndarray, " link"]  # links in the order that numbers the ports of routers
    injection: int | None  # number of the first port
    ejection: int | None
    mesh_shape: tuple[int, int] | None
    chunk_bytes: float | None
    cut_through: bool
    burst: Float[np.ndarray, " server"] | None = None  # B that a server passes at once after it was idle; None: 0
    router: Router | None = None  # None: buffers are unbounded; else a node has a port of each kind
    rings: Int[np.ndarray, " link"] | None = None  # see `AbstractTopology`

    @cached_property
    def paths(self) -> FabricPaths:
        """Links and ports that a message passes from every node to every other."""
        return self.routes.with_ports(self.injection, self.ejection)

    @cached_property
    def mirrored(self) -> FabricPaths:
        """Links and ports of a message that runs backwards, from the destination of a path to its source.

        It takes the opposite of every link, in reverse order, and then the ports of its own two ends.
        """
        return self.routes.mirrored(self.opposite).with_ports(self.injection, self.ejection)

    @property
    def hops(self) -> Int[np.ndarray, "node node2"]:
        """Links of every path."""
        return self.routes.hops


def fabric_of(topology: AbstractTopology, chunk_bytes: float | None, cut_through: bool = False) -> Fabric:
    """Describe a network to the simulator. A caller with many layers keeps the fabric, which holds all paths.

    Its efficiency slows every link and port. A message has its end points' latency at its ejection port. With routers
    of finite buffers a node has both ports: where they have no limit, as fast as the fastest link.
    """
    nodes, links = topology.num_nodes, topology.num_links
    rate, latency = [np.asarray(topology.link_bandwidth, float)], [np.asarray(topology.link_latency, float)]
    injection = ejection = None
    router, unlimited = topology.router, np.full(nodes, np.inf)
    if router is not None:
        unlimited = np.full(nodes, rate[0].max(initial=0) * float(router.ports_per_node))
    if topology.injection_bandwidth is not None or router is not None:
        injection = links
        limit = topology.injection_bandwidth
        rate.append(unlimited if limit is None else np.asarray(limit, float))
        latency.append(np.zeros(nodes))
    endpoint = float(topology.endpoint_latency)
    if topology.ejection_bandwidth is not None or endpoint > 0 or router is not None:
        ejection = sum(map(len, rate))
        limit = topology.ejection_bandwidth
        rate.append(unlimited if limit is None else np.asarray(limit, float))
        latency.append(np.full(nodes, endpoint))
    crossed = topology.crossed()
    return Fabric(
        num_nodes=nodes,
        num_links=links,
        rate=topology.usable(np.concatenate(rate)),
        latency=np.concatenate(latency),
        routes=paths_of(topology),
        crossed=None if crossed is None else paths_of(crossed),
        opposite=np.asarray(topology.reverse_links),
        injection=injection,
        ejection=ejection,
        mesh_shape=topology.grid,
        chunk_bytes=chunk_bytes,
        cut_through=cut_through,
        burst=_bursts(topology, sum(map(len, rate))),
        ends=np.asarray(topology.link_ends),
        port_order=topology.port_order,
        router=router,
        rings=None if topology.rings is None else np.asarray(topology.rings),
    )


def link_rates(topology: AbstractTopology) -> Float[np.ndarray, " link"]:
    """Usable rate of every link, B/s."""
    return topology.usable(np.asarray(topology.link_bandwidth, float))


def _bursts(topology: AbstractTopology, servers: int) -> Float[np.ndarray, " server"] | None:
    """Burst of every server, B: that of the topology for links, 0 for ports; `None` where links have no burst."""
    if topology.link_burst is None:
        return None
    return np.pad(np.asarray(topology.link_burst, float), (0, servers - topology.num_links))
