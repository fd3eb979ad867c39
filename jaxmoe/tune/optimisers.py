"""Every optimiser by name. Each takes a problem, its own settings and a progress report, and returns a `TuneResult`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmoe.tune.greedy import AnnealSettings, GreedySettings, RandomSettings, anneal, greedy, random_search
from jaxmoe.tune.problem import TuneResult
from jaxmoe.tune.settings import TunerSettings
from jaxmoe.tune.tuner import tune
from jaxmoe.tune.two_stage import TwoStageSettings, two_stage


class Optimiser(NamedTuple):
    """How to run an optimiser, and what its settings are."""

    run: Callable[..., TuneResult]
    settings: type[Any]  # a dataclass with `seed` and `time_limit_s` among its fields


OPTIMISERS = {
    "gradient": Optimiser(tune, TunerSettings),
    "milp-bayes": Optimiser(two_stage, TwoStageSettings),
    "anneal": Optimiser(anneal, AnnealSettings),
    "greedy": Optimiser(greedy, GreedySettings),
    "random": Optimiser(random_search, RandomSettings),
}
