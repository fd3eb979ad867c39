"""Optimisers over placements: a problem in; a legal plan, its exact cost, history and bound out."""

from jaxmoe.tune.problem import PlacementProblem as PlacementProblem
from jaxmoe.tune.result import History as History
from jaxmoe.tune.result import TuneResult as TuneResult
from jaxmoe.tune.settings import TunerSettings as TunerSettings
from jaxmoe.tune.tuner import tune as tune
