"""Where searches start: legal plans without preference, every node with its even part of the work."""

import numpy as np

from jaxmoe.placement.strategies import filled_in_order
from jaxmoe.tune.ranked import Plans
from jaxmoe.tune.referee import Referee


def random_starts(referee: Referee, candidates: int, seed: int) -> Plans:
    """Plans that fill nodes in random order with experts in random order; the same seed gives the same plans."""
    rng = np.random.default_rng([seed, 2])
    problem = referee.problem
    flops = np.asarray(problem.model.machine.die.flops, float)
    part = flops / flops.sum()

    def plan(frequency: np.ndarray) -> np.ndarray:
        return filled_in_order(frequency, part, rng.permutation(len(frequency)), rng.permutation(len(part)))

    return referee.legal(np.stack([[plan(layer) for _ in range(candidates)] for layer in problem.frequency]))
