"""Which nodes a token visits, and where its results gather.

Sharded: a token visits every host of its experts. Replicated: it visits one host of each of its experts,
the one its recorded draw picks in proportion to the shares. Copies to one node are sent once.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.hardware.mesh import hop_counts
from jaxmoe.relax import AbstractSupport
from jaxmoe.traces.batches import Batch


class Visits(eqx.Module):
    """What a batch asks of the nodes.

    `work` counts token-expert products per node; `visited` and `gather` are in [0, 1], and the rows of
    `gather` sum to 1.
    """

    visited: Float[Array, "token node"]
    gather: Float[Array, "token node"]
    work: Float[Array, " node"]
    weight: Float[Array, " token"]


class AbstractGatherRule(eqx.Module):
    """Chooses the node where a token's results come together."""

    @abc.abstractmethod
    def __call__(
        self,
        shape: tuple[int, int],
        home: Float[Array, "token node"],
        visited: Float[Array, "token node"],
    ) -> Float[Array, "token node"]:
        """One-hot rows, or a distribution over nodes when relaxed.

        `home` is the lowest-numbered host of the expert that the token's draw names (sharded), or the host
        that serves it (replicated).
        """


class LowestHost(AbstractGatherRule):
    """The lowest-numbered host of one of the token's experts, drawn at random (hd_moe IV-B2)."""

    def __call__(self, shape, home, visited):
        return home


class FewestHops(AbstractGatherRule):
    """The visited node nearest, in hops in all, to the other visited ones; the lowest-numbered of equals."""

    def __call__(self, shape, home, visited):
        hops = jnp.asarray(hop_counts(shape), visited.dtype)
        # No detour is longer than visiting every node at the full width of the mesh.
        never = float(hop_counts(shape).max()) * visited.shape[-1]
        cost = visited @ hops + (1 - visited) * never
        return jax.nn.one_hot(jnp.argmin(cost, axis=-1), visited.shape[-1], dtype=visited.dtype)


def sharded_visits(
    share: Float[Array, "expert node"],
    batch: Batch,
    rule: AbstractGatherRule,
    shape: tuple[int, int],
    support: AbstractSupport,
) -> Visits:
    """Visits when every host of an expert holds a part of its weights."""
    choice = batch.choices(share.shape[0])
    amount = support.amount(share)
    visited = support.presence(choice @ amount)
    # First host in index order: presence up to and with a node, less presence before it.
    reached = support.presence(jnp.cumsum(amount, axis=1))
    first = jnp.diff(reached, axis=1, prepend=0) / reached[:, -1:]
    return Visits(
        visited=visited,
        gather=rule(shape, first[batch.gather_expert], visited),
        work=(batch.weight @ choice) @ share,
        weight=batch.weight,
    )


def replicated_visits(
    share: Float[Array, "expert node"],
    batch: Batch,
    rule: AbstractGatherRule,
    shape: tuple[int, int],
    support: AbstractSupport,
) -> Visits:
    """Visits when every host has the whole expert and serves a part of its tokens.

    A token's draw u in [0, 1) picks the host whose slice of the cumulated shares holds u.
    """
    upper = jnp.cumsum(share, axis=1)[batch.experts]
    lower = upper - share[batch.experts]
    draw = batch.draw[:, :, None] * upper[:, :, -1:]
    chosen = (batch.experts >= 0)[:, :, None]
    served = jnp.where((lower <= draw) & (draw < upper) & chosen, 1.0, 0.0).astype(share.dtype)
    visited = support.presence(served.sum(axis=1))
    home = jnp.take_along_axis(served, batch.gather_slot[:, None, None], axis=1)[:, 0]
    return Visits(
        visited=visited,
        gather=rule(shape, home, visited),
        work=batch.weight @ served.sum(axis=1),
        weight=batch.weight,
    )
