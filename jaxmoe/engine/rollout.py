"""Methods that decide in every step, and their rollout by one scan: decide, price, see the times, decide again."""

import abc
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmoe.compiling import UNFUSED
from jaxmoe.engine.layer import AbstractLayer
from jaxmoe.engine.times import LayerTime
from jaxmoe.hardware import Machine
from jaxmoe.network import AbstractExchange
from jaxmoe.placement.exchange import Exchange
from jaxmoe.relax import AbstractReduction, AbstractSupport

State = Any  # a pytree of arrays, of the method's own kind
Steps = Any  # what passes the layers, leaves [step, layer, ...]: batches of tokens, or counts


class AbstractMethod(eqx.Module):
    """Decides for every layer of a step: one batch of tokens that goes through all layers.

    A pytree of what was fitted, whose `init` and `step` work under `jit`, `vmap` and `lax.scan`. `precision` is what
    its arithmetic needs, `differentiable` whether gradients pass its decisions. A `memoryless` method decides every
    step by itself, from its tokens alone: steps are then timed side by side.
    """

    precision: ClassVar[Literal["float32", "float64"]] = "float32"
    differentiable: ClassVar[bool] = True
    memoryless: ClassVar[bool] = False
    given: ClassVar[tuple[str, ...]] = ("share",)  # fields that a run gives: the plan, where a method has it

    def prepare(self, layer: AbstractLayer, steps: Steps) -> tuple["AbstractMethod", Steps]:
        """The method and the steps as they enter the scan: whatever is worked out once, outside it."""
        return self, steps

    @abc.abstractmethod
    def init(self, machine: Machine) -> State:
        """Returns the method's state before the first step, a pytree of arrays; `()` for a method without state."""

    @abc.abstractmethod
    def step(self, machine: Machine, state: State, tokens: PyTree, last: LayerTime) -> tuple[State, PyTree]:
        """The state after a step, and what was decided for it; leaves of tokens and decisions are [layer, ...].

        `last` are the times [layer] of the step before, 0 before the first. What is decided of a layer before it has
        gated its tokens depends on these, on the state, and on the tokens of the layers before alone; where its tokens
        go also on their gating there.
        """


class LayerExchanges(eqx.Module):
    """The exchange of every layer: each of `exchanges` serves the layers in its entry of `rows`."""

    exchanges: tuple[AbstractExchange, ...]
    rows: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def from_names(
        cls, names: Sequence[Exchange | str], build: Callable[[Exchange | str], AbstractExchange]
    ) -> "LayerExchanges":
        """From the name of every layer's exchange, or one with a table; equal ones share what `build` makes of it."""
        known = tuple(dict.fromkeys(names))
        rows = tuple(tuple(row for row, other in enumerate(names) if other == name) for name in known)
        return cls(tuple(build(name) for name in known), rows)


class Rollout(NamedTuple):
    """The last state of a method, times [step, layer], and decisions [step, layer, ...], or what was kept of them."""

    state: State
    time: LayerTime
    kept: PyTree


Keep = Callable[[PyTree, LayerTime], PyTree]


def everything(decisions: PyTree, time: LayerTime) -> tuple[LayerTime, PyTree]:
    """Keep times and all that was decided."""
    return time, decisions


def rollout(
    method: AbstractMethod,
    layer: AbstractLayer,
    steps: Steps,
    exchanges: LayerExchanges | None = None,
    reduction: AbstractReduction | None = None,
    support: AbstractSupport | None = None,
    keep: Keep = everything,
) -> Rollout:
    """Run `method` over steps whose leaves are [layer, step, ...], as `sample_batches` gives them.

    `keep` takes of the decisions and the times of a step, leaves [layer, ...], what is told: shares of many steps are
    large. Without `exchanges` all layers use the layer's own, or what the decisions name. Exact unless `reduction` and
    `support` are given.
    """
    with jax.enable_x64(True) if method.precision == "float64" else contextlib.nullcontext():
        method, steps = method.prepare(layer, steps)
        given = (method, _Pricing(layer, exchanges, reduction, support), steps, keep)
        # Options are of a whole compilation. Inside of another one's function, whatever is made is traced.
        inside = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((given, jnp.zeros(()))))
        return (_rolled_inside if inside else _rolled_alone)(*given)


class _Pricing(eqx.Module):
    """Prices all layers of a step."""

    layer: AbstractLayer
    exchanges: LayerExchanges | None
    reduction: AbstractReduction | None
    support: AbstractSupport | None

    def __call__(self, decisions: PyTree, tokens: PyTree) -> LayerTime:
        """Times [layer]."""

        def priced(layer: AbstractLayer, decisions: PyTree, tokens: PyTree) -> LayerTime:
            def one(given: tuple[PyTree, PyTree]) -> LayerTime:
                return layer.time(*given, self.reduction, self.support)

            if layer.in_turn(tokens):
                return jax.lax.map(one, (decisions, tokens))
            return jax.vmap(one)((decisions, tokens))

        if self.exchanges is None:
            return priced(self.layer, decisions, tokens)
        parts: list[LayerTime] = []
        order: list[int] = []
        for exchange, rows in zip(self.exchanges.exchanges, self.exchanges.rows, strict=True):
            some = jax.tree.map(lambda leaf, at=rows: leaf[np.array(at)], (decisions, tokens))
            parts.append(priced(self.layer.under(exchange), *some))
            order += rows
        back = np.argsort(order)
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[back], *parts)


SIDE_BY_SIDE = 256  # layers of steps that do not depend on each other, timed at once


def _side_by_side(method: AbstractMethod, price: _Pricing, steps: Steps, keep: Keep) -> Rollout:
    """In chunks of steps, equal ones, so that a step is compiled once."""
    machine, nothing = price.layer.machine, cast(LayerTime, None)
    state = method.init(machine)

    def step(tokens: PyTree) -> PyTree:
        _, decisions = method.step(machine, state, tokens, nothing)
        return keep(decisions, price(decisions, tokens))

    layers, count = jax.tree.leaves(steps)[0].shape[:2]
    one = jax.tree.map(lambda leaf: leaf[:, 0], steps)
    chunks = count if price.layer.in_turn(one) else min(count, -(-count * layers // SIDE_BY_SIDE))
    each = -(-count // chunks)
    chosen = np.minimum(np.arange(chunks * each), count - 1).reshape(chunks, each)
    cut = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1)[chosen], steps)
    kept = jax.lax.map(jax.vmap(step), cut)
    return Rollout(state, *jax.tree.map(lambda leaf: leaf.reshape(len(chosen.ravel()), *leaf.shape[2:])[:count], kept))


def _scan(method: AbstractMethod, price: _Pricing, steps: Steps, keep: Keep) -> Rollout:
    in_turn = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), steps)
    first = jax.tree.map(lambda leaf: leaf[0], in_turn)
    layer = price.layer

    def step(carry: tuple[State, LayerTime], tokens: PyTree) -> tuple[tuple[State, LayerTime], PyTree]:
        state, last = carry
        state, decisions = method.step(layer.machine, state, tokens, last)
        times = price(decisions, tokens)
        return (state, times), keep(decisions, times)

    start = method.init(layer.machine)
    # Only shapes are computed. Blank decisions have times of the same shapes, but for movements.
    exact = replace(price, support=None)
    blank = jax.eval_shape(lambda tokens: exact(layer.blank(tokens), tokens), first)
    shapes = jax.eval_shape(lambda last: step((start, last), first)[0][1], blank)
    before = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (state, _), kept = jax.lax.scan(step, (start, before), in_turn)
    return Rollout(state, *kept)


def _rolled(method: AbstractMethod, price: _Pricing, steps: Steps, keep: Keep) -> Rollout:
    return (_side_by_side if method.memoryless else _scan)(method, price, steps, keep)


_rolled_alone = eqx.filter_jit(_rolled, compiler_options=UNFUSED)  # type: ignore[call-overload]  # an option of JAX
_rolled_inside = eqx.filter_jit(_rolled)
