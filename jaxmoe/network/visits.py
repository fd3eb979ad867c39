"""Which nodes a token visits, and which node its draw names as home.

Sharded: a token visits every host of its experts. Replicated: it visits one host of each of its experts,
the one its recorded draw picks in proportion to the shares. Copies to one node are sent once.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.network.prefix import prefix_sums
from jaxmoe.relax import AbstractSupport
from jaxmoe.traces.batches import Batch


class Visits(eqx.Module):
    """What a batch asks of the nodes. Entries are 0 or 1, or between when relaxed.

    A token's home is row `h` of `home` where `named[token, h]` is 1. Sharded, homes are those of experts:
    the lowest-numbered host of the one drawn. Replicated, they are the tokens' own: the host that serves it.
    """

    visited: Float[Array, "token node"]
    named: Float[Array, "token home"]
    home: Float[Array, "home node"]
    work: Float[Array, " node"]  # token-expert products
    weight: Float[Array, " token"]


def sharded_visits(share: Float[Array, "expert node"], batch: Batch, support: AbstractSupport) -> Visits:
    """Visits when every host of an expert holds a part of its weights."""
    choice = batch.choices(share.shape[0])
    amount = support.amount(share)
    # First host in index order: presence up to and with a node, less presence before it.
    reached = prefix_sums(amount)
    present = support.presence(reached)
    return Visits(
        visited=support.presence(choice @ amount),
        named=jax.nn.one_hot(batch.gather_expert, share.shape[0], dtype=share.dtype),
        home=(present - support.presence(reached - amount)) / present[:, -1:],
        work=(batch.weight[:, None] * choice).sum(axis=0) @ share,
        weight=batch.weight,
    )


def replicated_visits(share: Float[Array, "expert node"], batch: Batch, support: AbstractSupport) -> Visits:
    """Visits when every host has the whole expert and serves a part of its tokens.

    A token's draw u in [0, 1) picks the host whose slice of the cumulated shares holds u.
    """
    # A running sum may be rounded down on the way, and the border of a node without a share must not stand out.
    upper = jax.lax.cummax(jnp.where(share > 0, jnp.cumsum(share, axis=1), 0), axis=1)
    beyond = batch.draw[:, :, None] * upper[batch.experts][:, :, -1:] < upper[batch.experts]
    # Slices share their borders, so rounding leaves no gap and no overlap between them.
    first = beyond & ~jnp.pad(beyond, ((0, 0), (0, 0), (1, 0)))[:, :, :-1]
    served = (first & (batch.experts >= 0)[:, :, None]).astype(share.dtype)
    return Visits(
        visited=support.presence(served.sum(axis=1)),
        named=jnp.eye(served.shape[0], dtype=share.dtype),
        home=jnp.take_along_axis(served, batch.gather_slot[:, None, None], axis=1)[:, 0],
        work=(batch.weight[:, None] * served.sum(axis=1)).sum(axis=0),
        weight=batch.weight,
    )
