"""Searches for a mapping: gradient descent on a relaxed one with rounding and swaps, and simulated annealing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from mapping_problem import MappingProblem, exact_seconds
from scipy.optimize import linear_sum_assignment

from jaxmoe.placement.token_layout import TokenLayout
from jaxmoe.relax import AbstractReduction, HardMax, SmoothMax, geometric, sinkhorn

TEMPERATURE = (1.0, 0.2)  # of the transport plan, first and last
MAX_TEMPERATURE = (0.3, 0.02)  # of the smooth maximum
RATE = 0.3  # of a step, relative to the temperature
POLISHED = 8  # restarts that the local search goes on with
SWAPS = 512  # of a round of the local search, where there are more
ONCE = {"xla_backend_optimization_level": 0}  # what runs once is done sooner than XLA optimises code for it
COLDNESS = (1e1, 1e3)  # 1 / temperature of annealing, first and last, relative to the time

Orders = Int[Array, "restart slot"]


@dataclass(frozen=True)
class MappingResult:
    """The best mapping found, its exact seconds, and the costs of restarts as descended, as rounded and as polished."""

    layout: TokenLayout
    seconds: float
    relaxed: Float[np.ndarray, " restart"]
    rounded: Float[np.ndarray, " restart"]
    polished: Float[np.ndarray, " kept"]


def tune_mapping(
    problem: MappingProblem,
    seed: int = 0,
    restarts: int = 64,
    steps: int = 300,
    rounds: int = 40,
    starts: Sequence[TokenLayout] = (),
) -> MappingResult:
    """Descend from random starts, round, swap devices while that helps, and score exactly: the best of all restarts.

    A random start knows nothing of the mesh. Layouts in `starts` join the local search as they are, so the result is
    no slower than they. `rounds` limits that search, each round of which takes the best swap of many.
    """
    nodes = problem.counts.shape[1]
    logits = jr.normal(jr.key(seed), (restarts, nodes, nodes))
    progress = np.linspace(0, 1, steps)
    cooling, hardening = (
        jnp.asarray(geometric(*ends, progress), jnp.float32) for ends in (TEMPERATURE, MAX_TEMPERATURE)
    )
    # A constant in the program would be a matrix of equal entries, whose products XLA's CPU compiler gets wrong.
    even = jnp.full((nodes, *problem.shape), 1 / nodes)
    logits, relaxed = _descend(problem, logits, even, cooling, hardening, jnp.asarray(RATE))
    plans = np.asarray(_plans(logits, jnp.asarray(TEMPERATURE[1])))
    rounded = jnp.asarray(np.stack([linear_sum_assignment(-plan.T)[1] for plan in plans]))
    seconds = _costs(problem, rounded)
    # Only the best go on: swaps take longer than the descent.
    few = rounded[np.argsort(np.asarray(seconds), kind="stable")[:POLISHED]]
    given = [jnp.asarray(layout.ring.ravel(), few.dtype)[None] for layout in starts]
    orders, polished = polish(problem, jnp.concatenate([*given, few]), seed, rounds)
    return _result(problem, orders, relaxed, seconds, polished)


def anneal_mapping(problem: MappingProblem, seed: int = 0, chains: int = 16, swaps: int = 5000) -> MappingResult:
    """Simulated annealing over swaps of two devices, scored by the exact cost, from random mappings."""
    nodes = problem.counts.shape[1]
    start = jnp.stack([jr.permutation(key, nodes) for key in jr.split(jr.key(seed), chains)])
    coldness = jnp.asarray(geometric(*COLDNESS, np.linspace(0, 1, swaps)), jnp.float32)
    first = _costs(problem, start)
    orders, seconds = _anneal(problem, start, coldness, jr.key(seed + 1))
    return _result(problem, orders, first, first, seconds)


def _result(
    problem: MappingProblem,
    orders: Int[Array, "kept slot"],
    relaxed: Float[Array, " restart"],
    rounded: Float[Array, " restart"],
    polished: Float[Array, " kept"],
) -> MappingResult:
    """The best by the exact time, of the few that the cost ranks first."""
    few = np.argsort(np.asarray(polished), kind="stable")[:4]
    layouts = [problem.layout(np.asarray(orders[index])) for index in few]
    exact = [exact_seconds(problem, layout) for layout in layouts]
    best = int(np.argmin(exact))
    costs = (np.asarray(each, float) for each in (relaxed, rounded, polished))
    return MappingResult(layouts[best], exact[best], *costs)


# Descent: the transport plan between devices and slots is Sinkhorn's, and everything is annealed.


@partial(jax.jit, compiler_options=ONCE)
def _plans(logits: Float[Array, "restart node slot"], temperature: Float[Array, ""]) -> Float[Array, "r n s"]:
    ones = jnp.ones(logits.shape[1])
    return jax.vmap(lambda one: sinkhorn(one / temperature, ones, ones))(logits)


@eqx.filter_jit
def _descend(
    problem: MappingProblem,
    logits: Float[Array, "restart node slot"],
    even_places: Float[Array, "node group member"],
    temperature: Float[Array, " step"],
    smoothness: Float[Array, " step"],
    rate: Float[Array, ""],
) -> tuple[Float[Array, "restart node slot"], Float[Array, " restart"]]:
    """All restarts at once. Returns the last logits and their relaxed seconds."""
    nodes, ones = logits.shape[1], jnp.ones(logits.shape[1])
    even = problem.cost(even_places, HardMax())
    adam = optax.scale_by_adam()

    def relaxed(logits: Float[Array, "node slot"], temperature: Array, smoothness: Array) -> Float[Array, ""]:
        places = sinkhorn(logits / temperature, ones, ones).reshape(nodes, *problem.shape)
        return problem.cost(places, SmoothMax(smoothness)) / even

    def step(state, given):
        def one(logits, moments):
            value, gradient = jax.value_and_grad(relaxed)(logits, *given)
            direction, moments = adam.update(gradient, moments)
            # The plan depends on logits / temperature: steps that shrink with it stay as long for the plan.
            return logits - rate * given[0] * direction, moments, value

        *state, values = jax.vmap(one)(*state)
        return tuple(state), values

    (logits, _), values = jax.lax.scan(step, (logits, jax.vmap(adam.init)(logits)), (temperature, smoothness))
    return logits, values[-1] * even


# Exact costs of mappings, and swaps of two devices.


@eqx.filter_jit(compiler_options=ONCE)  # type: ignore[call-overload]  # an option of JAX
def _costs(problem: MappingProblem, orders: Orders) -> Float[Array, " restart"]:
    return jax.vmap(lambda order: problem.cost(problem.places_of(order), HardMax()))(orders)


def polish(problem: MappingProblem, orders: Orders, seed: int, rounds: int) -> tuple[Orders, Float[Array, " restart"]]:
    """Take the best of many swaps of two devices, again and again, until a round finds none that helps."""
    key, before = jr.key(seed), np.full(len(orders), np.inf)
    for count in range(rounds):
        orders, seconds = _best_swaps(problem, orders, jr.fold_in(key, count))
        if not (np.asarray(seconds) < before * (1 - 1e-6)).any():
            break
        before = np.asarray(seconds)
    return orders, seconds


@eqx.filter_jit
def _best_swaps(
    problem: MappingProblem, orders: Orders, key: Key[Array, ""]
) -> tuple[Orders, Float[Array, " restart"]]:
    """The best swap of every restart, or none."""
    nodes = orders.shape[1]
    pairs = jnp.asarray(np.argwhere(np.triu(np.ones((nodes, nodes)), 1)))
    if len(pairs) > SWAPS:
        pairs = jr.choice(key, pairs, (SWAPS,), replace=False)

    def best(order: Int[Array, " slot"]) -> tuple[Int[Array, " slot"], Float[Array, ""]]:
        swapped = jax.vmap(lambda pair: order.at[pair].set(order[pair[::-1]]))(pairs)
        candidates = jnp.concatenate([order[None], swapped])

        ranks = jax.vmap(lambda order: problem.cost(problem.places_of(order), _Ranked()))(candidates)
        chosen = candidates[jnp.argmin(ranks)]
        return chosen, problem.cost(problem.places_of(chosen), HardMax())

    return jax.lax.map(best, orders)


class _Ranked(AbstractReduction):
    """The largest value and a little of a smooth maximum, which decides among equals."""

    def __call__(self, values: Float[Array, "*batch items"]) -> Float[Array, "*batch"]:
        return HardMax()(values) + 1e-2 * SmoothMax(jnp.asarray(0.1))(values)


@eqx.filter_jit
def _anneal(
    problem: MappingProblem, orders: Orders, coldness: Float[Array, " swap"], key: Key[Array, ""]
) -> tuple[Orders, Float[Array, " restart"]]:
    """Swaps on all chains at once; returns the best that each has seen."""
    chains, nodes = orders.shape
    swaps = len(coldness)
    keys = jr.split(key, 3)
    one = jr.randint(keys[0], (swaps, chains), 0, nodes)
    other = (one + jr.randint(keys[1], (swaps, chains), 1, nodes)) % nodes
    luck = jnp.log(jr.uniform(keys[2], (swaps, chains), minval=1e-12))

    def cost(order: Int[Array, " slot"]) -> Float[Array, ""]:
        return problem.cost(problem.places_of(order), HardMax())

    def swap(chain, pair, luck, coldness):
        order, seconds, best, best_seconds = chain
        tried = order.at[pair].set(order[pair[::-1]])
        new = cost(tried)
        taken = luck < (seconds - new) / seconds * coldness
        better = new < best_seconds
        order, seconds = jnp.where(taken, tried, order), jnp.where(taken, new, seconds)
        return order, seconds, jnp.where(better, tried, best), jnp.where(better, new, best_seconds)

    def step(state, given):
        return jax.vmap(swap, in_axes=(0, 0, 0, None))(state, *given), None

    start = jax.vmap(cost)(orders)
    given = (jnp.stack([one, other], axis=-1), luck, coldness)
    (_, _, best, seconds), _ = jax.lax.scan(step, (orders, start, orders, start), given)
    return best, seconds
