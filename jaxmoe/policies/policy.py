"""What runtime policies have in common: a state, a step from iteration to iteration, and what a step decides."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmoe.traces.batches import Batch

State = Any  # a pytree of arrays, of the policy's own kind


class Decision(eqx.Module):
    """What a policy changes for a batch in a placement: the batch, the shares and this say where all work is done.

    A choice with `served` -1 is computed as the expert is placed, any other whole at that node.
    """

    broadcast: Bool[Array, "*lead expert"]  # whole at every node
    served: Int[Array, "*lead token top_k"]


class AbstractPolicy(eqx.Module):
    """Decides for every layer of an iteration: one batch of tokens going through all layers.

    A pytree of what was fitted, with an `init` and a `step` that work under `jit`, `vmap` and `lax.scan`.
    """

    @abstractmethod
    def init(self) -> State:
        """What is remembered before the first iteration."""

    @abstractmethod
    def step(self, state: State, batch: Batch) -> tuple[State, Decision]:
        """The state after an iteration, and what was decided for it; leaves of both are [layer, ...].

        What is decided of a layer before it has gated its tokens depends on the state and on the layers before
        alone; where its tokens go also on their gating there.
        """


@eqx.filter_jit
def replay(policy: AbstractPolicy, batches: Batch) -> Decision:
    """Decide for one iteration after the other, from `init`.

    Leaves are [layer, batch, ...], in and out, as `sample_batches` gives them: the batches are the iterations.
    """
    iterations = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), batches)
    _, decisions = jax.lax.scan(lambda state, batch: policy.step(state, batch), policy.init(), iterations)
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), decisions)
