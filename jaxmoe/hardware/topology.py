"""Networks: nodes, directed links and fixed paths, with what follows from them, and the bisection."""

import abc
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxmoe.hardware.paths import Hops, Structure, TopologyError, check_grid, path_lengths, structure_of

Number = int | float | Float[Array, ""]  # an array where JAX traces it
Kind = TypeVar("Kind", bound="AbstractTopology")
Bandwidths = TypeVar("Bandwidths", Array, np.ndarray)


def _number(value: Number) -> Float[Array, ""]:
    """A number that can be swept and does not recompile."""
    return jnp.asarray(value, jnp.float32)


def filled(count: int, value: Number) -> Float[Array, " each"]:
    """So many equal numbers. Where JAX does not trace the value, nothing is compiled for a new count.

    To `jnp.asarray` a type is told that the array has: JAX 0.10 compiles a copy of any other.
    """
    if isinstance(value, jax.Array):
        return jnp.full(count, value, jnp.float32)
    return jnp.asarray(np.full(count, value, np.float32), jnp.float32)


class Router(eqx.Module):
    """Routers with finite buffers and credits; numbers are named as BookSim2 names them, and can be swept.

    Every channel (a link, or a port of a node) ends in `num_vcs` virtual channels of `vc_buf_size` flits of
    `flit_bytes` B. The crossbar takes `internal_speedup` steps in the time that the fastest link takes for a flit, a
    *cycle*. A credit can be used `credit_delay` cycles after it came back. Allocators take `alloc_iters` iterations. A
    node has `ports_per_node` ports of each kind. `priority` says who goes first: `none`, in turn (round-robin), or
    `network_age`, the packet that was injected first. With `wormhole` switching a packet may lie in several routers,
    else a virtual channel has to have room for all of it. With `dateline` half of the virtual channels of a torus are
    for packets that have crossed the end of its rings, so that they cannot wait for each other in a circle.
    """

    num_vcs: Float[Array, ""] = eqx.field(converter=_number)
    vc_buf_size: Float[Array, ""] = eqx.field(converter=_number)
    flit_bytes: Float[Array, ""] = eqx.field(converter=_number)
    internal_speedup: Float[Array, ""] = eqx.field(default=1.0, converter=_number)
    credit_delay: Float[Array, ""] = eqx.field(default=1.0, converter=_number)
    alloc_iters: Float[Array, ""] = eqx.field(default=1.0, converter=_number)
    ports_per_node: Float[Array, ""] = eqx.field(default=1.0, converter=_number)
    priority: Literal["none", "network_age"] = eqx.field(default="none", static=True)
    wormhole: bool = eqx.field(default=True, static=True)
    dateline: bool = eqx.field(default=False, static=True)


class AbstractTopology(eqx.Module):
    """Nodes joined by directed links. Sizes are static, every number is an array that can be swept.

    A node is an end point of messages; switches are vertices that come after the nodes. Every link has a
    reverse, the link that runs the other way. Messages take fixed paths.

    A new network is a subclass that writes `link_ends` and `paths()`, which depend on its static fields alone; all
    else is derived, once for all networks of equal static fields. It states `num_nodes` where its paths need it, and
    `grid` and `rings` where it has them. For speed it may override `reverse_links`, `hops()`, `hop_counts()` and
    `positions()`, and register its own rules for loads with the functions of `jaxmoe.network.loads`. Raises
    `TopologyError`, on first use, where links and paths make no network.

    Bandwidths in B/s, latencies in s. `injection_bandwidth` and `ejection_bandwidth` are `None` where a node
    can use all its links at once. `endpoint_latency` is what a message takes besides its hops to get into the
    network and out of it. `efficiency` is the part of their bandwidth that links and ports yield to many flows
    that contend for routers; 1 is an ideal router, and a router calibrated cycle by cycle has less.
    `link_burst` in B is how much a link that was idle passes at once before its bandwidth limits it (a token bucket);
    the event simulator alone knows it. Without a `router` buffers are unbounded. Where links lie on rings, as in a
    torus, `rings` numbers the dimension of every link, and below 0, as -1 - dimension, that of the link that closes its
    ring, the *dateline*.
    """

    link_bandwidth: Float[Array, " link"]
    link_latency: Float[Array, " link"]
    injection_bandwidth: Float[Array, " node"] | None = None
    ejection_bandwidth: Float[Array, " node"] | None = None
    endpoint_latency: Float[Array, ""] = eqx.field(default=0.0, converter=_number, kw_only=True)
    efficiency: Float[Array, ""] = eqx.field(default=1.0, converter=_number, kw_only=True)
    link_burst: Float[Array, " link"] | None = eqx.field(default=None, kw_only=True)
    router: Router | None = eqx.field(default=None, kw_only=True)
    rings: Int[Array, " link"] | None = eqx.field(default=None, kw_only=True)

    @classmethod
    def uniform(cls: type[Kind], bandwidth: Number, latency: Number, **fields) -> Kind:
        """A network whose links are all alike, B/s and s; `fields` are the others of the class."""
        links = len(cls(filled(0, bandwidth), filled(0, latency), **fields).link_ends)
        return cls(filled(links, bandwidth), filled(links, latency), **fields)

    @property
    def num_nodes(self) -> int:
        """End points of messages: rows of `paths()`."""
        return _derived(self).num_nodes

    @property
    def num_links(self) -> int:
        return self.link_bandwidth.shape[-1]

    @property
    def link_rate(self) -> Float[Array, " link"]:
        """Usable rate of every link under many flows, B/s."""
        return self.usable(self.link_bandwidth)

    @property
    def injection_rate(self) -> Float[Array, " node"] | None:
        """Usable rate at which nodes send, B/s; `None` without a limit."""
        return None if self.injection_bandwidth is None else self.usable(self.injection_bandwidth)

    @property
    def ejection_rate(self) -> Float[Array, " node"] | None:
        """Usable rate at which nodes receive, B/s; `None` without a limit."""
        return None if self.ejection_bandwidth is None else self.usable(self.ejection_bandwidth)

    def usable(self, bandwidth: Bandwidths) -> Bandwidths:
        """Rate that links or ports of a bandwidth yield to many flows, B/s; of NumPy where the bandwidth is."""
        return bandwidth * (float(self.efficiency) if isinstance(bandwidth, np.ndarray) else self.efficiency)

    @property
    @abc.abstractmethod
    def link_ends(self) -> Int[np.ndarray, "link 2"]:
        """Vertex at which every link starts and vertex at which it ends."""

    @abc.abstractmethod
    def paths(self) -> list[list[tuple[int, ...]]]:
        """Links of every path in order, as `paths()[source][destination]`; none from a node to itself."""

    @property
    def reverse_links(self) -> Int[np.ndarray | Array, " link"]:
        """Index of the link that runs the other way; its own inverse."""
        return _derived(self).reverse_links

    def hops(self) -> Hops:
        """All paths as flat arrays."""
        return _derived(self).hops

    def hop_counts(self) -> Int[np.ndarray | Array, "node node2"]:
        """Links on the path from every node to every node."""
        return path_lengths(self.hops(), self.num_nodes)

    def positions(self) -> Float[np.ndarray, "vertex 2"]:
        """Where to draw every vertex: to the right, and down."""
        return _derived(self).positions

    @property
    def grid(self) -> tuple[int, int] | None:
        """Sides of the mesh that nodes, row by row, and links between neighbours form; `None` if they form none."""
        return None

    @property
    def corners(self) -> Int[np.ndarray, " corner"]:
        """Nodes at the corners of the grid; every node of a network without one."""
        if self.grid is None:
            return np.arange(self.num_nodes)
        x, y = self.grid
        return np.unique([0, y - 1, (x - 1) * y, x * y - 1])

    def crossed(self) -> "AbstractTopology | None":
        """The network whose packets take directions in the other order; `None` where paths have but one."""
        return None

    @property
    def port_order(self) -> Int[np.ndarray, " link"]:
        """Links in the order that numbers the ports of routers, which decides who goes first among equals."""
        return np.arange(self.num_links)

    def reversed(self) -> "AbstractTopology":
        """The network as seen by packets that retrace paths backwards: every link and port is its opposite."""
        back = self.reverse_links
        numbers = (
            self.link_bandwidth[back],
            self.link_latency[back],
            self.ejection_bandwidth,
            self.injection_bandwidth,
            None if self.link_burst is None else self.link_burst[back],
        )
        return eqx.tree_at(
            lambda t: (t.link_bandwidth, t.link_latency, t.injection_bandwidth, t.ejection_bandwidth, t.link_burst),
            self,
            numbers,
            is_leaf=lambda leaf: leaf is None,
        )


class _Unknown:
    """Stands for a number of a network whose links and paths are derived, which they must not depend on."""

    def _refuse(self, *_):
        raise TopologyError("links or paths depend on a number of their network; let them depend on static fields")

    __getattr__ = __getitem__ = __float__ = __array__ = _refuse


def _derived(topology: AbstractTopology) -> Structure:
    """Structure of a network by its paths, worked out once for equal static fields."""
    structure = _structure(jax.tree.structure(topology))
    name, links = type(topology).__name__, len(structure.reverse_links)
    for what, given in (("bandwidths", topology.link_bandwidth), ("latencies", topology.link_latency)):
        if given.shape[-1] != links:
            raise TopologyError(f"{name} has {links} links, but {given.shape[-1]} {what}; give one for each link")
    return structure


@lru_cache(maxsize=16)
def _structure(form: jax.tree_util.PyTreeDef) -> Structure:
    """Structure of a class with static fields."""
    topology = jax.tree.unflatten(form, [_Unknown()] * form.num_leaves)
    try:
        ends, paths = topology.link_ends, topology.paths()
    except RecursionError:
        raise TopologyError(
            f"links or paths of {type(topology).__name__} ask for what is derived from them; state its num_nodes"
        ) from None
    structure = structure_of(ends, paths)
    if type(topology).num_nodes is not AbstractTopology.num_nodes and topology.num_nodes != structure.num_nodes:
        raise TopologyError(f"num_nodes is {topology.num_nodes}, but paths() has {structure.num_nodes} rows")
    if topology.grid is not None:
        check_grid(topology.grid, ends, structure.num_nodes)
    return structure


# How much a network can move between its halves.


def bisection_bandwidth(topology: AbstractTopology) -> float:
    """The least bandwidth from one half of the nodes to the other, in B/s, one direction; 0 for a lone node.

    Links count in full; ports and efficiency do not. Halves of an odd number of nodes differ by one node, and
    switches stand on whichever side makes the cut least. To find the least of all halvings is NP-hard. Tried are
    those of nodes in the order of their numbers, of where they are drawn, and of hops from the remotest node.
    That is exact for the networks of `jaxmoe.hardware` whose links are alike (of clusters: on each level), and
    for a grid of wafers with slower borders and two even sides. Elsewhere it is an upper bound.
    """
    if topology.num_nodes == 1:
        return 0.0
    ends, bandwidth = topology.link_ends, np.asarray(topology.link_bandwidth, float)
    vertices = len(topology.positions())
    return min(_least_cut(_joined(half, vertices)[ends], bandwidth) for half in _halves(topology))


def _halves(topology: AbstractTopology) -> Iterator[Bool[np.ndarray, " node"]]:
    """Natural halves of the nodes, and what they leave."""
    nodes = topology.num_nodes
    right, down = topology.positions()[:nodes].T
    hops = np.asarray(topology.hop_counts())
    remotest = hops.sum(axis=1).argmax()
    for key in (np.arange(nodes), right, down, hops[remotest]):
        half = np.zeros(nodes, bool)
        half[np.argsort(key, kind="stable")[: nodes // 2]] = True
        yield half
        yield ~half


def _joined(half: Bool[np.ndarray, " node"], vertices: int) -> np.ndarray:
    """New number of every vertex when all of the half become vertex 0 and all other nodes 1, int [vertex]."""
    switches = vertices - len(half)
    return np.concatenate([np.where(half, 0, 1), 2 + np.arange(switches)])


def _least_cut(ends: np.ndarray, bandwidth: Float[np.ndarray, " link"]) -> float:
    """Bandwidth over the least cut from vertex 0 to vertex 1."""
    size = int(ends.max()) + 1
    capacity = np.zeros((size, size))
    np.add.at(capacity, (ends[:, 0], ends[:, 1]), bandwidth)
    np.fill_diagonal(capacity, 0)
    # Flows are of 32-bit integers. The least cut is no more than what leaves vertex 0, so neither need a capacity
    # be; a quarter of the range for it leaves room for what flows back. The flow only says which links to cut.
    enough = capacity[0].sum()
    units = csr_array((np.minimum(capacity / enough, 1) * 2**29).astype(np.int32))
    left = units - maximum_flow(units, 0, 1).flow
    near = np.zeros(size, bool)
    near[breadth_first_order(left > 0, 0, return_predecessors=False)] = True
    return float(capacity[near][:, ~near].sum())
