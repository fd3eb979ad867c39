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
            model, drafted = self.model, self.deployment.drafted
            passes = [(1, self._pass(load, load, len(model.moe_layer_ids), model.num_dense_layers))]
            last = load._replace(queries=1.0)
            if drafted:  # as `ModelStep` has it: all tokens pass once, for their keys and values
                passes.append((1, self._pass(load, last, 1, 0)))
            if drafted > 1:
                last = last._replace(prefilled=0.0)
                passes.append((drafted - 1, self._pass(last, last, 1, 0)))
            self._known[load] = price_in_turn(passes)
        return self._known[load]

    def _pass(self, load: StepLoad, heads: StepLoad, routed: int, dense: int) -> LayerTime:
        """So many layers with routed experts and without, then the head for what is answered of another load."""
        given, ended = (StepLoad(*map(jnp.asarray, each)) for each in (load, heads))
        tokens, answered = max(round(float(given.tokens)), 1), max(float(ended.answered), 1.0)
        context = context_of(self.model, load)
        layer, even = self.layers.time(tokens, context), self.beside(context)
        timed = attends(layer)
        if self.other is not None:
            assert self.layers.on is not None
            layer, even = self.layers.on(self.other, tokens, context), replace(even, machine=self.other)
        beside = self._beside(even, timed, routed, dense)
        asked = {name: part for name, part in beside.items() if float(part.flops_per_token) > 0}
        counts = {name: jnp.asarray(answered if name == HEAD else tokens, jnp.float32) for name in asked}
        times = [even_time(even.machine, asked, counts)] if asked else []
        return price_in_turn([(routed, layer), *((1, each) for each in times)])

    def _beside(self, even: EvenParts, timed: bool, routed: int, dense: int) -> dict[str, EvenPart]:
        """What layers do not have; attention of dense layers alone where it is `timed` with the others."""
        model = self.model
        attention = dense if timed else routed + dense
        shared = 0 if self.layers.with_shared else routed
        return {
            f"{ATTENTION}{DENSE}" if timed else ATTENTION: even.attention.times(attention / model.num_layers),
            "dense": even.dense.times(dense / max(model.num_dense_layers, 1)),
            "shared": even.shared.times(shared / len(model.moe_layer_ids)),
            HEAD: self.head,
        }


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
