"""EPLB, DeepSeek's balancer of expert-parallel loads, from its published description.

Popular experts get further copies, one after the other to the expert whose copies have the most to do. The copies are
then packed: the heaviest first, each on the least loaded device that has a slot left. That is the global policy. The
hierarchical one, for models whose tokens keep to few groups of experts, packs whole groups on server nodes first, and
then copies and packs the experts of each node by itself. With one group and one node both are the same.

https://github.com/deepseek-ai/EPLB describes it, and calls the two policies so.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.placement.placement import PlanError

# Written once for NumPy and JAX: a plan is made on the host, a policy balances inside a compiled scan.

AnyArray = Any  # of NumPy or JAX


def eplb(loads: AnyArray, slots: int, devices: int, groups: int = 1, nodes: int = 1) -> AnyArray:
    """The expert in each of `slots`, int [*layer, slot], for `loads` [*layer, expert]; NumPy or JAX, as they are.

    `groups` of successive experts are packed whole on `nodes` of successive devices. Where nodes do not divide groups
    the policy is global, as published. Of equal loads the first counts as the heaviest. Raises `PlanError` for numbers
    that do not divide each other, or fewer slots than experts.
    """
    experts = loads.shape[-1]
    groups, nodes = (1, 1) if nodes < 1 or groups % nodes else (groups, nodes)
    _check(experts, slots, devices, groups, nodes)
    arrays = np if isinstance(loads, np.ndarray) else jnp
    lead, size = loads.shape[:-1], experts // groups
    # Which expert stands where, once groups are packed on nodes: [*layer, node, expert of the node].
    group = packed(loads.reshape(*lead, groups, size).sum(axis=-1), nodes)
    expert = (group[..., None] * size + np.arange(size)).reshape(*lead, nodes, experts // nodes)
    local = arrays.take_along_axis(loads[..., None, :], expert, axis=-1)
    held = replicated(local, slots // nodes)
    each = arrays.take_along_axis(local / counted(held, experts // nodes), held, axis=-1)
    order = packed(each, devices // nodes)
    chosen = arrays.take_along_axis(expert, arrays.take_along_axis(held, order, axis=-1), axis=-1)
    return chosen.reshape(*lead, slots)


def replicated(loads: AnyArray, slots: int) -> AnyArray:
    """The expert of every slot before packing, int [*lead, slot]: all once in order, then the further copies."""
    arrays, experts = _arrays(loads), loads.shape[-1]
    numbers = np.arange(experts)

    def copy(copies: AnyArray, _: AnyArray) -> tuple[AnyArray, AnyArray]:
        heaviest = arrays.argmax(loads / copies, axis=-1)
        return copies + (numbers == heaviest[..., None]), heaviest

    first = arrays.broadcast_to(arrays.asarray(numbers), loads.shape)
    if slots == experts:
        return first
    _, further = _fold(arrays, copy, arrays.ones(loads.shape, loads.dtype), arrays.zeros(slots - experts))
    return arrays.concatenate([first, arrays.moveaxis(further, 0, -1)], axis=-1)


def counted(held: AnyArray, experts: int) -> AnyArray:
    """Copies of every expert, int [*lead, expert], in slots that hold `held`."""
    arrays = _arrays(held)
    numbers: AnyArray = np.arange(experts + 1)
    ordered = arrays.sort(held, axis=-1)
    flat = ordered.reshape(-1, held.shape[-1])
    # Where each expert begins in the sorted slots; the next one begins where it ends.
    begin: AnyArray
    if arrays is np:
        begin = np.stack([np.searchsorted(row, numbers) for row in flat])
    else:
        begin = jax.vmap(lambda row: jnp.searchsorted(row, numbers))(flat)
    return arrays.diff(begin, axis=-1).reshape(*held.shape[:-1], experts)


def packed(loads: AnyArray, packs: int) -> AnyArray:
    """Items in the order of the packs they go to, equally many in each, int [*lead, item].

    The heaviest goes first, to the pack with the least load that is not full. Where every pack takes one item they stay
    in their order, as published.
    """
    arrays, items = _arrays(loads), loads.shape[-1]
    if items == packs or packs == 1:
        return arrays.broadcast_to(arrays.arange(items), loads.shape)
    size, numbers = items // packs, np.arange(packs)
    order = arrays.argsort(-loads, axis=-1, kind="stable") if arrays is np else jnp.argsort(-loads, axis=-1)
    heavy = arrays.moveaxis(arrays.take_along_axis(loads, order, axis=-1), -1, 0)

    def place(state: tuple[AnyArray, AnyArray], load: AnyArray) -> tuple[tuple[AnyArray, AnyArray], AnyArray]:
        carried, filled = state
        pack = arrays.argmin(arrays.where(filled < size, carried, np.inf), axis=-1)
        here = numbers == pack[..., None]
        at = pack * size + (filled * here).sum(axis=-1)
        return (carried + load[..., None] * here, filled + here), at

    empty = arrays.zeros((*loads.shape[:-1], packs), loads.dtype)
    _, place_of = _fold(arrays, place, (empty, arrays.zeros(empty.shape, np.int32)), heavy)
    by_place = arrays.argsort(arrays.moveaxis(place_of, 0, -1), axis=-1)
    return arrays.take_along_axis(order, by_place, axis=-1)


Step = Callable[[Any, AnyArray], tuple[Any, AnyArray]]


def _fold(arrays: ModuleType, step: Step, state: Any, items: AnyArray) -> tuple[Any, AnyArray]:
    """`jax.lax.scan`, or the same as a loop over NumPy arrays."""
    if arrays is jnp:
        return jax.lax.scan(step, state, items)
    results = []
    for item in items:
        state, result = step(state, item)
        results.append(result)
    return state, np.stack(results)


def _arrays(values: AnyArray) -> ModuleType:
    return np if isinstance(values, np.ndarray) else jnp


def _check(experts: int, slots: int, devices: int, groups: int, nodes: int) -> None:
    for name, whole, part, number in (
        ("groups", "experts", groups, experts),
        ("nodes", "devices", nodes, devices),
        ("devices", "slots", devices, slots),
        ("nodes", "slots", nodes, slots),
    ):
        if part < 1 or number % part:
            raise PlanError(f"{name} is {part}, expected a divisor of the {number} {whole}")
    if slots < experts:
        raise PlanError(f"slots is {slots}, expected at least one for each of the {experts} experts")
