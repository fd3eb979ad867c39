"""Three searches for the mapping: annealing, Bayesian, and a relaxed permutation."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from scipy.optimize import linear_sum_assignment

from jaxmoe.relax import SmoothMax, geometric, sinkhorn
from jaxmoe.tune.descent import soft_hosts
from jaxmoe.tune.link_balance.mapping import BestOrder, Budget, Mapping, Question, scorer

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

Objective = Callable[[Int[np.ndarray, "order node"]], Float[np.ndarray, " order"]]


def bayesian(question: Question, seed: int, budget: Budget, objective: Objective | None = None) -> Mapping:
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
            "Bayesian search over mappings needs optuna, which is not installed; pip install 'jaxmoe[bayes]', or "
            "choose the link method annealing or sinkhorn"
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
    support = soft_hosts(question.frequency, nodes, now["width"])
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
