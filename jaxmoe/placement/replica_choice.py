"""Which copy of an expert serves whom: how an engine picks among replicas.

`even`: any copy with equal chance (vLLM, SGLang's `dynamic`). `nearest`: the copies at the fewest hops from the rank
where the token lives, among equals any (SGLang's `static`, which goes by device, then by server node). `fixed`: rank r
always uses copy r mod n of n, in the order of slots (vllm-ascend). Equal split over all copies, which balancers assume,
is true of `even` alone. What engines do is in `FORMATS.md` of the reference folder; a description only, no times.
"""

from typing import Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.placement.placement import PlanError

ReplicaChoice = Literal["even", "nearest", "fixed"]
REPLICA_CHOICES: tuple[str, ...] = get_args(ReplicaChoice)

Parts = Float[Array, "expert source node"]


def choice_of(name: str) -> ReplicaChoice:
    """The rule of this name. Raises `PlanError` for one that is not known."""
    if name not in REPLICA_CHOICES:
        raise PlanError(f"replica choice is {name!r}, expected one of {', '.join(REPLICA_CHOICES)}")
    return cast(ReplicaChoice, name)


def ranked_distance(hops: Int[np.ndarray, "source node"]) -> tuple[Int[np.ndarray, "source node"], int]:
    """The place of every distance among all that occur, from 0 on, and how many there are."""
    known, place = np.unique(np.asarray(hops), return_inverse=True)
    return place.reshape(np.shape(hops)), len(known)


def serving_parts(
    held: Float[Array, "expert node"], tier: Int[Array, "source node"], tiers: int, choice: ReplicaChoice
) -> Parts:
    """The part of an expert's tokens at every source rank that each node serves; sums to 1 over nodes.

    `held` is how many copies a node has, and `tier` the place of distances, of so many `tiers`. Relaxed, `held` is how
    likely a node has a copy: `nearest` then goes from tier to tier as far as no copy is likely in the nearer ones.
    `fixed` is a rule of whole copies; relaxed, it is taken for `even`, which it is on average over sources.
    """
    copies = held.sum(axis=1, keepdims=True)
    even = (held / jnp.maximum(copies, 1e-30))[:, None, :]
    if choice == "even":
        return jnp.broadcast_to(even, (*held.shape[:1], *tier.shape))
    if choice == "fixed":
        whole = (held == jnp.round(held)).all()
        return jnp.where(whole, _fixed(held), even)
    here = jax.nn.one_hot(tier, tiers, dtype=held.dtype)  # [source, node, tier]
    mass = jnp.einsum("ed,sdt->est", held, here)
    found = jnp.minimum(mass, 1)
    passed = jax.lax.associative_scan(jnp.multiply, 1 - found, axis=-1)  # unlike of cumprod, derivatives at 0 are right
    left = jnp.concatenate([jnp.ones_like(found[..., :1]), passed], axis=-1)
    each = left[..., :-1] / jnp.maximum(mass, 1)  # of a copy in a tier: found / mass
    source = jnp.arange(tier.shape[0])[:, None]
    return held[:, None, :] * each[:, source, tier] + left[..., -1:] * even


def _fixed(held: Float[Array, "expert node"]) -> Parts:
    upper = jnp.cumsum(held, axis=1)
    copies = jnp.maximum(upper[:, -1:], 1)
    named = jnp.arange(held.shape[1], dtype=held.dtype) % copies  # [expert, source]: the copy
    picked = (upper[:, None, :] > named[..., None]) & ((upper - held)[:, None, :] <= named[..., None])
    return picked.astype(held.dtype)


def serving_nodes(
    parts: Float[np.ndarray, "expert source node"],
    experts: Int[np.ndarray, "*token top_k"],
    source: Int[np.ndarray, "*token"],
    draw: Float[np.ndarray, "*token top_k"],
) -> Int[np.ndarray, "*token top_k"]:
    """The node that serves every choice of tokens that live at `source`; -1 for a missing choice.

    A choice's draw, in [0, 1), picks among the copies that may serve it, by their parts.
    """
    upper = np.cumsum(np.asarray(parts, np.float64), axis=2)
    upper /= upper[:, :, -1:]
    upper[:, :, -1] = 1.0
    here = upper[experts, np.asarray(source)[..., None]]  # [*token, top_k, node]
    node = (here <= np.asarray(draw, np.float64)[..., None]).sum(axis=-1)
    return np.where(experts >= 0, node, -1).astype(np.int32)
