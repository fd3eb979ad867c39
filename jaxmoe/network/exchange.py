"""How partial results come together: which flows combine sends. Dispatch mirrors combine."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmoe.hardware import AbstractTopology, Mesh
from jaxmoe.hardware.mesh import blocks, ring_order
from jaxmoe.network.traffic import Flows
from jaxmoe.network.visits import Visits


class AbstractExchange(eqx.Module):
    """Turns visits into flows of hidden vectors."""

    @abc.abstractmethod
    def __call__(self, topology: AbstractTopology, visits: Visits) -> Flows:
        """The flows of combine, in hidden vectors."""


class LowestHost(AbstractExchange):
    """Every visited node sends one vector to the token's home (hd_moe IV-B2; see `Visits` for the home)."""

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Flows:
        # Tokens with one home make one flow: far fewer flows than tokens.
        messages = (visits.named * visits.weight[:, None]).T @ visits.visited
        return Flows(messages, visits.home, jnp.ones((), messages.dtype))


class FewestHops(AbstractExchange):
    """Every visited node sends one vector to the visited node that is nearest, in hops in all, to the others.

    The lowest-numbered of equally near nodes. Gradients see the choice as given.
    """

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Flows:
        hops = jnp.asarray(topology.hop_counts(), visits.visited.dtype)
        beyond = hops.max() * visits.visited.shape[1]  # more hops than any gathering takes
        cost = visits.visited @ hops + (1 - visits.visited) * beyond
        nearest = jax.nn.one_hot(jnp.argmin(cost, axis=1), cost.shape[1], dtype=cost.dtype)
        return Flows(visits.visited * visits.weight[:, None], nearest, jnp.ones((), visits.weight.dtype))


class RingReduce(AbstractExchange):
    """Ring reduce-scatter inside each of several equal rectangles of the mesh, all at once (hd_moe Eq. 4).

    Each of the R nodes of a ring sends 1/R of the vectors of the tokens that visit the ring, R - 1 times
    over. Eq. 4 is the limit of many nodes: 4 B h / BW instead of (R-1)/R of it. With one ring over the whole
    mesh this is tensor parallelism. With several it is the hybrid of hd_moe V-A2, whose published times
    leave out what the rings would still have to send each other; so do we. With `both_ways` half of every part
    goes round the other way, over links that Eq. 4 leaves idle; a ring of two has but one way.
    """

    block: Int[Array, " node"]  # ring of a node
    successor: Int[Array, " node"]  # next node on the ring
    size: int = eqx.field(static=True)  # nodes of one ring
    both_ways: bool = eqx.field(static=True, default=False)

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Flows:
        nodes, dtype = self.block.shape[0], visits.weight.dtype
        member = jax.nn.one_hot(self.block, nodes // self.size, dtype=dtype)
        visiting = jnp.max(visits.visited[:, :, None] * member, axis=1)  # [token, ring]
        vectors = (visits.weight @ visiting)[self.block] / self.size
        following = jax.nn.one_hot(self.successor, nodes, dtype=dtype)
        sending = jnp.diag((vectors > 0).astype(dtype))  # a ring that no token visits sends nothing
        if not self.both_ways or self.size <= 2:
            return Flows(sending, following, vectors, rounds=self.size - 1)
        preceding = following.T
        return Flows(
            jnp.concatenate([sending, sending]),
            jnp.concatenate([following, preceding]),
            jnp.concatenate([vectors, vectors]) / 2,
            rounds=self.size - 1,
        )


def whole_ring(topology: AbstractTopology, both_ways: bool = False) -> RingReduce:
    """One ring over all nodes: neighbours on a mesh where it has such a cycle, else in order of their numbers."""
    if isinstance(topology, Mesh):
        return block_rings(topology.shape, 1, both_ways)
    nodes = np.arange(topology.num_nodes)
    return RingReduce(jnp.zeros_like(nodes), jnp.asarray(np.roll(nodes, -1)), topology.num_nodes, both_ways)


def block_rings(shape: tuple[int, int], count: int, both_ways: bool = False) -> RingReduce:
    """Rings over `count` equal rectangles of the mesh."""
    block = blocks(shape, count)
    successor = np.empty_like(block)
    for index in range(count):
        order = ring_order(shape, np.flatnonzero(block == index))
        successor[order] = np.roll(order, -1)
    return RingReduce(jnp.asarray(block), jnp.asarray(successor), block.size // count, both_ways)
