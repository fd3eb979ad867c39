"""Every optimiser by name. Each takes a problem, its own settings and a progress report, and returns a `TuneResult`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmoe.tune.greedy import AnnealSettings, GreedySettings, RandomSettings, anneal, greedy, random_search
from jaxmoe.tune.problem import TuneResult
from jaxmoe.tune.settings import TunerSettings
from jaxmoe.tune.tuner import tune
from jaxmoe.tune.two_stage import TwoStageSettings, two_stage


class Optimiser(NamedTuple):
    """How to run an optimiser, what its settings are, and what it does, in a line for people."""

    run: Callable[..., TuneResult]
    settings: type[Any]  # a dataclass with `seed` and `time_limit_s` among its fields
    about: str


OPTIMISERS = {
    "gradient": Optimiser(tune, TunerSettings, "gradient descent over relaxed placements, rounded and refined"),
    "milp-bayes": Optimiser(
        two_stage, TwoStageSettings, "HD-MoE's node balance by MILP, then mapping by Bayesian search"
    ),
    "anneal": Optimiser(anneal, AnnealSettings, "simulated annealing with the exact model"),
    "greedy": Optimiser(greedy, GreedySettings, "expert after expert to the hosts that cost the least"),
    "random": Optimiser(random_search, RandomSettings, "the best of many random balanced plans"),
}
