"""The optimiser that `--optimiser` names, with its settings for one run."""

from dataclasses import replace
from importlib.util import find_spec

from jaxmoe.cli.inputs import Inputs
from jaxmoe.cli.node_traffic import fitted_gamma
from jaxmoe.cli.progress import Report
from jaxmoe.cli.session import OptionError
from jaxmoe.config import build_tuner_settings
from jaxmoe.tune import PlacementProblem, TuneResult, TunerSettings
from jaxmoe.tune.optimisers import OPTIMISERS
from jaxmoe.tune.two_stage import TwoStageSettings


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
