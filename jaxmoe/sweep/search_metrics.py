"""Metrics that take a search for every machine: the lower bound, and what a short tuning reaches.

The tuning is of all machines of one shape at once, at a fraction of `jaxmoe tune`. Descent over relaxed placements, as
the gradient tuner has it, runs for a block of machines in one compiled call: same batches, starts and steps, each with
its own numbers and under the exchange that even plans are fastest under there. What it ends with is rounded, and
compared, layer by layer and under every exchange that any placement may have, with all usual strategies that can be
compared. There is no local search, no division of work anew, and hybrids are as they ship. The steps are `SHORT`: a
machine costs 100 steps of two starts with 4 batches each, about as long as 4,000 evaluations of one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxmoe.engine import evaluate
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.network import AbstractExchange
from jaxmoe.placement import PlanError
from jaxmoe.placement.rounding import keep_hosts
from jaxmoe.sweep.compile_groups import Group
from jaxmoe.traces import Batch
from jaxmoe.tune import PlacementProblem, TunerSettings, descent
from jaxmoe.tune.bounds import bound_if_any
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.settings import StopSwitch, affordable
from jaxmoe.tune.tuner import LEAST_PART


def bound_of(inputs: Inputs, strategy: Strategy, exchange: AbstractExchange, batches: Batch) -> float | None:
    """Lower bound on the time of any placement under this exchange or any that tuning may choose, s, mean over layers.

    `None` where no placement fits or nothing bounds it, and for exchanges that leave traffic out, to
    which the bound does not apply.
    """
    if strategy.fits and not strategy.comparable:
        return None
    try:
        problem = placement_problem(inputs).under(exchange)
    except PlanError:
        return None
    bound = bound_if_any(problem, batches)
    return None if bound is None else float(bound.mean())


@dataclass
class SearchMetrics:
    """Metrics by search, for points of one run after another; strategies share what does not depend on them."""

    _run: ParametricRun | None = None
    _kept: dict[tuple, float] = field(default_factory=dict)

    def found(
        self, group: Group, numbers: Float[np.ndarray, "point key"], names: tuple[str, ...]
    ) -> list[dict[str, float]]:
        """These metrics of points of a group, by name, s; NaN where there is none."""
        if group.run is not self._run:
            self._run = group.run
            self._kept.clear()
        if "tuned" in names:
            self._tune(group.run, numbers)
        return [{name: self._one(name, group, row) for name in names} for row in numbers]

    def _tune(self, run: ParametricRun, numbers: Float[np.ndarray, "point key"]) -> None:
        """Tune the machines of these numbers that have not been tuned yet, and keep their times."""
        new = numbers[np.array([("tuned", *row) not in self._kept for row in numbers], bool)]
        for row, seconds in zip(new, tuned(run, new), strict=True):
            self._kept["tuned", *row] = float(seconds)

    def _one(self, name: str, group: Group, numbers: Float[np.ndarray, " key"]) -> float:
        if name == "tuned":
            return self._kept["tuned", *numbers]
        run, strategy = group.run, group.strategy
        key = name, group.exchange, strategy.fits, strategy.comparable, *numbers
        if key not in self._kept:
            exchange = run.inputs.exchange(group.exchange)
            found = bound_of(run.at(numbers), strategy, exchange, run.batches)
            self._kept[key] = np.nan if found is None else found
        return self._kept[key]


# A short tuning of every machine of one shape at once.

SHORT = TunerSettings(restarts=2, steps=100, batches_per_step=4)
BLOCK = 8  # machines of a compiled call

Shares = Float[np.ndarray, "machine layer expert node"]
Seconds = Float[np.ndarray, "machine layer"]


def tuned(run: ParametricRun, numbers: Float[np.ndarray, "machine key"]) -> Float[np.ndarray, " machine"]:
    """The least time that tuning and usual strategies reach at these numbers, s: a mean over layers and batches.

    NaN where no placement fits.
    """
    found = np.full(len(numbers), np.nan)
    for first in range(0, len(numbers), BLOCK):
        rows = numbers[first : first + BLOCK]
        padded = np.concatenate([rows, np.repeat(rows[-1:], BLOCK - len(rows), axis=0)])
        try:
            found[first : first + BLOCK] = _block(run, padded)[: len(rows)]
        except PlanError:  # memory is the same for all points of a run
            break
    return found


def _block(run: ParametricRun, numbers: Float[np.ndarray, "machine key"]) -> Float[np.ndarray, " machine"]:
    problems = [placement_problem(run.at(row)) for row in numbers]
    inputs, batches, names = run.inputs, run.batches, run.inputs.exchanges
    models = _Stack.of([problem.model for problem in problems])
    best = np.full((len(numbers), len(inputs.layer_ids)), np.inf)
    for strategy in run.strategies.values():
        share = np.broadcast_to(strategy.placement.share, (len(numbers), *strategy.placement.share.shape))
        for name in dict.fromkeys((strategy.placement.exchange[0], *names)) if strategy.comparable else ():
            best = np.minimum(best, _timed(models, share, batches, inputs.exchange(name)))
    even = np.full((len(problems), *problems[0].frequency.shape, inputs.num_nodes), 1 / inputs.num_nodes)
    under = {name: _timed(models, even, batches, gather).mean(axis=1) for name, gather in problems[0].gathers.items()}
    fastest = np.array([*under])[np.argmin([*under.values()], axis=0)]
    for chosen in np.unique(fastest):
        # Machines of another choice descend along, so that what a machine gets does not depend on those beside it.
        for share in _descended(problems, problems[0].gathers[chosen]):
            for name in names:
                seconds = _timed(models, share, batches, inputs.exchange(name))
                best = np.where((fastest == chosen)[:, None], np.minimum(best, seconds), best)
    return best.mean(axis=1)


class _Stack(NamedTuple):
    """Trees of all machines: leaves that differ, [machine, ...], and those that all have in common; `None` elsewhere.

    What is not batched, such as tables of links, is looked up much faster.
    """

    own: PyTree
    common: PyTree

    @classmethod
    def of(cls, trees: Sequence[PyTree]) -> "_Stack":
        """Of trees with the same structure."""
        differs = jax.tree.map(lambda *leaves: any(bool((leaf != leaves[0]).any()) for leaf in leaves), *trees)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
        return cls(eqx.filter(stacked, differs), eqx.filter(trees[0], differs, inverse=True))


def _timed(models: _Stack, shares: Shares, batches: Batch, exchange: AbstractExchange) -> Seconds:
    """Exact times of a plan on each machine, means over batches, s."""
    return np.asarray(_times(models, jnp.asarray(shares, jnp.float32), batches, exchange), float)


@eqx.filter_jit
def _times(
    models: _Stack, shares: Float[Array, "machine layer expert node"], batches: Batch, exchange: AbstractExchange
) -> Float[Array, "machine layer"]:
    def one(own: PyTree, share: Float[Array, "layer expert node"]) -> Float[Array, " layer"]:
        return evaluate(eqx.combine(own, models.common), share, batches, exchange).total.mean(axis=1)

    return jax.vmap(one)(models.own, shares)


def _descended(problems: Sequence[PlacementProblem], exchange: AbstractExchange) -> list[Shares]:
    """Rounded plans of all starts, by gradient descent under an exchange."""
    first = problems[0]
    under = [problem.under(exchange) for problem in problems]
    settings = affordable(SHORT, first)
    lands = _Stack.of([descent.landscape(each, settings.budget_spread, settings.learning_rate) for each in under])
    start = descent.start(first, settings.restarts, settings.seed)
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(problems), *leaf.shape)), start)
    ends = {
        "temperature": settings.sinkhorn_temperature,
        "width": settings.support_width,
        "max_temperature": settings.max_temperature,
    }
    for step in range(0, settings.steps, descent.SEGMENT):
        drawn = descent.segment_batches(under[0], settings.batches_per_step, step, settings.descent_tokens)
        schedule = descent.schedule(step, settings.steps, ends)
        state = _descend(lands, state, drawn, schedule)
    shares = np.asarray(_shares(lands, state, schedule.temperature[-1])).astype(float)
    least = LEAST_PART * descent.typical_part(first.frequency, first.num_nodes)
    shares = keep_hosts(shares, np.broadcast_to(least[:, None], shares.shape[:-1]))
    evaluator = Evaluator(first, settings.seed, StopSwitch())
    return [np.stack([evaluator.legal(each[:, at : at + 1])[:, 0] for each in shares]) for at in range(shares.shape[2])]


@eqx.filter_jit
def _descend(lands: _Stack, state: descent.Descent, batches: Batch, schedule: descent.Annealed) -> descent.Descent:
    def one(own: PyTree, state: descent.Descent) -> descent.Descent:
        return descent.descend(eqx.combine(own, lands.common), state, batches, schedule)[0]

    return jax.vmap(one)(lands.own, state)


@eqx.filter_jit
def _shares(
    lands: _Stack, state: descent.Descent, temperature: Float[Array, ""]
) -> Float[Array, "machine layer start expert node"]:
    def one(own: PyTree, state: descent.Descent) -> Float[Array, "layer start expert node"]:
        return descent.relaxed_shares(eqx.combine(own, lands.common), state.plans, temperature)

    return jax.vmap(one)(lands.own, state)
