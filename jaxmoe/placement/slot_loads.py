"""Loads of slots whose copies of an expert serve equal parts of its tokens, as JAX functions."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.placement.slots import EMPTY

NodeSlots = Int[Array, "node slot"]


def copies_of(slots: NodeSlots, experts: int) -> Int[Array, " expert"]:
    """Slots that hold each expert."""
    return jnp.zeros(experts + 1, jnp.int32).at[jnp.where(slots == EMPTY, experts, slots)].add(1)[:experts]


def per_slot(slots: NodeSlots, loads: Float[Array, "*group expert"]) -> Float[Array, "*group node slot"]:
    """The load of every slot under equal split."""
    each = loads / jnp.maximum(copies_of(slots, loads.shape[-1]), 1)
    return jnp.where(slots == EMPTY, 0, each[..., slots])


def node_loads(slots: NodeSlots, loads: Float[Array, " expert"]) -> Float[Array, " node"]:
    """The load of every node under equal split: its heat, moentwine Algorithm 1."""
    return per_slot(slots, loads).sum(axis=-1)


def share_of(slots: NodeSlots, experts: int) -> Float[Array, "expert node"]:
    """The part of every expert's tokens that each node serves."""
    each = 1 / jnp.maximum(copies_of(slots, experts), 1)
    node = jnp.arange(slots.shape[0])[:, None]
    held = jnp.zeros((experts + 1, slots.shape[0])).at[jnp.where(slots == EMPTY, experts, slots), node].add(1)
    return held[:experts] * each[:, None]


def repeated(slots: Int[Array, "*lead node slot"]) -> Bool[Array, "*lead node slot"]:
    """Slots whose expert another slot of the same node holds, before it."""
    count = slots.shape[-1]
    return ((slots[..., :, None] == slots[..., None, :]) & np.tri(count, k=-1, dtype=bool)).any(axis=-1)


def excess_over_mean(loads: Float[Array, "*lead node"]) -> Float[Array, "*lead"]:
    """(max - mean) / mean, moentwine Eq. 2; 0 where nobody has any load."""
    mean = loads.mean(axis=-1)
    return jnp.where(mean > 0, loads.max(axis=-1) / jnp.where(mean > 0, mean, 1) - 1, 0)
