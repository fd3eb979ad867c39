"""The time model of a path from those of its hops (camoe 3.4, multi-hop and asymmetry)."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from jaxmoe.network import AlphaBeta
from jaxmoe.network.pairwise import ProfileError


def chained(hops: Sequence[AlphaBeta], pipelined: bool = False) -> AlphaBeta:
    """One model of several hops after each other: alphas add up; betas add up too, or pipelined the largest counts.

    camoe 3.4, multi-hop and asymmetry. Raises `ProfileError` where an alpha is negative: it is no latency to add.
    """
    if not hops:
        raise ProfileError("no hops are given; name those that a message passes")
    alpha = jnp.stack([hop.alpha for hop in hops])
    beta = jnp.stack([hop.beta for hop in hops])
    if float(alpha.min()) < 0:
        raise ProfileError(
            f"a hop has alpha {float(alpha.min()):.4g} s, below 0, as after a burst that passes at once; it is no "
            "latency and cannot be added up: measure the path end to end"
        )
    return replace(hops[0], alpha=alpha.sum(axis=0), beta=beta.max(axis=0) if pipelined else beta.sum(axis=0))
