"""Good supports to begin with: one expert at a time moves to its best set of nodes, until none gains."""

import numpy as np
from jaxtyping import Float

from jaxmoe.tune.optimum.costs import Costs, Sets


def descend(costs: Costs, sets: Sets) -> Sets:
    """The local optimum reached from `sets`, by the bound on compute that node sets give."""
    sets, best = sets.copy(), np.inf
    contained = _contained(len(costs.supply[0]))
    while True:
        before = best
        for expert in range(len(sets)):
            seconds = _responses(costs, sets, expert, contained)
            choice = int(np.argmin(seconds))
            if seconds[choice] < best:
                sets[expert], best = choice, float(seconds[choice])
        if not best < before:
            return sets


def _contained(sets: int) -> np.ndarray:
    """1 where one set of nodes is part of another, [set, set2]."""
    number = np.arange(sets)
    return (number[:, None] & ~number == 0).astype(float)


def _responses(costs: Costs, sets: Sets, expert: int, contained: np.ndarray) -> Float[np.ndarray, " set"]:
    """Seconds with `expert` on every set and all others where they are; infinite for none at all."""
    others = np.arange(len(sets)) != expert
    at = sets[others]
    alone = np.einsum("bij,ijsr->bsr", costs.tokens[:, others][:, :, others], costs.pair_time[at[:, None], at])
    moved = np.einsum("bj,ajsr->absr", costs.tokens[:, expert, others], costs.pair_time[:, at])
    moved += np.einsum("bj,jasr->absr", costs.tokens[:, others, expert], costs.pair_time[at])
    moved += np.einsum("b,aasr->absr", costs.tokens[:, expert, expert], costs.pair_time)
    within = costs.demand[:, others] @ contained[at] + costs.demand[:, expert, None] * contained[:, None]
    communication = costs.runs * (alone + moved).max(axis=3).sum(axis=2).mean(axis=1)
    seconds = communication + costs.compute((within / costs.supply).max(axis=-1))
    seconds[0] = np.inf
    return seconds
