"""From inputs to a tuned plan: the problem, the optimiser by its name with its settings for one run, the result."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from jaxmoe.config import build_tuner_settings
from jaxmoe.experiment.clock import Report
from jaxmoe.experiment.inputs import Inputs, OptionError
from jaxmoe.experiment.strategies import GATHERED, TUNED, Strategy, strategy
from jaxmoe.experiment.validation import fitted_gamma
from jaxmoe.tune import PlacementProblem, TuneResult, TunerSettings
from jaxmoe.tune.optimisers import OPTIMISERS
from jaxmoe.tune.two_stage import TwoStageSettings


def placement_problem(inputs: Inputs) -> PlacementProblem:
    """What a tuner is asked. Raises `PlanError` where no placement fits."""
    return PlacementProblem(
        model=inputs.model,
        trace=inputs.trace,
        batch_tokens=inputs.scenario.workload.batch_tokens,
        consecutive=inputs.scenario.workload.sampling == "consecutive",
        p95_weight=inputs.scenario.tuning.p95_weight,
        own_exchange=inputs.scenario.costs.exchange,
        exchanges=inputs.scenario.tuning.exchanges,
    )


def check_optimiser(name: str) -> None:
    """Raise `OptionError` for a name that is none of theirs, or an optimiser that lacks a package."""
    if name not in OPTIMISERS:
        raise OptionError(f"--optimiser is {name!r}, expected one of {', '.join(OPTIMISERS)}")
    if name == "milp-bayes" and find_spec("optuna") is None:
        raise OptionError(f"--optimiser {name} needs optuna; install it with: pip install 'jaxmoe[bayes]'")


def search(name: str, inputs: Inputs, problem: PlacementProblem, report: Report) -> TuneResult:
    """Run it. The scenario's `tuning` has the seed and time limit of all, and what else the gradient tuner takes."""
    optimiser, tuning = OPTIMISERS[name], inputs.scenario.tuning
    if optimiser.settings is TunerSettings:
        return optimiser.run(problem, build_tuner_settings(tuning), report)
    settings = optimiser.settings(seed=tuning.seed, time_limit_s=tuning.time_limit_s)
    if isinstance(settings, TwoStageSettings):
        settings = replace(settings, gamma=fitted_gamma(inputs).gamma)
    return optimiser.run(problem, settings, report)


def tuned_strategies(inputs: Inputs, result: TuneResult) -> list[Strategy]:
    """The tuned plan; before it, where a strategy or hybrid took over layers, the plan that the search ended with."""
    tuned = strategy(inputs, TUNED, result.share, result.exchange)
    other = (result.share != result.gathered).any(axis=(1, 2))
    other |= np.array(result.exchange) != np.array(result.gathered_exchange)
    if not other.any():
        return [tuned]
    note = (
        f"not what the search ended with in {other.sum()} of {len(other)} layers, where a strategy or hybrid is as fast"
    )
    return [
        strategy(inputs, GATHERED, result.gathered, result.gathered_exchange),
        replace(tuned, note=tuned.note or note),
    ]
