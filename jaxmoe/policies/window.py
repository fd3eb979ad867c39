"""How many experts can be broadcast while the layer before runs: hd_moe IV-D1 and Eq. 17."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.network import ChunkedBroadcast


def experts_in_window(
    broadcast: ChunkedBroadcast, window: Float[Array, "*windows"], limit: int
) -> Int[Array, "*windows"]:
    """The largest k, up to `limit`, whose broadcast at its best chunk size takes no longer than the window, in s.

    As in the paper, the broadcast has the links to itself: what the layer before sends is not counted.
    """
    seconds = jax.vmap(lambda k: replace(broadcast, iterations=k).least_time())(jnp.arange(1.0, limit + 1))
    return (seconds <= window[..., None]).sum(axis=-1)
