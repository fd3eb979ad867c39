"""Ways to find the best deployment: a grid, the race of the command, halving, a guided model, a closed form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.serving.online.requests import Requests
from jaxmoe.sweep.best_deployment import TOLERANCE, Contender, race, start_of

SHARE = 0.1  # of the grid's requests that the others may simulate
KEPT = 4  # times fewer candidates go on to the next stretch
STRETCHES = {1 / 8: 0.05, 1 / 2: 0.02, 1: TOLERANCE}  # parts of the trace, and to what the rate is known there
FIRST_TRIALS = 4  # of the guided model, which are the best by the estimate


class Found(NamedTuple):
    """The candidate that a method takes, the highest rate at which it saw it keep the limits, and requests simulated.

    The rate is in requests/s of a GPU, 0 where nothing was simulated.
    """

    chosen: Contender
    rate: float
    simulated: int


class Grid(NamedTuple):
    """Highest rates, requests/s of a GPU, of all candidates, and the requests of all trials.

    Trials end early, which changes no answer, and count as the whole trace each.
    """

    rates: Mapping[Contender, float]
    simulated: int


Method = Callable[[Sequence[Contender], Grid, int], Found]


def grid_of(candidates: Sequence[Contender]) -> Grid:
    """Every candidate's highest rate."""
    trials = {each: RateTrials(each.serving) for each in candidates}
    rates = {each: own.highest(start_of(each), TOLERANCE) / each.devices for each, own in trials.items()}
    return Grid(rates, sum(own.count * len(each.serving.requests) for each, own in trials.items()))


def by_grid(candidates: Sequence[Contender], grid: Grid, seed: int) -> Found:
    """The best of all."""
    chosen = max(candidates, key=lambda each: grid.rates[each])
    return Found(chosen, grid.rates[chosen], grid.simulated)


def by_race(candidates: Sequence[Contender], grid: Grid, seed: int) -> Found:
    """What `jaxmoe serve best` does."""
    outcomes = race(candidates)
    best = max(outcomes, key=lambda each: each.rate or 0.0)
    return Found(best.candidate, best.rate or 0.0, sum(each.simulated for each in outcomes))


def by_estimate(candidates: Sequence[Contender], grid: Grid, seed: int) -> Found:
    """The best by the closed form; nothing is simulated."""
    return Found(max(candidates, key=_estimate), 0.0, 0)


def by_halving(candidates: Sequence[Contender], grid: Grid, seed: int) -> Found:
    """Highest rates over growing stretches of the trace, of fewer candidates each time; the estimate drops half."""
    left = sorted(candidates, key=_estimate, reverse=True)[: max(len(candidates) // 2, 1)]
    rates, simulated = {each: _estimate(each) for each in left}, 0
    for part, tolerance in STRETCHES.items():
        trials = {
            each: RateTrials(replace(each.serving, requests=first_of(each.serving.requests, part))) for each in left
        }
        rates = {
            each: own.highest(rates[each] * each.devices, tolerance, 1.2) / each.devices for each, own in trials.items()
        }
        simulated += sum(own.simulated for own in trials.values())
        left = sorted(left, key=lambda each: rates[each], reverse=True)[: max(len(left) // KEPT, 1)]
    return Found(left[0], rates[left[0]], simulated)


def by_guide(candidates: Sequence[Contender], grid: Grid, seed: int) -> Found:
    """A tree-structured Parzen estimator over the axes that tries whole candidates, the best by the estimate first."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    by_values = {_key(each.values): each for each in candidates}
    axes = {key: sorted({each.values[key] for each in candidates}) for key in candidates[0].values}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for each in sorted(candidates, key=_estimate, reverse=True)[:FIRST_TRIALS]:
        study.enqueue_trial(each.values)
    rates: dict[Contender, float] = {}
    simulated = 0
    while simulated < SHARE * grid.simulated and len(study.trials) < 20 * len(candidates):
        trial = study.ask({key: optuna.distributions.CategoricalDistribution(values) for key, values in axes.items()})
        each = by_values.get(_key(trial.params))
        if each is not None and each not in rates:
            own = RateTrials(each.serving)
            rates[each] = own.highest(start_of(each), TOLERANCE) / each.devices
            simulated += own.simulated
        study.tell(trial, 0.0 if each is None else rates[each])
    chosen = max(rates, key=lambda each: rates[each])
    return Found(chosen, rates[chosen], simulated)


METHODS: Mapping[str, Method] = {
    "grid": by_grid,
    "race": by_race,
    "halving": by_halving,
    "guide": by_guide,
    "estimate": by_estimate,
}


def first_of(requests: Requests, part: float) -> Requests:
    """The first part of requests, two at least."""
    return requests.window(0, max(int(part * len(requests)), 2))


def _estimate(each: Contender) -> float:
    return each.estimate / each.devices


def _key(values: Mapping[str, object]) -> str:
    return str(sorted(values.items()))
