"""The order in which streamed experts are loaded, by gradient: a relaxed permutation through the recurrence.

Experts take places, two to a group as in paired load. A transport plan between experts and places (Sinkhorn) is
descended on, sharpened, rounded to the nearest permutation, and polished by exchanging experts while that helps. What
it returns is scored by the exact model and is never worse than the orders that it starts from.
"""

from itertools import combinations
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from scipy.optimize import linear_sum_assignment

from jaxmoe.engine import LoadRules, SliceCosts
from jaxmoe.engine.streaming_time import SliceDemand, grouped, stream_seconds
from jaxmoe.hardware import Machine
from jaxmoe.relax import HardMax, SmoothMax, geometric, sinkhorn

WIDTH = 2  # experts of a group
SHARP = (1.0, 0.05)  # temperature of the plan, first and last
SMOOTH = 0.02  # of maxima, relative
START = 3.0  # log-weight of the order that a descent starts from


class Streams(NamedTuple):
    """Experts that are to be ordered: the machine, costs of their slices, and what each asks of every resource."""

    machine: Machine
    costs: SliceCosts
    experts: SliceDemand


class OrderResult(NamedTuple):
    """Places of experts, group after group, and seconds by the exact model: of what is returned, and of each start."""

    order: Int[np.ndarray, " place"]
    seconds: float
    starts: list[float]
    rounded: float  # the best after rounding, before polishing


def order_seconds(
    streams: Streams, plan: Float[Array, "place expert"], smooth: float | None = None
) -> Float[Array, ""]:
    """Time of experts in their places: a permutation, or with `smooth` a relaxed one."""
    places = plan.shape[0]
    padded = jnp.concatenate([plan, jnp.zeros((-places % WIDTH, plan.shape[1]))])
    members = padded.reshape(-1, WIDTH, plan.shape[1]).sum(axis=1)
    reduction = HardMax() if smooth is None else SmoothMax(jnp.asarray(smooth))
    groups, rules = grouped(streams.experts, members), LoadRules(matched=False)
    return stream_seconds(streams.machine, streams.costs, groups, rules, reduction)


def tuned_order(
    streams: Streams, starts: Int[np.ndarray, "start place"], steps: int = 60, rate: float = 0.2
) -> OrderResult:
    """Descend from each of the orders `starts`, round, polish, and take the best by the exact model."""
    experts = starts.shape[1]
    plans = _descended(streams, jax.nn.one_hot(jnp.asarray(starts), experts) * START, steps, rate)
    rounded = np.stack([linear_sum_assignment(-plan)[1] for plan in np.asarray(plans)])
    candidates = np.concatenate([starts, rounded])
    seconds = np.asarray(_scores(streams, jnp.asarray(candidates)), float)
    best = candidates[seconds.argmin()]
    polished, least = _polished(lambda orders: np.asarray(_scores(streams, jnp.asarray(orders)), float), best)
    return OrderResult(polished, least, seconds[: len(starts)].tolist(), float(seconds[len(starts) :].min()))


@eqx.filter_jit
def _scores(streams: Streams, orders: Int[Array, "order place"]) -> Float[Array, " order"]:
    """Seconds of each order by the exact model."""
    plans = jax.nn.one_hot(orders, orders.shape[1])
    return jax.vmap(lambda plan: order_seconds(streams, plan))(plans)


@eqx.filter_jit
def _descended(
    streams: Streams, logits: Float[Array, "start place expert"], steps: int, rate: float
) -> Float[Array, "start place expert"]:
    """Plans after so many steps of Adam from each start, ever sharper."""
    places = logits.shape[1]
    one = jnp.ones(places)
    optimiser = optax.adam(rate)

    def plan(logits: Array, temperature: Array) -> Array:
        return sinkhorn(logits / temperature, one, one)

    def loss(logits: Array, temperature: Array) -> Array:
        seconds = jax.vmap(lambda each: order_seconds(streams, plan(each, temperature), SMOOTH))(logits)
        return jnp.log(seconds).sum()

    def step(state, temperature):
        logits, moments = state
        slope = jnp.nan_to_num(jax.grad(loss)(logits, temperature))
        change, moments = optimiser.update(slope, moments)
        return (optax.apply_updates(logits, change), moments), None

    temperatures = jnp.asarray(geometric(*SHARP, np.linspace(0, 1, steps)), jnp.float32)
    (logits, _), _ = jax.lax.scan(step, (logits, optimiser.init(logits)), temperatures)
    return jax.vmap(lambda each: plan(each, jnp.asarray(SHARP[1])))(logits)


def _polished(score, order: Int[np.ndarray, " place"]) -> tuple[Int[np.ndarray, " place"], float]:
    """Exchange the two experts that help most, until none does."""
    pairs = np.array([(a, b) for a, b in combinations(range(len(order)), 2) if a // WIDTH != b // WIDTH])
    least = float(score(order[None])[0])
    while len(pairs):
        tried = np.repeat(order[None], len(pairs), axis=0)
        row = np.arange(len(pairs))
        tried[row, pairs[:, 0]], tried[row, pairs[:, 1]] = order[pairs[:, 1]], order[pairs[:, 0]]
        seconds = score(tried)
        if seconds.min() >= least * (1 - 1e-6):
            break
        order, least = tried[seconds.argmin()], float(seconds.min())
    return order, least
