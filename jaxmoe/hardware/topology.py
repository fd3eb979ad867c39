"""What every network is to those who use it: nodes, directed links with their numbers, and fixed paths."""

import abc

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def _number(value: Float[Array, ""] | float) -> Float[Array, ""]:
    """A number that can be swept and does not recompile."""
    return jnp.asarray(value, jnp.float32)


class AbstractTopology(eqx.Module):
    """Nodes joined by directed links. Sizes are static, every number is an array that can be swept.

    A node is an end point of messages; switches are vertices that come after the nodes. Every link has a
    reverse, the link that runs the other way. Messages take fixed paths.

    Bandwidths in B/s, latencies in s. `injection_bandwidth` and `ejection_bandwidth` are `None` where a node
    can use all its links at once. `endpoint_latency` is what a message takes besides its hops to get into the
    network and out of it. `efficiency` is the part of their bandwidth that links and ports yield to many flows
    that contend for routers; 1 is an ideal router, and a router calibrated cycle by cycle has less.
    """

    link_bandwidth: Float[Array, " link"]
    link_latency: Float[Array, " link"]
    injection_bandwidth: Float[Array, " node"] | None = None
    ejection_bandwidth: Float[Array, " node"] | None = None
    endpoint_latency: Float[Array, ""] = eqx.field(default=0.0, converter=_number, kw_only=True)
    efficiency: Float[Array, ""] = eqx.field(default=1.0, converter=_number, kw_only=True)

    @property
    @abc.abstractmethod
    def num_nodes(self) -> int:
        """End points of messages."""

    @property
    def num_links(self) -> int:
        return self.link_bandwidth.shape[-1]

    @property
    @abc.abstractmethod
    def link_ends(self) -> Int[np.ndarray, "link 2"]:
        """Vertex at which every link starts and vertex at which it ends."""

    @property
    @abc.abstractmethod
    def reverse_links(self) -> Int[np.ndarray | Array, " link"]:
        """Index of the link that runs the other way; its own inverse."""

    @abc.abstractmethod
    def hop_counts(self) -> Int[np.ndarray | Array, "node node2"]:
        """Links on the path from every node to every node."""

    @abc.abstractmethod
    def paths(self) -> list[list[tuple[int, ...]]]:
        """Links of every path in order, as `paths()[source][destination]`."""

    @abc.abstractmethod
    def positions(self) -> Float[np.ndarray, "vertex 2"]:
        """Where to draw every vertex: to the right, and down."""

    def reversed(self) -> "AbstractTopology":
        """The network as seen by packets that retrace paths backwards: every link and port is its opposite."""
        back = self.reverse_links
        numbers = (
            self.link_bandwidth[back],
            self.link_latency[back],
            self.ejection_bandwidth,
            self.injection_bandwidth,
        )
        return eqx.tree_at(
            lambda t: (t.link_bandwidth, t.link_latency, t.injection_bandwidth, t.ejection_bandwidth),
            self,
            numbers,
            is_leaf=lambda leaf: leaf is None,
        )
