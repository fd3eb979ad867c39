"""A step of a whole model on any machine: MoE layers as a method decided them, and what every token passes beside them.

All is timed by the engine: layers under their plan and exchange, the rest as work that all nodes share evenly. Where a
method has an attention of its own, as in tensor-parallel groups of a wafer, that of MoE layers is in their time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.engine import EvenPart, EvenParts, LayerTime, Serial, Stage, price, price_in_turn
from jaxmoe.engine.stage import chained
from jaxmoe.engine.times import ATTENTION
from jaxmoe.hardware.machine import Machine
from jaxmoe.models import MoEModel
from jaxmoe.relax import HardMax
from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.step import DENSE, AbstractStep, StepLoad

BESIDE, HEAD = "beside", "head"


class Context(NamedTuple):
    """Tokens of its context that a token attends to, and whose keys and values are read from memory for it."""

    tokens: float
    cached: float


class SystemLayers(NamedTuple):
    """MoE layers of a run of a system: the mean time of one, for so many tokens of a step in a context.

    Attention is in it where its block has any time, and shared experts where `with_shared`.
    """

    name: str
    time: Callable[[int, Context], LayerTime]
    with_shared: bool = False
    on: Callable[[Machine, int, Context], LayerTime] | None = None  # on another machine, which JAX may trace


@dataclass(frozen=True, eq=False)
class MachineStep(AbstractStep):
    """A model on all nodes of a machine; a step has whole tokens, one at least. `head` is that of an answered token."""

    model: MoEModel
    deployment: Deployment
    layers: SystemLayers
    beside: Callable[[Context], EvenParts]
    head: EvenPart
    told: tuple[str, ...] = ()
    other: Machine | None = None  # in place of its own, as in `at`
    _known: dict[StepLoad, LayerTime] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        return list(self.told)

    @property
    def machine(self) -> Machine:
        """All its nodes and links."""
        return self.beside(Context(1.0, 1.0)).machine if self.other is None else self.other

    def at(self, machine: Machine) -> "MachineStep":
        """The step on another machine of the same form, which JAX may trace."""
        return replace(self, other=machine, _known={})

    def time(self, batch: StepLoad) -> LayerTime:
        rows = np.broadcast_arrays(*(np.asarray(number, float) for number in batch))
        times = [self._row(StepLoad(*row)) for row in zip(*(row.ravel().tolist() for row in rows), strict=True)]

        def shaped(*leaves: Any) -> Array:
            return jnp.stack([*map(jnp.asarray, leaves)]).reshape((*rows[0].shape, *np.shape(leaves[0])))

        return jax.tree.map(shaped, *times)

    def _row(self, load: StepLoad) -> LayerTime:
        if load not in self._known:
            self._known[load] = price_in_turn([(each.times, self._time(each)) for each in self.passes(load)])
        return self._known[load]

    def passes(self, load: StepLoad) -> list["Pass"]:
        """Passes of a step: through the model, then of the layer that drafts tokens, as `ModelStep` has them.

        Its first pass has all tokens, for their keys and values, each further one what it drafted last.
        """
        model, drafted = self.model, self.deployment.drafted
        found = [Pass(1, load, load, len(model.moe_layer_ids), model.num_dense_layers)]
        if drafted:
            found.append(Pass(1, load, load._replace(queries=1.0), 1, 0))
        if drafted > 1 and load.decoding:
            last = load._replace(queries=1.0, prefilled=0.0)
            found.append(Pass(drafted - 1, last, last, 1, 0))
        return found

    def _time(self, each: "Pass") -> LayerTime:
        context = context_of(self.model, each.load)
        layer, even = self.layers.time(each.tokens, context), self.beside(context)
        parts = self.parts_beside(each, attends(layer))
        if self.other is not None:
            assert self.layers.on is not None
            layer, even = self.layers.on(self.other, each.tokens, context), replace(even, machine=self.other)
        works = {name: part for name, (part, _) in parts.items()}
        counts = {name: jnp.asarray(count, jnp.float32) for name, (_, count) in parts.items()}
        times = [even_time(even.machine, works, counts)] if parts else []
        return price_in_turn([(each.routed, layer), *((1, time) for time in times)])

    def parts_beside(self, each: "Pass", timed: bool) -> dict[str, tuple[EvenPart, float]]:
        """What the layers of a pass do not have, and of how many tokens it is.

        Where attention is `timed` with layers that have experts, it is that of the other ones alone.
        """
        model, even = self.model, self.beside(context_of(self.model, each.load))
        attention = each.dense if timed else each.routed + each.dense
        shared = 0 if self.layers.with_shared else each.routed
        parts = {
            f"{ATTENTION}{DENSE}" if timed else ATTENTION: even.attention.times(attention / model.num_layers),
            "dense": even.dense.times(each.dense / max(model.num_dense_layers, 1)),
            "shared": even.shared.times(shared / len(model.moe_layer_ids)),
            HEAD: self.head,
        }
        asked = {name: part for name, part in parts.items() if float(part.flops_per_token) > 0}
        return {name: (part, each.answered if name == HEAD else float(each.tokens)) for name, part in asked.items()}


class Pass(NamedTuple):
    """So many times the tokens of a load go through layers, `routed` with experts and `dense` ones, then the head.

    That has those that are answered of `heads`.
    """

    times: int
    load: StepLoad
    heads: StepLoad
    routed: int
    dense: int

    @property
    def tokens(self) -> int:
        """Whole tokens that pass the layers, one at least."""
        return max(round(float(StepLoad(*map(jnp.asarray, self.load)).tokens)), 1)

    @property
    def answered(self) -> float:
        """Tokens that pass the head, one at least."""
        return max(float(StepLoad(*map(jnp.asarray, self.heads)).answered), 1.0)


def attends(time: LayerTime) -> bool:
    """Whether attention is in the time of a layer."""
    return any(float(np.mean(time.stages[name])) > 0 for name in dict(time.blocks).get(ATTENTION, ()))


@eqx.filter_jit
def even_time(machine: Machine, parts: Mapping[str, EvenPart], tokens: Mapping[str, Float[Array, ""]]) -> LayerTime:
    """Time of parts one after the other, each of so many tokens, that all nodes of a machine share evenly."""
    works = {name: part.work(machine.num_nodes, tokens[name]) for name, part in parts.items()}
    stages = chained(Stage(name, work, block=BESIDE) for name, work in works.items())
    return price(machine, Serial(), stages, HardMax())


def context_of(model: MoEModel, load: StepLoad) -> Context:
    """The context of a step's mean token.

    A decoding sequence reads its keys and values once for all its queries. A prompt is read in chunks: a token attends
    to half of it on average, and a chunk reads what came before it and its own keys and values once.
    """
    own = load.decoding * load.queries
    if not own + load.prefilled:
        return Context(1.0, 1.0)
    chunk = max(min(load.prefilled, load.prompt), 1.0)
    known = (load.context, model.context_read(load.context) / load.queries)
    new = (load.prompt / 2, model.context_read((load.prompt + chunk) / 2) / chunk)
    tokens, cached = ((own * a + load.prefilled * b) / (own + load.prefilled) for a, b in zip(known, new, strict=True))
    return Context(tokens, cached)
