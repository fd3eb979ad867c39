"""A stage of a layer: a name, the stages before it, and a demand of the machine."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import equinox as eqx
import jax

from jaxmoe.engine.demand import AbstractDemand, Server, Usage
from jaxmoe.engine.times import EXPERTS
from jaxmoe.hardware import Machine
from jaxmoe.relax import AbstractReduction

Split = Literal["tokens", "even", "whole"]
"""How micro-batches split a stage: by the tokens of each, into equal parts, or not at all."""
Charge = Literal["stage", "movement", "background", "hidden"]
"""How a stage counts in the total: `stage` is a stage of the layer. The others are movements of weights: `movement`
runs before the stages, `background` on idle links, and `hidden` is reported but not added to the total."""


class Stage(eqx.Module):
    """One stage of a layer; `before` are the names of the stages that come before it in its block.

    Layers that are alike are one block, whose stages are those of one of them and `repeat` how many they are.
    """

    name: str = eqx.field(static=True)
    demand: AbstractDemand
    before: tuple[str, ...] = eqx.field(static=True, default=())
    block: str = eqx.field(static=True, default=EXPERTS)
    split: Split = eqx.field(static=True, default="tokens")
    charge: Charge = eqx.field(static=True, default="stage")
    repeat: int = eqx.field(static=True, default=1)

    def priced(self, machine: Machine, reduction: AbstractReduction) -> "Priced":
        """The stage with the usage of all its layers in place of its demand."""
        usage, server = self.demand.usage(machine, reduction), self.demand.server
        if self.repeat > 1:
            usage = jax.tree.map(lambda leaf: self.repeat * leaf, usage)
        return Priced(self.name, usage, server, self.before, self.block, self.split, self.charge, self.repeat)


class Priced(eqx.Module):
    """A stage with what it takes of each resource."""

    name: str = eqx.field(static=True)
    usage: Usage
    server: Server = eqx.field(static=True)
    before: tuple[str, ...] = eqx.field(static=True)
    block: str = eqx.field(static=True)
    split: Split = eqx.field(static=True)
    charge: Charge = eqx.field(static=True)
    repeat: int = eqx.field(static=True, default=1)

    def priced(self, machine: Machine, reduction: AbstractReduction) -> "Priced":
        """The stage as it is: what is the same in every step is priced once."""
        return self


Stages = tuple[Stage | Priced, ...]


def chained(stages: Iterable[Stage | Priced]) -> Stages:
    """Stages one after the other: each comes after the one before it of the same block."""
    last: dict[str, str] = {}
    made: list[Stage | Priced] = []
    for stage in stages:
        before = (last[stage.block],) if stage.block in last else ()
        made.append(replace(stage, before=before))
        last[stage.block] = stage.name
    return tuple(made)
