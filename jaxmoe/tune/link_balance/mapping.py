"""Shared parts of the searches over mappings of clusters to nodes: problem, budget, scores and result."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.engine import Layer
from jaxmoe.relax import AbstractReduction, AbstractSupport
from jaxmoe.traces import Batch, over_batches
from jaxmoe.tune.objective import Objective
from jaxmoe.tune.problem import History, PlacementProblem
from jaxmoe.tune.settings import StopSwitch

Order = Int[np.ndarray, " node"]


class Question(NamedTuple):
    """One layer whose clusters are to be mapped to nodes: its plan, and what scores a mapping."""

    model: Layer
    share: Float[Array, "expert cluster"]
    frequency: Float[Array, " expert"]
    batches: Batch  # leaves [batch, ...], or merged
    aim: Objective

    def cost(
        self,
        share: Float[Array, "expert node"],
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> Float[Array, ""]:
        """Objective of a plan, s: exact, or relaxed by a `reduction` or a `support`."""
        seconds = over_batches(
            lambda batch: self.model(share, batch, reduction=reduction, support=support).total, self.batches
        )
        return self.aim(seconds)


def question_of(
    problem: PlacementProblem, share: Float[np.ndarray, "expert cluster"], layer: int, batches: Batch
) -> Question:
    """The mapping of a layer's plan, given by its row in the trace; leaves of `batches` are [layer, batch, ...]."""
    return Question(
        model=problem.model,
        share=jnp.asarray(share, jnp.float32),
        frequency=jnp.asarray(problem.frequency[layer], jnp.float32),
        batches=jax.tree.map(lambda leaf: leaf[layer], batches),
        aim=problem.aim,
    )


@dataclass(frozen=True)
class Mapping:
    """The best mapping found: node n is cluster `order[n]`, so its plan is `share[:, order]`."""

    order: Order
    seconds: float  # exact objective on the batches of the search
    history: History  # the best so far; `step` counts what the method calls a trial


@dataclass
class Budget:
    """Limits of a search: `seconds`, `trials`, or both. `trials` alone give a result that no computer's speed changes.

    Each method defines its trial. Seconds count from the end of the first trials, which may include compiling.
    `report` is called with the part that is spent. Raises `ValueError` without a limit above 0.
    """

    seconds: float | None = None
    trials: int | None = None
    stop: StopSwitch = field(default_factory=StopSwitch)
    report: Callable[[float], None] = lambda part: None
    _begun: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        given = [limit for limit in (self.seconds, self.trials) if limit is not None]
        if not given or min(given) <= 0:
            raise ValueError(
                f"a search over mappings has {self.seconds} seconds and {self.trials} trials; give at least one of "
                "them, above 0"
            )

    def spent(self, trials: int) -> float:
        """The part of the budget that is spent after so many trials; 1 is the end."""
        if self._begun is None and trials:
            self._begun = time.monotonic()
        elapsed = 0.0 if self._begun is None else time.monotonic() - self._begun
        by_time = 0.0 if self.seconds is None else elapsed / self.seconds
        by_trials = 0.0 if self.trials is None else trials / self.trials
        part = min(max(by_time, by_trials), 1.0)
        self.report(part)
        return 1.0 if self.stop.reason else part


@dataclass
class BestOrder:
    """The best order seen so far. It begins with the identity, so no search ends with a worse order."""

    order: Order
    seconds: float
    history: History = field(default_factory=History)

    @classmethod
    def identity(cls, score: Callable[[Int[np.ndarray, "order node"]], np.ndarray], nodes: int) -> "BestOrder":
        order = np.arange(nodes)
        best = cls(order, float(score(order[None])[0]))
        best.history.add(0, np.asarray(best.seconds))
        return best

    def see(self, step: int, orders: Int[np.ndarray, "order node"], seconds: Float[np.ndarray, " order"]) -> None:
        """Takes note of orders and their scores, s, at the end of a step."""
        first = int(np.argmin(seconds))
        if seconds[first] < self.seconds:
            self.order, self.seconds = np.asarray(orders[first]), float(seconds[first])
        self.history.add(step, np.asarray(self.seconds))

    def mapping(self) -> Mapping:
        return Mapping(self.order, self.seconds, self.history)


@eqx.filter_jit
def costs(question: Question, orders: Int[Array, "order node"]) -> Float[Array, " order"]:
    """Exact objective of every order, s."""
    return jax.vmap(lambda order: question.cost(question.share[:, order]))(orders)


def scorer(question: Question, width: int = 1) -> Callable[[Int[np.ndarray, "order node"]], np.ndarray]:
    """The exact objective as a function of orders, for searches that run outside JAX.

    So many at a time are scored, the last group filled up with repeats: groups of one size compile once.
    """

    def score(orders: Int[np.ndarray, "order node"]) -> np.ndarray:
        groups = -(-len(orders) // width)
        filled = np.resize(orders, (groups * width, orders.shape[1]))
        return np.asarray(costs(question, jnp.asarray(filled)), float)[: len(orders)]

    return score
