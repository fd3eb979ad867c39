"""Methods that decide in every iteration, as init/step pairs, and their roll-out by one scan."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.hardware import Machine
from jaxmoe.engine import Decisions, LayerModel, LayerTime
from jaxmoe.network import AbstractExchange
from jaxmoe.relax import AbstractReduction, AbstractSupport
from jaxmoe.traces.batches import Batch

# What methods have in common: a state, a step from iteration to iteration, and what a step decides.

State = Any  # a pytree of arrays, of the method's own kind


class AbstractMethod(eqx.Module):
    """Decides for every layer of a step: one batch of tokens that goes through all layers.

    A pytree of what was fitted, whose `init` and `step` work under `jit`, `vmap` and `lax.scan`.
    """

    @abstractmethod
    def init(self, machine: Machine) -> State:
        """What is remembered before the first step."""

    @abstractmethod
    def step(self, machine: Machine, state: State, tokens: Batch, last: LayerTime) -> tuple[State, Decisions]:
        """The state after a step, and what was decided for it; leaves of tokens and decisions are [layer, ...].

        `last` are the times [layer] of the step before, 0 before the first. What is decided of a layer before it has
        gated its tokens depends on these, on the state, and on the tokens of the layers before alone; where its tokens
        go also on their gating there.
        """


class StaticPlan(AbstractMethod):
    """The same placement in every step."""

    share: Float[Array, "layer expert node"]

    def init(self, machine: Machine) -> State:
        return ()

    def step(self, machine: Machine, state: State, tokens: Batch, last: LayerTime) -> tuple[State, Decisions]:
        return state, Decisions(self.share)


# A method run over steps: it decides, what it decided is priced, and it sees the times when it decides again.


class LayerExchanges(eqx.Module):
    """The exchange of every layer: each of `exchanges` serves the layers in its entry of `rows`."""

    exchanges: tuple[AbstractExchange, ...]
    rows: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def from_names(cls, names: Sequence[str], build: Callable[[str], AbstractExchange]) -> "LayerExchanges":
        """From the name of every layer's exchange; layers of one name share what `build` makes of it."""
        known = tuple(dict.fromkeys(names))
        rows = tuple(tuple(row for row, other in enumerate(names) if other == name) for name in known)
        return cls(tuple(build(name) for name in known), rows)


def whole(decisions: Decisions) -> Decisions:
    """Keep all that was decided."""
    return decisions


@eqx.filter_jit
def rollout(
    method: AbstractMethod,
    model: LayerModel,
    steps: Batch,
    exchanges: LayerExchanges | None = None,
    reduction: AbstractReduction | None = None,
    support: AbstractSupport | None = None,
    keep: Callable[[Decisions], Any] = whole,
) -> tuple[State, LayerTime, Any]:
    """Run `method` over steps whose leaves are [layer, step, ...], as `sample_batches` gives them.

    Returns the last state, the times [step, layer] and the decisions [step, layer, ...], or what `keep` takes of them:
    shares of many steps are large. Without `exchanges` all layers use the model's, or what the decisions name. Exact
    unless `reduction` and `support` are given, as in `LayerModel`.
    """
    in_turn = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), steps)
    first = jax.tree.map(lambda leaf: leaf[0], in_turn)

    def price(decisions: Decisions, tokens: Batch) -> LayerTime:
        return _price(model, decisions, tokens, exchanges, reduction, support)

    def exact(decisions: Decisions, tokens: Batch) -> LayerTime:
        return _price(model, decisions, tokens, exchanges, reduction, None)

    def step(carry: tuple[State, LayerTime], tokens: Batch) -> tuple[tuple[State, LayerTime], tuple[LayerTime, Any]]:
        state, last = carry
        state, decisions = method.step(model.machine, state, tokens, last)
        times = price(decisions, tokens)
        return (state, times), (times, keep(decisions))

    start = method.init(model.machine)
    before = _no_times(lambda last: step((start, last), first)[1][0], model, exact, first)
    (state, _), (times, kept) = jax.lax.scan(step, (start, before), in_turn)
    return state, times, kept


def _price(
    model: LayerModel,
    decisions: Decisions,
    tokens: Batch,
    exchanges: LayerExchanges | None,
    reduction: AbstractReduction | None,
    support: AbstractSupport | None,
) -> LayerTime:
    """Times of all layers of a step, [layer]."""

    def priced(model: LayerModel, decisions: Decisions, tokens: Batch) -> LayerTime:
        def layer(decisions: Decisions, tokens: Batch) -> LayerTime:
            return model.time(decisions, tokens, reduction, support)

        return jax.vmap(layer)(decisions, tokens)

    if exchanges is None:
        return priced(model, decisions, tokens)
    parts: list[LayerTime] = []
    order: list[int] = []
    for exchange, rows in zip(exchanges.exchanges, exchanges.rows, strict=True):
        some = jax.tree.map(lambda leaf, at=rows: leaf[np.array(at)], (decisions, tokens))
        parts.append(priced(replace(model, exchange=exchange), *some))
        order += rows
    back = np.argsort(order)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[back], *parts)


def _no_times(
    times_of: Callable[[LayerTime], LayerTime],
    model: LayerModel,
    price: Callable[[Decisions, Batch], LayerTime],
    tokens: Batch,
) -> LayerTime:
    """Zeros in place of the times before the first step. Only shapes are computed.

    `times_of` has the times of a step from those of the step before. A plan of one expert has times of the same shapes,
    but for a movement.
    """
    layers, nodes = tokens.experts.shape[0], model.machine.num_nodes
    plain = jax.eval_shape(price, Decisions(jnp.zeros((layers, 1, nodes))), tokens)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(times_of, plain))
