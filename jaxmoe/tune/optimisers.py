"""Optimisers, registered in `jaxmoe.registry.OPTIMISERS`.

Each takes a problem, its own settings and a progress report, and returns a `TuneResult`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxmoe.tune.gradient_free import AnnealSettings, GreedySettings, RandomSettings, anneal, greedy, random_search
from jaxmoe.tune.results import TuneResult
from jaxmoe.tune.settings import TunerSettings
from jaxmoe.tune.tuner import tune
from jaxmoe.tune.two_stage import TwoStageSettings, two_stage


class Optimiser(NamedTuple):
    """How to run an optimiser, its settings, and packages that it needs with the extra of jaxmoe that installs each."""

    run: Callable[..., TuneResult]
    settings: Callable[..., Any]  # a dataclass with `seed` and `time_limit_s` among its fields
    needs: Mapping[str, str] = MappingProxyType({})


GRADIENT = Optimiser(tune, TunerSettings)
MILP_BAYES = Optimiser(two_stage, TwoStageSettings, needs={"optuna": "bayes"})
ANNEAL = Optimiser(anneal, AnnealSettings)
GREEDY = Optimiser(greedy, GreedySettings)
RANDOM = Optimiser(random_search, RandomSettings)
