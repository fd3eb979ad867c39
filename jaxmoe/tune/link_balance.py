"""Link balance: which logical cluster lives on which node of the machine, scored by the exact model (hd_moe IV-C2).

Three searches for the mapping: annealing, Bayesian, and a relaxed permutation.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from scipy.optimize import linear_sum_assignment

from jaxmoe.engine import Layer
from jaxmoe.extras import install_command
from jaxmoe.relax import AbstractReduction, AbstractSupport, SmoothMax, geometric, sinkhorn
from jaxmoe.traces import Batch, over_batches
from jaxmoe.tune.descent import soft_hosts, typical_part
from jaxmoe.tune.objective import Objective
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.results import History
from jaxmoe.tune.settings import StopSwitch

Order = Int[np.ndarray, " node"]
Score = Callable[[Int[np.ndarray, "order node"]], np.ndarray]  # seconds of orders


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
    def identity(cls, score: Score, nodes: int) -> "BestOrder":
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


def scorer(question: Question, width: int = 1) -> Score:
    """The exact objective as a function of orders, for searches that run outside JAX.

    So many at a time are scored, the last group filled up with repeats: groups of one size compile once.
    """

    def score(orders: Int[np.ndarray, "order node"]) -> np.ndarray:
        groups = -(-len(orders) // width)
        filled = np.resize(orders, (groups * width, orders.shape[1]))
        return np.asarray(costs(question, jnp.asarray(filled)), float)[: len(orders)]

    return score


# Simulated annealing of the mapping: many chains that swap two clusters, scored by the exact model.

CHAINS = 4
SWAPS = 25  # swaps of a compiled call; the time limit is checked in between
COLDNESS = (1e2, 3e3)  # 1 / temperature, first and last, relative to a layer's time


def annealing(question: Question, seed: int, budget: Budget) -> Mapping:
    """Search with swaps. A trial is an order that is scored; all chains start from the identity."""
    nodes = question.share.shape[1]
    best, trials, key = BestOrder.identity(scorer(question), nodes), 0, jr.key(seed)
    state = _start(best.order, best.seconds)
    while (spent := budget.spent(trials)) < 1:
        coldness = jnp.asarray(geometric(*COLDNESS, spent), jnp.float32)
        state = _anneal(question, state, coldness, jr.fold_in(key, trials))
        trials += CHAINS * SWAPS
        best.see(trials, np.asarray(state.best), np.asarray(state.best_seconds, float))
    return best.mapping()


class _Chains(eqx.Module):
    """Where every chain is, and the best it has seen."""

    order: Int[Array, "*chain node"]
    seconds: Float[Array, "*chain"]
    best: Int[Array, "*chain node"]
    best_seconds: Float[Array, "*chain"]


def _start(order: Int[np.ndarray, " node"], seconds: float) -> _Chains:
    orders, times = jnp.tile(jnp.asarray(order), (CHAINS, 1)), jnp.full(CHAINS, seconds, jnp.float32)
    return _Chains(orders, times, orders, times)


@eqx.filter_jit
def _anneal(question: Question, chains: _Chains, coldness: Float[Array, ""], key: Key[Array, ""]) -> _Chains:
    """One segment of swaps on every chain."""
    nodes = chains.order.shape[1]

    def swap(chain: _Chains, pair: Int[Array, "2"], luck: Float[Array, ""]) -> _Chains:
        order = chain.order.at[pair].set(chain.order[pair[::-1]])
        seconds = question.cost(question.share[:, order])
        taken = jnp.log(luck) < (chain.seconds - seconds) / seconds * coldness
        better = seconds < chain.best_seconds
        return _Chains(
            order=jnp.where(taken, order, chain.order),
            seconds=jnp.where(taken, seconds, chain.seconds),
            best=jnp.where(better, order, chain.best),
            best_seconds=jnp.where(better, seconds, chain.best_seconds),
        )

    # All luck at once, outside the loop: see `local_search.improve`.
    first, second, taken = jr.split(key, 3)
    one = jr.randint(first, (SWAPS, CHAINS), 0, nodes)
    other = (one + jr.randint(second, (SWAPS, CHAINS), 1, nodes)) % nodes
    luck = jr.uniform(taken, (SWAPS, CHAINS), minval=1e-12)
    pairs = jnp.stack([one, other], axis=-1)
    chains, _ = jax.lax.scan(lambda state, given: (jax.vmap(swap)(state, *given), None), chains, (pairs, luck))
    return chains


# Bayesian optimisation of the mapping (hd_moe IV-C2): tree-structured Parzen estimators over random keys.
#
# Every cluster has a key in [0, 1]; the order of the keys is the order of the clusters. So every point is a legal
# mapping, and a small change of a key moves one cluster a few nodes. The estimators are of all keys jointly: one for
# each key alone was slower and found less. Needs optuna.

GROUP = 8  # orders asked for, then scored in one go
STARTUP_TRIALS = 32  # random ones, before the estimators have something to go by


def bayesian(question: Question, seed: int, budget: Budget, objective: Score | None = None) -> Mapping:
    """Search with optuna. A trial is an order that is scored.

    `objective` scores orders in place of the exact model, as an event simulator would: an array [order, node] to
    seconds [order]. Raises `ImportError` with the remedy where optuna is missing.
    """
    optuna = _optuna()
    score = scorer(question, GROUP) if objective is None else objective
    nodes = question.share.shape[1]
    best, trials = BestOrder.identity(score, nodes), 0
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
    """Imports Optuna and turns its logging off. Raises `ImportError` where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ImportError(
            "Bayesian search over mappings needs optuna, which is not installed; "
            f"{install_command('bayes', 'optuna')}, or choose the link method annealing or sinkhorn"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


# The mapping by gradient descent: a doubly stochastic matrix in the place of the permutation.
#
# Permutation = Sinkhorn(logits / temperature) with every margin 1. Shares times it are the plan of the relaxed model;
# as the temperature falls the matrix nears a permutation, to which it is rounded by linear assignment.

RESTARTS = 4
STEPS = 10  # steps of a compiled call; the time limit is checked in between
LEARNING_RATE = 0.1
NOISE = 0.5  # of the first logits
ENDS = {"temperature": (1.0, 0.05), "width": (0.3, 0.03), "max_temperature": (0.1, 0.02)}


def descent(question: Question, seed: int, budget: Budget) -> Mapping:
    """Search by descent from several random starts. A trial is a step of all of them."""
    nodes = question.share.shape[1]
    score = scorer(question, RESTARTS)
    best, steps = BestOrder.identity(score, nodes), 0
    scale = jnp.asarray(best.seconds, jnp.float32)
    logits = NOISE * jr.normal(jr.key(seed), (RESTARTS, nodes, nodes))
    state = logits, jax.vmap(optax.scale_by_adam().init)(logits)
    while (spent := budget.spent(steps)) < 1:
        now = {name: jnp.asarray(geometric(*ends, spent), jnp.float32) for name, ends in ENDS.items()}
        state, permutations = _descend(question, state, now, scale)
        steps += STEPS
        orders = np.stack([linear_sum_assignment(p.T, maximize=True)[1] for p in np.asarray(permutations)])
        best.see(steps, orders, score(orders))
    return best.mapping()


def _permutation(logits: Float[Array, "cluster node"], temperature: Float[Array, ""]) -> Float[Array, "cluster node"]:
    ones = jnp.ones(logits.shape[0], logits.dtype)
    return sinkhorn(logits / temperature, ones, ones)


@eqx.filter_jit
def _descend(question: Question, state, now: dict[str, Float[Array, ""]], scale: Float[Array, ""]):
    """One segment of descent on every restart. Returns the state and the permutations [restart, cluster, node]."""
    nodes = question.share.shape[1]
    support = soft_hosts(typical_part(question.frequency, nodes), now["width"])
    reduction = SmoothMax(now["max_temperature"])

    def relaxed(logits: Float[Array, "cluster node"]) -> Float[Array, ""]:
        share = question.share @ _permutation(logits, now["temperature"])
        return question.cost(share, reduction, support) / scale

    def step(state, _):
        logits, optimiser = state
        direction, optimiser = jax.vmap(optax.scale_by_adam().update)(jax.vmap(jax.grad(relaxed))(logits), optimiser)
        return (logits - LEARNING_RATE * direction, optimiser), None

    state, _ = jax.lax.scan(step, state, length=STEPS)
    return state, jax.vmap(lambda logits: _permutation(logits, now["temperature"]))(state[0])


METHODS = {"bayesian": bayesian, "annealing": annealing, "sinkhorn": descent}
