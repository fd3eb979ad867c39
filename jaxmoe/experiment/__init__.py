"""A run: inputs, strategies, evaluation, replay, comparison, summary. The commands and the studies are built on it."""

from jaxmoe.experiment.clock import Report, StageClock
from jaxmoe.experiment.comparison import Best, Comparison, compare
from jaxmoe.experiment.evaluation import Replay, describe, replay, score
from jaxmoe.experiment.inputs import Inputs, OptionError, read_inputs
from jaxmoe.experiment.node_traffic import fitted_gamma
from jaxmoe.experiment.strategies import Strategy, given_plans, region_rings, standard_strategies, strategy
from jaxmoe.experiment.summary import comparison_report, provenance
from jaxmoe.experiment.tuning import placement_problem, search, tuned_strategies
from jaxmoe.experiment.validation import Trial, agreement, run_trial, validation_report

__all__ = [
    "Best",
    "Comparison",
    "Inputs",
    "OptionError",
    "Replay",
    "Report",
    "StageClock",
    "Strategy",
    "Trial",
    "agreement",
    "compare",
    "comparison_report",
    "describe",
    "fitted_gamma",
    "given_plans",
    "placement_problem",
    "provenance",
    "read_inputs",
    "region_rings",
    "replay",
    "run_trial",
    "score",
    "search",
    "standard_strategies",
    "strategy",
    "tuned_strategies",
    "validation_report",
]
