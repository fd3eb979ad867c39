"""Placements over time: loads drift from window to window, and a policy says when slots change and to what.

A window is many steps of like loads. Before each one a policy knows the windows so far. What changes costs the time
that weights take to come, layer after layer, while inference waits. Everything is priced by the count model.
"""

from dataclasses import dataclass, replace
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.optimize import linear_sum_assignment

from jaxmoe.engine.copies import ReplicaModel
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.slots import copies_of_slots, loads_of_slots, max_over_mean, new_copies
from jaxmoe.tune.replica_placement import ReplicaProblem, tuned_slots

Slots = Int[np.ndarray, "layer slot"]
Windows = Float[np.ndarray, "window layer expert"]
Past = Float[np.ndarray, "past layer expert"]
Placer = Literal["keep", "eplb", "eplb_matched", "tuned", "oracle"]


@dataclass(frozen=True)
class Policy:
    """`placer` places anew every so many windows, or when busiest ranks have `trigger` times the mean.

    `eplb_matched` gives EPLB's packs of experts to the ranks that hold most of them already. `tuned` weighs the time of
    moving against the gain over the steps until it places again, times `patience`; with an infinite `patience` moving
    counts as free. The `oracle` knows the coming window, and its movements cost nothing.
    """

    placer: Placer
    every: int = 1
    trigger: float | None = None
    patience: float = 1.0
    memory: int = 4  # windows that it looks back on
    moves: int = 4000  # of local search, for `tuned` and the oracle

    @property
    def name(self) -> str:
        if self.placer in ("keep", "oracle"):
            return {"keep": "never", "oracle": "oracle"}[self.placer]
        when = f"every {self.every}" if self.trigger is None else f"above {self.trigger:g}"
        free = ", moving free" if self.placer == "tuned" and np.isinf(self.patience) else ""
        return f"{self.placer} {when}{free}"


@dataclass(frozen=True)
class Rebalanced:
    """Times and movements of a policy by window.

    `seconds`: of a step, all layers together. `moving`: seconds that weights travel before the window, all layers
    together. `experts`: the number of expert copies that travel then.
    """

    seconds: Float[np.ndarray, " window"]
    moving: Float[np.ndarray, " window"]
    experts: Float[np.ndarray, " window"]
    slots: Int[np.ndarray, "window layer slot"]  # in every window


def rebalanced(
    problem: ReplicaProblem, windows: Windows, known: Past, start: Slots, policy: Policy, steps: int, seed: int = 0
) -> Rebalanced:
    """Run a policy over `windows`, of `steps` steps each, after those that are `known`; loads are choices of a step."""
    slots, seen = start, np.concatenate([known, windows])
    seconds, moving, moved, used = [], [], [], []
    for number, loads in enumerate(windows):
        at = len(known) + number
        after = slots
        if _is_due(policy, number, slots, seen[at - 1], problem.ranks):
            looked = loads[None] if policy.placer == "oracle" else seen[max(at - policy.memory, 0) : at]
            after = _placed(problem, looked, slots, policy, steps, seed + number)
        free = policy.placer == "oracle"
        moving.append(0.0 if free else moving_seconds(problem.model, slots, after, problem.experts).sum())
        moved.append(new_copies(slots, after, problem.experts, problem.ranks).sum())
        slots = after
        used.append(slots)
        seconds.append(step_seconds(problem.model, slots, loads[:, None]).sum())
    return Rebalanced(np.array(seconds), np.array(moving), np.array(moved, float), np.stack(used))


def _is_due(policy: Policy, number: int, slots: Slots, last: np.ndarray, ranks: int) -> bool:
    if policy.placer == "keep":
        return False
    if policy.trigger is not None:
        return bool(max_over_mean(loads_of_slots(slots, last, ranks)).mean() > policy.trigger)
    return number % policy.every == 0


def _placed(problem: ReplicaProblem, looked: Windows, slots: Slots, policy: Policy, steps: int, seed: int) -> Slots:
    loads = np.swapaxes(looked, 0, 1)
    if policy.placer.startswith("eplb"):
        after = eplb(loads.sum(axis=1), problem.slots, problem.ranks, problem.groups, problem.nodes)
        return matched(slots, after, problem.experts, problem.ranks) if policy.placer == "eplb_matched" else after
    horizon = np.inf if policy.placer == "oracle" else policy.patience * policy.every * steps
    asked = replace(problem, loads=loads, before=slots, horizon=horizon)
    return tuned_slots(asked, policy.moves, steps=0, seed=seed).slots


def matched(before: Slots, after: Slots, experts: int, ranks: int) -> Slots:
    """Slots `after` with ranks renumbered so that as few experts as possible move from `before`, [layer, slot].

    Which experts share a rank stays as it is; a linear assignment gives each such group a rank.
    """
    held, wanted = (copies_of_slots(slots, experts, ranks) > 0 for slots in (before, after))
    packs, given = after.reshape(len(after), ranks, -1), np.empty((*after.shape[:1], ranks), int)
    for layer in range(len(after)):
        _, given[layer] = linear_sum_assignment(-(held[layer].T.astype(int) @ wanted[layer]))
    return np.take_along_axis(packs, given[..., None], axis=1).reshape(after.shape)


def step_seconds(
    model: ReplicaModel, slots: Slots, loads: Float[np.ndarray, "layer batch expert"]
) -> Float[np.ndarray, "layer batch"]:
    """Times of layers under slots, s, by the count model."""
    held = copies_of_slots(slots, loads.shape[2], model.layer.machine.num_nodes)
    return np.asarray(_times(model, jnp.asarray(held, jnp.float32), jnp.asarray(loads, jnp.float32)), float)


@eqx.filter_jit
def _times(model: ReplicaModel, held: Array, loads: Array) -> Array:
    return jax.lax.map(lambda given: model(*given).total, (held, loads))


def moving_seconds(model: ReplicaModel, before: Slots, after: Slots, experts: int) -> Float[np.ndarray, " layer"]:
    """Seconds until the new copies of every layer have arrived, each layer by itself, [layer]."""
    nodes = model.layer.machine.num_nodes
    held = (jnp.asarray(copies_of_slots(slots, experts, nodes), jnp.float32) for slots in (after, before))
    return np.asarray(_moving(model, *held), float)


@eqx.filter_jit
def _moving(model: ReplicaModel, after: Array, before: Array) -> Array:
    return jax.lax.map(lambda given: model.moving(*given), (after, before))
