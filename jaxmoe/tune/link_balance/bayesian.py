"""Bayesian optimisation of the mapping (hd_moe IV-C2): tree-structured Parzen estimators over random keys.

Every cluster has a key in [0, 1]; the order of the keys is the order of the clusters. So every point is a legal
mapping, and a small change of a key moves one cluster a few nodes. The estimators are of all keys jointly: one for
each key alone was slower and found less. Needs optuna.
"""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.tune.link_balance.mapping import Best, Budget, Mapping, Question, scorer

GROUP = 8  # orders asked for, then scored in one go
STARTUP_TRIALS = 32  # random ones, before the estimators have something to go by

Objective = Callable[[Int[np.ndarray, "order node"]], Float[np.ndarray, " order"]]


def bayesian(question: Question, seed: int, budget: Budget, objective: Objective | None = None) -> Mapping:
    """Search with optuna. A trial is an order that is scored.

    `objective` scores orders in place of the exact model, as an event simulator would: an array [order, node] to
    seconds [order]. Raises `ImportError` with the remedy where optuna is missing.
    """
    optuna = _optuna()
    score = scorer(question, GROUP) if objective is None else objective
    nodes = question.share.shape[1]
    best, trials = Best.identity(score, nodes), 0
    names = [f"key_{cluster}" for cluster in range(nodes)]
    study = optuna.create_study(sampler=_sampler(optuna, seed))
    study.enqueue_trial(dict(zip(names, (best.order + 0.5) / nodes, strict=True)))
    space = dict.fromkeys(names, optuna.distributions.FloatDistribution(0, 1))
    while budget.spent(trials) < 1:
        asked = [study.ask(space) for _ in range(GROUP)]
        orders = np.argsort([[trial.params[name] for name in names] for trial in asked], axis=1, kind="stable")
        seconds = score(orders)
        for trial, value in zip(asked, seconds, strict=True):
            study.tell(trial, float(value))
        trials += GROUP
        best.see(trials, orders, seconds)
    return best.mapping()


def _sampler(optuna: ModuleType, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of joint estimators
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)


def _optuna() -> ModuleType:
    """The library, told to be silent."""
    try:
        import optuna
    except ImportError:
        raise ImportError(
            "Bayesian search over mappings needs optuna, which is not installed; pip install 'jaxmoe[bayes]', or "
            "choose the link method annealing or sinkhorn"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
