"""How partial results come together: the messages between nodes, and in how many equal rounds.

Dispatch mirrors combine, so an exchange describes combine alone.
"""

import abc

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.hardware.mesh import blocks, ring_order
from jaxmoe.network.visits import Visits


class AbstractExchange(eqx.Module):
    """Turns visits into messages."""

    @abc.abstractmethod
    def messages(self, visits: Visits) -> Float[Array, "node node2"]:
        """Hidden vectors sent from node to node in one round of combine."""

    @property
    @abc.abstractmethod
    def rounds(self) -> int:
        """Rounds of combine, one after the other."""


class Gather(AbstractExchange):
    """Every visited node sends one hidden vector to the token's gather node (hd_moe IV-B2)."""

    def messages(self, visits: Visits) -> Float[Array, "node node2"]:
        return (visits.visited * visits.weight[:, None]).T @ visits.gather

    @property
    def rounds(self) -> int:
        return 1


class RingReduce(AbstractExchange):
    """Ring reduce-scatter inside each of several equal rectangles of the mesh, all at once (hd_moe Eq. 4).

    Each of the R nodes of a ring sends 1/R of the vectors of the tokens that visit the ring, R - 1 times
    over. Eq. 4 is the limit of many nodes: 4 B h / BW instead of (R-1)/R of it. With one ring over the whole
    mesh this is tensor parallelism. With several it is the hybrid of hd_moe V-A2, whose published times
    leave out what the rings would still have to send each other; so do we.
    """

    block: Int[Array, " node"]  # ring of a node
    successor: Int[Array, " node"]  # next node on the ring
    size: int = eqx.field(static=True)  # nodes of one ring

    def messages(self, visits: Visits) -> Float[Array, "node node2"]:
        nodes = self.block.shape[0]
        member = (self.block[:, None] == jnp.arange(nodes // self.size)).astype(visits.weight.dtype)
        visiting = jnp.max(visits.visited[:, :, None] * member, axis=1)  # [token, ring]
        vectors = (visits.weight @ visiting)[self.block] / self.size
        return jnp.zeros((nodes, nodes), vectors.dtype).at[jnp.arange(nodes), self.successor].set(vectors)

    @property
    def rounds(self) -> int:
        return self.size - 1


def block_rings(shape: tuple[int, int], count: int) -> RingReduce:
    """Rings over `count` equal rectangles of the mesh."""
    block = blocks(shape, count)
    successor = np.empty_like(block)
    for index in range(count):
        order = ring_order(shape, np.flatnonzero(block == index))
        successor[order] = np.roll(order, -1)
    return RingReduce(jnp.asarray(block), jnp.asarray(successor), block.size // count)
