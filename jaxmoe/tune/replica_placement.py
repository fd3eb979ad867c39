"""Slots tuned for the time of a layer on its machine: which experts have copies, how many, and on which ranks.

Where `jaxmoe.tune.replicas` evens loads out, this uses the model's time: network and nodes, batch by batch, with the
engine's choice among copies, and the cost of moving from the placement before. Starts are EPLB, the balanced slots, the
same copies far from each other, the placement before, and the ends of gradient descents. All are improved by local
search and compared by the exact model. The best of every layer is kept, so on the loads it was tuned for it is never
worse than a start.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxmoe.compiling import compile_ahead
from jaxmoe.engine.copies import ReplicaModel
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.placement import PlanError
from jaxmoe.placement.slots import EMPTY, Slots, copies_of_slots, filled
from jaxmoe.relax import AbstractReduction, SmoothMax, geometric
from jaxmoe.threads import cores, side_by_side
from jaxmoe.tune.objective import objective
from jaxmoe.tune.replica_search import searched_slots
from jaxmoe.tune.replica_weights import weights_of
from jaxmoe.tune.replicas import balanced_slots

LARGEST = 2**21  # entries [expert, source, node] up to which descents pay; beyond, the search has the time

# Copies by gradient through the model of a layer: how many each expert has and where, together.
#
# Every slot of a rank holds parts of experts, a softmax, so every relaxed placement has the right number of slots
# everywhere; a rank has a copy as likely as any of its slots does. Experts with less than one copy are charged for.
# Temperatures of the softmax and of the smooth maximum fall together.


STEPS = 100
LEARNING_RATE = 0.3
LIKELY = 5.0  # log-weight at the start of what a slot holds
SOFTMAX, MAXIMUM = (1.0, 0.2), (0.1, 0.01)  # temperatures, from the first step to the last
MISSING = 0.05  # charge for a missing expert, in times of the logarithm of the cost


class Mixing(eqx.Module):
    """Objective of copies, s: the mean time over batches mixed with the 95th percentile, and the cost of moving.

    The time of moving from `before` is spread over `horizon` steps.
    """

    p95_weight: Float[Array, ""]
    horizon: Float[Array, ""]  # infinite where moving costs nothing

    def __call__(
        self,
        model: ReplicaModel,
        held: Float[Array, "expert node"],
        loads: Float[Array, "batch expert"],
        before: Float[Array, "expert node"],
        reduction: AbstractReduction | None = None,
    ) -> Float[Array, ""]:
        seconds = model(held, loads, reduction).total
        return objective(seconds, self.p95_weight) + model.moving(held, before, reduction) / self.horizon


@eqx.filter_jit
def descended(
    model: ReplicaModel,
    mixing: Mixing,
    loads: Float[Array, "layer batch expert"],
    starts: Int[Array, "layer start node slot"],
    before: Float[Array, "layer expert node"],
    steps: int = STEPS,
) -> Float[Array, "layer start expert node"]:
    """Probability that a node has a copy of each expert at the end of descents from `starts`."""
    progress = np.linspace(0, 1, steps)
    cooling = [jnp.asarray(geometric(*pair, progress), jnp.float32) for pair in (SOFTMAX, MAXIMUM)]
    optimiser = optax.adam(LEARNING_RATE)
    experts = loads.shape[2]

    def descent(start: Int[Array, "node slot"], loads: Array, before: Array) -> Float[Array, "expert node"]:
        def step(state, temperatures):
            weights, memory = state
            softmax, maximum = temperatures

            def cost(weights: Float[Array, "node slot expert"]) -> Float[Array, ""]:
                held = likely_copies(weights / softmax)
                missing = jnp.maximum(1 - held.sum(axis=1), 0).sum()
                # Relative, so that steps do not depend on units.
                return jnp.log(mixing(model, held, loads, before, SmoothMax(maximum))) + MISSING * missing

            change, memory = optimiser.update(jax.grad(cost)(weights), memory)
            return (optax.apply_updates(weights, change), memory), None

        weights = LIKELY * jax.nn.one_hot(start, experts)
        (weights, _), _ = jax.lax.scan(step, (weights, optimiser.init(weights)), tuple(cooling))
        return likely_copies(weights / cooling[0][-1])

    def layer(given: tuple[Array, Array, Array]) -> Array:
        loads, starts, before = given
        return jax.lax.map(lambda start: descent(start, loads, before), starts)

    return jax.lax.map(layer, (loads, starts, before))


def likely_copies(weights: Float[Array, "node slot expert"]) -> Float[Array, "expert node"]:
    """Probability that a node has each expert in any of its slots."""
    return 1 - jnp.prod(1 - jax.nn.softmax(weights, axis=-1), axis=1).T


def rounded(held: Float[np.ndarray, "layer expert node"], slots: int) -> Int[np.ndarray, "layer slot"]:
    """Whole copies: first one of every expert, then those with most weight, each where it weighs most and fits.

    No rank has an expert twice, where ranks have no more slots than there are experts.
    """
    layers, experts, nodes = held.shape
    per_rank = slots // nodes
    chosen = np.full((layers, nodes, per_rank), EMPTY)
    for row in range(layers):
        taken, used = np.zeros((experts, nodes), bool), np.zeros(nodes, int)

        def take(expert: int, node: int, row=row, taken=taken, used=used) -> None:
            chosen[row, node, used[node]] = expert
            taken[expert, node] = True
            used[node] += 1

        for expert in np.argsort(-held[row].max(axis=1), kind="stable").tolist():
            take(expert, int(np.where(used < per_rank, held[row, expert], -1).argmax()))
        for place in np.argsort(-held[row], axis=None, kind="stable").tolist():
            expert, node = divmod(place, nodes)
            if used[node] < per_rank and not taken[expert, node]:
                take(expert, node)
    return filled(chosen.reshape(layers, slots), experts, nodes)


# Slots of every layer: starts, their improvement, and the best of them.


@dataclass(frozen=True)
class ReplicaProblem:
    """Place `slots` slots of every layer for `loads`, choices of every expert in batches.

    The value of a placement is the mean time over batches mixed with its 95th percentile, and the seconds of moving
    from `before` spread over `horizon` steps. `groups` of experts on server `nodes` are for EPLB's hierarchical policy.
    Without `repeats` no rank has an expert twice, where ranks have no more slots than there are experts.
    """

    model: ReplicaModel
    loads: Float[np.ndarray, "layer batch expert"]
    slots: int
    p95_weight: float = 0.2
    before: Int[np.ndarray, "..."] | None = None
    horizon: float = np.inf
    groups: int = 1
    nodes: int = 1
    repeats: bool = False

    def __post_init__(self) -> None:
        ranks = self.ranks
        if self.slots % ranks or self.slots < self.experts:
            raise PlanError(
                f"slots is {self.slots}, expected a multiple of the {ranks} ranks and at least one for each of the "
                f"{self.experts} experts"
            )
        if not (np.isfinite(self.loads).all() and (self.loads >= 0).all()):
            raise PlanError("loads must be finite and not negative; check the trace")
        if not 0 <= self.p95_weight <= 1 or not self.horizon > 0:
            raise PlanError(
                f"p95_weight is {self.p95_weight}, expected 0 to 1; horizon {self.horizon}, expected above 0"
            )
        if self.before is not None and self.before.shape != (len(self.loads), self.slots):
            raise PlanError(
                f"the placement before has the shape {self.before.shape}, expected {(len(self.loads), self.slots)}; "
                "give one of the same layers and slots"
            )

    @property
    def ranks(self) -> int:
        return self.model.layer.machine.num_nodes

    @property
    def experts(self) -> int:
        return self.loads.shape[2]


@dataclass(frozen=True)
class TunedSlots:
    """Slots with their values, s, by name [layer]: of every start and end, and `tuned`, of what is returned."""

    slots: Slots
    values: dict[str, Float[np.ndarray, " layer"]]
    chosen: tuple[str, ...]  # where the tuned slots of every layer come from


def tuned_slots(problem: ReplicaProblem, moves: int = 20_000, steps: int = STEPS, seed: int = 0) -> TunedSlots:
    """The best slots found with so many moves of local search for every layer, and descents of so many `steps`.

    Without steps there are no descents. An eighth of the moves goes to each candidate, then the rest to the best.
    """
    starts = starting_slots(problem)
    if steps and problem.experts * problem.ranks**2 <= LARGEST:
        starts |= {f"gradient from {name}": slots for name, slots in _descents(problem, starts, steps).items()}
    values = {name: slot_values(problem, slots) for name, slots in starts.items()}
    legal = {name: slots for name, slots in starts.items() if name != "eplb" or problem.repeats}
    weights = weights_of(problem.model)

    def improved(slots: Slots, count: int, seed: int) -> Slots:
        given = (problem.p95_weight, problem.before, problem.horizon, problem.repeats)
        return searched_slots(problem.model, weights, problem.loads, slots, count, *given, seed)

    for number, (name, slots) in enumerate([*legal.items()]):
        legal[f"searched from {name}"] = improved(slots, moves // 8, seed + number)
        values[f"searched from {name}"] = slot_values(problem, legal[f"searched from {name}"])
    best, _, _ = _best(legal, values)
    legal["search"] = improved(best, moves, seed + len(legal))
    values["search"] = slot_values(problem, legal["search"])
    best, value, chosen = _best(legal, values)
    return TunedSlots(best, values | {"tuned": value}, chosen)


def starting_slots(problem: ReplicaProblem) -> dict[str, Slots]:
    """EPLB, hierarchical where groups divide nodes, as published; the same legally; balanced slots, and the same copies
    far from each other; what was before.
    """
    loads, ranks = problem.loads.mean(axis=1), problem.ranks
    published = eplb(loads, problem.slots, ranks, problem.groups, problem.nodes)
    starts = {"eplb": published}
    if not problem.repeats:
        copies = copies_of_slots(published, problem.experts, ranks)
        starts["eplb without repeats"] = rounded(np.minimum(copies, 1).astype(float), problem.slots)
    starts["balanced"] = balanced_slots(loads, problem.slots, ranks, repeats=problem.repeats, fast=True)
    starts["spread"] = spread_slots(loads, starts["balanced"], np.asarray(problem.model.tier))
    if problem.before is not None:
        starts["before"] = problem.before
    return starts


def spread_slots(loads: Float[np.ndarray, "layer expert"], slots: Slots, tier: Int[np.ndarray, "node node2"]) -> Slots:
    """As many copies of every expert, each as far from the others as there is room, so that all ranks have one near.

    The heaviest come first; of ranks that are as far from an expert's copies the least loaded takes the next. `tier`
    is the place of distances. No rank has an expert twice, where ranks have no more slots than there are experts.
    """
    nodes, experts = len(tier), loads.shape[1]
    placed = np.full((len(loads), nodes, slots.shape[1] // nodes), EMPTY)
    for row, load in enumerate(loads):
        copies = np.bincount(slots[row], minlength=experts)
        busy, used = np.zeros(nodes), np.zeros(nodes, int)
        for expert in np.argsort(-load / copies, kind="stable").tolist():
            near = np.full(nodes, tier.max() + 1)  # distance of the nearest copy
            for _ in range(min(copies[expert], nodes)):
                free = (used < placed.shape[2]) & (near > 0)
                if not free.any():
                    break
                node = int(np.lexsort((busy, -near, ~free))[0])
                placed[row, node, used[node]] = expert
                used[node] += 1
                busy[node] += load[expert] / copies[expert]
                near = np.minimum(near, tier[:, node])
    return filled(placed.reshape(slots.shape), experts, nodes)


def slot_values(problem: ReplicaProblem, slots: Slots) -> Float[np.ndarray, " layer"]:
    """The exact value of slots, s."""
    held, loads, before = _as_arrays(problem, slots)
    return np.asarray(_values(problem.model, _mixing(problem), held, loads, before), float)


@eqx.filter_jit
def _values(model: ReplicaModel, mixing: Mixing, held: Array, loads: Array, before: Array) -> Array:
    return jax.lax.map(lambda given: mixing(model, *given), (held, loads, before))


def _mixing(problem: ReplicaProblem) -> Mixing:
    return Mixing(jnp.asarray(problem.p95_weight, jnp.float32), jnp.asarray(problem.horizon, jnp.float32))


def _as_arrays(problem: ReplicaProblem, slots: Slots) -> tuple[Array, Array, Array]:
    held = copies_of_slots(slots, problem.experts, problem.ranks)
    before = held if problem.before is None else copies_of_slots(problem.before, problem.experts, problem.ranks)
    return tuple(jnp.asarray(each, jnp.float32) for each in (held, problem.loads, before))  # type: ignore[return-value]


def _descents(problem: ReplicaProblem, starts: dict[str, Slots], steps: int) -> dict[str, Slots]:
    """Rounded results of gradient descents by the name of their start: balanced slots, and the placement before."""
    names = [name for name in ("balanced", "before") if name in starts]
    given = np.stack([starts[name].reshape(len(problem.loads), problem.ranks, -1) for name in names], axis=1)
    _, loads, before = _as_arrays(problem, starts["balanced"])
    before = before if problem.before is not None else jnp.ones_like(before)
    layers, parts = len(loads), min(cores(), len(loads))
    # A part for each core, all of one size, so that one function is compiled; the last layer fills the last part up.
    rows = np.minimum(np.arange(-(-layers // parts) * parts), layers - 1).reshape(parts, -1)
    calls = [(problem.model, _mixing(problem), loads[at], jnp.asarray(given[at]), before[at], steps) for at in rows]
    compile_ahead(descended, *calls[0])
    held = np.concatenate([*side_by_side(lambda call: np.asarray(descended(*call)), calls)])[:layers]
    return {name: rounded(held[:, index], problem.slots) for index, name in enumerate(names)}


def _best(
    slots: dict[str, Slots], values: dict[str, Float[np.ndarray, " layer"]]
) -> tuple[Slots, Float[np.ndarray, " layer"], tuple[str, ...]]:
    """The best candidate of every layer, its value and its name."""
    names = [*slots]
    table = np.stack([values[name] for name in names])
    chosen, row = table.argmin(axis=0), np.arange(table.shape[1])
    return np.stack([slots[name] for name in names])[chosen, row], table[chosen, row], tuple(names[i] for i in chosen)
