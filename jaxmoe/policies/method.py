"""What methods have in common: a state, a step from iteration to iteration, and what a step decides."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from jaxmoe.hardware import Machine
from jaxmoe.latency import Decisions, LayerTime
from jaxmoe.traces.batches import Batch

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
