"""Which further copies of experts fill shadow slots: Algorithm 1 of moentwine, and the greedy rule it improves on.

Every device keeps its native experts, and has shadow slots for copies of others. All copies of an expert serve alike,
so a device's heat is the sum of load / copies over what it holds.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.placement.slots import EMPTY
from jaxmoe.relax import least_at

Choice = Literal["nearest", "coldest"]
Native = Int[Array, "node native"]  # experts in slots, EMPTY for none
Shadow = Int[Array, "node slot"]
ExpertLoads = Float[Array, " expert"]  # choices of each
Distances = Float[Array, "node node2"]  # hops


class _Filling(NamedTuple):
    """State of the loop that fills shadow slots."""

    shadow: Shadow
    copies: Float[Array, " expert"]
    heat: Float[Array, " node"]
    going_on: Bool[Array, ""]


def fill_shadow_slots(
    loads: ExpertLoads, native: Native, resident: Shadow, distance: Distances, choice: Choice
) -> Shadow:
    """Experts for the shadow slots of one layer, from none on (moentwine Algorithm 1); -1 where a slot is not used.

    The most popular expert of the hottest device goes to one of the devices that would stay cooler than that device is,
    and have a slot left; until there is none. `nearest` takes the topologically nearest of them, one where the expert
    is `resident` before all others as it costs nothing, and of those as near the coldest. `coldest` takes the one of
    the least heat wherever it is, as the balancers of training systems do (V-C). A device gets no second copy.

    Cooler is meant as the text has it: a device's heat with its part of the expert, load / (copies + 1), is below the
    largest. Line 4 of the algorithm has load / copies: then a device with one native expert would never be relieved.
    """
    nodes, slots = resident.shape
    if slots == 0:
        return resident
    numbers, places = jnp.arange(nodes), jnp.arange(slots)
    experts = jnp.arange(loads.shape[0])
    heat = jnp.where(native != EMPTY, loads[native], 0).sum(axis=1)

    def holds(held: Int[Array, "node _"], expert: Int[Array, ""]) -> Bool[Array, " node"]:
        return (held == expert).any(axis=1)

    def copy(at: _Filling) -> _Filling:
        hottest = least_at(-at.heat)
        there = jnp.concatenate([native[hottest], at.shadow[hottest]])
        each = jnp.where(there == EMPTY, -1, loads[there] / at.copies[there])
        source, before = there[jnp.argmax(each)], each.max()
        hosts = holds(native, source) | holds(at.shadow, source)
        empty = at.shadow == EMPTY
        after = before * at.copies[source] / (at.copies[source] + 1)
        cold = (at.heat < at.heat[hottest] - after) & ~hosts & empty.any(axis=1)
        if choice == "nearest":
            far = jnp.where(holds(resident, source), -1, distance[hottest])
            key = far + 0.5 * at.heat / jnp.maximum(at.heat[hottest], jnp.finfo(loads.dtype).tiny)
        else:
            key = at.heat
        chosen = least_at(jnp.where(cold, key, jnp.inf))
        heat = at.heat + jnp.where(hosts, after - before, 0) + jnp.where(numbers == chosen, after, 0)
        here = (numbers == chosen)[:, None] & (places == jnp.argmax(empty[chosen]))
        filled = _Filling(jnp.where(here, source, at.shadow), at.copies + (experts == source), heat, cold.any())
        return jax.tree.map(
            lambda new, old: jnp.where(filled.going_on, new, old), filled, at._replace(going_on=jnp.asarray(False))
        )

    start = _Filling(jnp.full_like(resident, EMPTY), jnp.ones_like(loads), heat, jnp.asarray(True))
    return kept_in_place(jax.lax.while_loop(lambda at: at.going_on, copy, start).shadow, resident)


def kept_in_place(wanted: Shadow, resident: Shadow) -> Shadow:
    """Reorders the wanted experts of every node so that those already resident stay in their slots."""
    stays = (resident != EMPTY) & (resident[:, :, None] == wanted[:, None, :]).any(axis=2)
    new = (wanted != EMPTY) & ~(wanted[:, :, None] == resident[:, None, :]).any(axis=2)
    place, number = jnp.cumsum(~stays, axis=1), jnp.cumsum(new, axis=1)  # 1, 2, ... of places, and of who takes them
    takes = new[:, None, :] & ~stays[:, :, None] & (place[:, :, None] == number[:, None, :])
    taken = jnp.where(takes, wanted[:, None, :], EMPTY).max(axis=2)
    return jnp.where(stays, resident, taken)
