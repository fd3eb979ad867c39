"""A bias on the router's logits as a part of what descends: tables by layer, node and expert, and what they lose."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxmoe.engine import Decisions, Layer, evaluate
from jaxmoe.engine.gating import GateBias
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.relax import SmoothMax
from jaxmoe.traces import Batch, over_batches
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.descent import SEGMENT, AbstractParameters, segment_batches
from jaxmoe.tune.machine.augmented_lagrangian import GATE, augmented, followed
from jaxmoe.tune.results import Plan

TEMPERATURE = 0.3  # of choices, in logits
RATE = 0.05  # length of a step without what went before, in logits
HALVINGS = 10  # in search of the largest factor
MAX_TEMPERATURE = 0.02  # of the smooth maximum, relative, where machine and plan are given
BATCHES, HELD = 8, 64  # of a step, and that choose among points
INEQUALITY = np.zeros(1, bool)

Table = Float[np.ndarray, "layer node expert"]


class Gated(AbstractParameters):
    """Parameters of a placement, and the bias of the gate beside them."""

    plan: AbstractParameters
    table: Float[Array, "*lead node expert"]

    def decisions(self, frequency, node_part, temperature, budget_spread) -> Decisions:
        decided = self.plan.decisions(frequency, node_part, temperature, budget_spread)
        return eqx.tree_at(lambda d: d.gate, decided, self.gate, is_leaf=lambda leaf: leaf is None)

    def typical_part(self, frequency, nodes):
        return self.plan.typical_part(frequency, nodes)

    @property
    def gate(self) -> GateBias:
        return GateBias(self.table, jnp.asarray(TEMPERATURE, self.table.dtype))


def lost(gate: GateBias, batches: Batch) -> Float[Array, ""]:
    """Gate mass that is lost, mean over the batches of a layer."""
    return over_batches(gate.lost, batches, gate.table.shape[-2]).mean()


@jax.jit
def lost_by_layer(table: Float[Array, "layer node expert"], batches: Batch) -> Float[Array, " layer"]:
    """Gate mass that every layer loses by exact choices; leaves of the batches are [layer, batch, ...]."""
    return jax.vmap(lambda table, batches: lost(GateBias(table), batches))(table, batches)


@jax.jit
def gated(table: Float[Array, "layer node expert"], batches: Batch) -> Batch:
    """Batches [layer, batch, ...] with the choices of the biased gate, and without logits."""
    over_layers = jax.vmap(lambda table, batches: jax.vmap(GateBias(table))(batches))
    return replace(over_layers(table, batches), logits=None)


def within(table: Table, batches: Batch, limit: float) -> Table:
    """The table times the largest factor up to 1 that loses at most the limit of gate mass, mean over layers."""

    def loses(factor: float) -> float:
        return float(lost_by_layer(jnp.asarray(factor * table, jnp.float32), batches).mean())

    if loses(1.0) <= limit:
        return table
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if loses(middle) <= limit else (low, middle)
    return low * table


# The bias that serves a plan on a machine.


class _State(NamedTuple):
    table: Float[Array, "layer node expert"]
    optimiser: optax.OptState
    multiplier: Float[Array, "1"]


def tuned_table(
    placed: PlacementProblem, share: Plan, exchanges: Sequence[str], start: Table, limit: float, steps: int, seed: int
) -> Table:
    """The bias for a plan [layer, expert, node] under the exchange of each layer, by descent from a start.

    Of points between none, the start and where descent ended, each scaled to keep the limit, the fastest by the exact
    model on batches that descent has not seen.
    """
    ended, seeds = np.array(start, np.float32), np.random.default_rng([seed, 3])
    for rows, exchange in _by_exchange(placed, exchanges):
        model, part = replace(placed.model, exchange=exchange), jnp.asarray(share[rows], jnp.float32)
        begin = jnp.asarray(ended[rows])
        state = _State(begin, GATE.init(begin), jnp.zeros(1))
        for _ in range(0, steps, SEGMENT):
            drawn = segment_batches(placed, BATCHES, int(seeds.integers(2**62)))
            drawn = jax.tree.map(lambda leaf, at=rows: leaf[:, at], drawn)
            state = _segment(model, part, jnp.asarray(limit), state, drawn)
        ended[rows] = np.asarray(state.table)
    held = placed.draw(HELD, int(seeds.integers(2**62)))
    points = [0 * ended, start, start + (ended - start) / 2, ended]
    kept = [within(each, held, limit) for each in points]
    return kept[int(np.argmin([_seconds(placed, share, exchanges, gated(each, held)) for each in kept]))]


def _by_exchange(placed: PlacementProblem, exchanges: Sequence[str]) -> Iterator[tuple[np.ndarray, AbstractExchange]]:
    """Rows of the layers that share an exchange."""
    for name in dict.fromkeys(exchanges):
        rows = np.flatnonzero([name == other for other in exchanges])
        yield rows, build_exchange(name, placed.model.machine.topology)


def _seconds(placed: PlacementProblem, share: Plan, exchanges: Sequence[str], batches: Batch) -> float:
    """Exact objective, mean over layers."""
    made = np.zeros(len(share))
    for rows, exchange in _by_exchange(placed, exchanges):
        some = jax.tree.map(lambda leaf, at=rows: leaf[at], batches)
        times = evaluate(placed.model, jnp.asarray(share[rows], jnp.float32), some, exchange).total
        made[rows] = placed.aim(times)
    return float(made.mean())


@eqx.filter_jit
def _segment(
    model: Layer,
    share: Float[Array, "layer expert node"],
    limit: Float[Array, ""],
    state: _State,
    batches: Batch,
) -> _State:
    """Some steps, each on batches of its own, leaves [step, layer, batch, ...]."""

    def lagrangian(table, multiplier, batches):
        def layer(table, share, batches):
            gate = GateBias(table, jnp.asarray(TEMPERATURE))
            decisions, reduction = Decisions(share, gate=gate), SmoothMax(jnp.asarray(MAX_TEMPERATURE))
            seconds = over_batches(lambda batch: model.time(decisions, batch, reduction).total, batches, share.shape[1])
            return seconds.mean(), lost(gate, batches)

        seconds, away = jax.vmap(layer)(table, share, batches)
        excess = away.mean(keepdims=True) / limit - 1
        return jnp.log(seconds.mean()) + augmented(excess, multiplier, INEQUALITY), excess

    def step(state: _State, batches: Batch) -> tuple[_State, None]:
        slope, excess = jax.grad(lagrangian, has_aux=True)(state.table, state.multiplier, batches)
        change, optimiser = GATE.update(slope, state.optimiser)
        return _State(state.table - RATE * change, optimiser, followed(excess, state.multiplier, INEQUALITY)), None

    return jax.lax.scan(step, state, batches)[0]
