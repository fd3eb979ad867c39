"""Copies of experts by gradient through the model of a layer: how many each has and where, together.

Every slot of a rank holds parts of experts, a softmax, so every relaxed placement has the right number of slots
everywhere; a rank has a copy as likely as any of its slots does. Experts with less than one copy are charged for.
Temperatures of the softmax and of the smooth maximum fall together. `jaxmoe.tune.replica_placement` rounds the result
and compares it by the exact model.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxmoe.engine.copies import ReplicaModel
from jaxmoe.placement.slot_plan import filled
from jaxmoe.placement.slots import EMPTY
from jaxmoe.relax import AbstractReduction, SmoothMax, geometric
from jaxmoe.tune.objective import objective

STEPS = 100
LEARNING_RATE = 0.3
LIKELY = 5.0  # log-weight at the start of what a slot holds
SOFTMAX, MAXIMUM = (1.0, 0.2), (0.1, 0.01)  # temperatures, from the first step to the last
MISSING = 0.05  # charge for a missing expert, in times of the logarithm of the cost


class Mixing(eqx.Module):
    """Objective of copies, s: the mean time over batches mixed with the 95th percentile, and the cost of moving.

    The time of moving from `before` is spread over `horizon` steps.
    """

    p95_weight: Float[Array, ""]
    horizon: Float[Array, ""]  # infinite where moving costs nothing

    def __call__(
        self,
        model: ReplicaModel,
        held: Float[Array, "expert node"],
        loads: Float[Array, "batch expert"],
        before: Float[Array, "expert node"],
        reduction: AbstractReduction | None = None,
    ) -> Float[Array, ""]:
        seconds = model(held, loads, reduction).total
        return objective(seconds, self.p95_weight) + model.moving(held, before, reduction) / self.horizon


@eqx.filter_jit
def descended(
    model: ReplicaModel,
    mixing: Mixing,
    loads: Float[Array, "layer batch expert"],
    starts: Int[Array, "layer start node slot"],
    before: Float[Array, "layer expert node"],
    steps: int = STEPS,
) -> Float[Array, "layer start expert node"]:
    """Probability that a node has a copy of each expert at the end of descents from `starts`."""
    progress = np.linspace(0, 1, steps)
    cooling = [jnp.asarray(geometric(*pair, progress), jnp.float32) for pair in (SOFTMAX, MAXIMUM)]
    optimiser = optax.adam(LEARNING_RATE)
    experts = loads.shape[2]

    def descent(start: Int[Array, "node slot"], loads: Array, before: Array) -> Float[Array, "expert node"]:
        def step(state, temperatures):
            weights, memory = state
            softmax, maximum = temperatures

            def cost(weights: Float[Array, "node slot expert"]) -> Float[Array, ""]:
                held = likely_copies(weights / softmax)
                missing = jnp.maximum(1 - held.sum(axis=1), 0).sum()
                # Relative, so that steps do not depend on units.
                return jnp.log(mixing(model, held, loads, before, SmoothMax(maximum))) + MISSING * missing

            change, memory = optimiser.update(jax.grad(cost)(weights), memory)
            return (optax.apply_updates(weights, change), memory), None

        weights = LIKELY * jax.nn.one_hot(start, experts)
        (weights, _), _ = jax.lax.scan(step, (weights, optimiser.init(weights)), tuple(cooling))
        return likely_copies(weights / cooling[0][-1])

    def layer(given: tuple[Array, Array, Array]) -> Array:
        loads, starts, before = given
        return jax.lax.map(lambda start: descent(start, loads, before), starts)

    return jax.lax.map(layer, (loads, starts, before))


def likely_copies(weights: Float[Array, "node slot expert"]) -> Float[Array, "expert node"]:
    """Probability that a node has each expert in any of its slots."""
    return 1 - jnp.prod(1 - jax.nn.softmax(weights, axis=-1), axis=1).T


def rounded(held: Float[np.ndarray, "layer expert node"], slots: int) -> Int[np.ndarray, "layer slot"]:
    """Whole copies: first one of every expert, then those with most weight, each where it weighs most and fits.

    No rank has an expert twice, where ranks have no more slots than there are experts.
    """
    layers, experts, nodes = held.shape
    per_rank = slots // nodes
    chosen = np.full((layers, nodes, per_rank), EMPTY)
    for row in range(layers):
        taken, used = np.zeros((experts, nodes), bool), np.zeros(nodes, int)

        def take(expert: int, node: int, row=row, taken=taken, used=used) -> None:
            chosen[row, node, used[node]] = expert
            taken[expert, node] = True
            used[node] += 1

        for expert in np.argsort(-held[row].max(axis=1), kind="stable").tolist():
            take(expert, int(np.where(used < per_rank, held[row, expert], -1).argmax()))
        for place in np.argsort(-held[row], axis=None, kind="stable").tolist():
            expert, node = divmod(place, nodes)
            if used[node] < per_rank and not taken[expert, node]:
                take(expert, node)
    return filled(chosen.reshape(layers, slots), experts, nodes)
