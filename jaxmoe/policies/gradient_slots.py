"""Slots tuned by gradient through the model of a layer, with the cost of moving weights in the objective.

Beyond moentwine, whose Algorithm 1 looks at loads alone. Here a slot may hold any of the most popular experts or none,
relaxed to parts of them. The objective is what the model tells: the time of experts, with the weights that each copy
makes a device read, or of the all-to-all if that is longer, and what moving costs. Descend, round, score exactly.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxmoe.latency.counts import CountModel
from jaxmoe.placement.slots import EMPTY
from jaxmoe.policies.balancing import AbstractRule
from jaxmoe.policies.migration import Slots
from jaxmoe.policies.shadow_slots import fill_shadow_slots, kept_in_place
from jaxmoe.relax import AbstractReduction, HardMax, SmoothMax

LIKELY = 3.0  # log-weight at the start of what a slot holds in the plan that descent starts from
WARMEST, COLDEST = 0.2, 0.02  # temperatures of the smooth maximum, from the first step to the last
LEARNING_RATE = 0.3


class GradientSlots(AbstractRule):
    """Starts from Algorithm 1 and from what is resident; of both ends and both starts the best by the exact model.

    The objective is the seconds of a layer over `horizon` iterations, plus `hop_seconds` for each hop of an expert that
    has to move. The first `native` slots keep what they hold; shadow slots choose from the `candidates` experts of the
    highest loads.
    """

    model: CountModel
    distance: Float[Array, "node node2"]  # hops
    horizon: Float[Array, ""]
    hop_seconds: Float[Array, ""]
    native: int = eqx.field(static=True)
    candidates: int = eqx.field(static=True, default=128)
    steps: int = eqx.field(static=True, default=40)

    def __call__(self, expected: Float[Array, "layer expert"], resident: Slots) -> Slots:
        return jax.lax.map(lambda given: self._layer(*given), (expected, resident), batch_size=8)

    def _layer(self, loads: Float[Array, " expert"], resident: Int[Array, "node slot"]) -> Int[Array, "node slot"]:
        fixed, shadow = resident[:, : self.native], resident[:, self.native :]
        _, top = jax.lax.top_k(loads, min(self.candidates, loads.shape[0]))
        far = self._way(fixed, shadow, top)
        greedy = fill_shadow_slots(loads, fixed, shadow, self.distance, "nearest")
        starts = jnp.stack([greedy, shadow])
        ends = jax.vmap(lambda start: self._descended(start, loads, fixed, top, far))(starts)
        plans = jnp.concatenate([starts, ends])
        exact = jax.vmap(lambda plan: self._cost(_chosen(plan, top), loads, fixed, top, far, HardMax()))(plans)
        best = plans[jnp.argmin(exact)]
        return jnp.concatenate([fixed, kept_in_place(best, shadow)], axis=1)

    def _way(
        self, fixed: Int[Array, "node native"], shadow: Int[Array, "node slot"], top: Int[Array, " candidate"]
    ) -> Float[Array, "node candidate"]:
        """Hops that a candidate has to come to every node; 0 where it is resident."""
        held = (jnp.concatenate([fixed, shadow], axis=1)[:, :, None] == top).any(axis=1)
        return jnp.where(held[:, None], self.distance[:, :, None], jnp.inf).min(axis=0)

    def _descended(
        self,
        start: Int[Array, "node slot"],
        loads: Float[Array, " expert"],
        fixed: Int[Array, "node native"],
        top: Int[Array, " candidate"],
        far: Float[Array, "node candidate"],
    ) -> Int[Array, "node slot"]:
        optimiser = optax.adam(LEARNING_RATE)
        weights = LIKELY * _chosen(start, top)

        def step(state, temperature: Float[Array, ""]):
            weights, memory = state

            def cost(weights: Float[Array, "node slot choice"]) -> Float[Array, ""]:
                parts = jax.nn.softmax(weights, axis=-1)
                return self._cost(parts, loads, fixed, top, far, SmoothMax(temperature))

            # Relative to the cost, so that steps do not depend on units.
            slope = jax.grad(lambda weights: jnp.log(cost(weights)))(weights)
            change, memory = optimiser.update(slope, memory)
            return (optax.apply_updates(weights, change), memory), None

        temperatures = jnp.geomspace(WARMEST, COLDEST, self.steps)
        (weights, _), _ = jax.lax.scan(step, (weights, optimiser.init(weights)), temperatures)
        best = jnp.argmax(weights, axis=-1)
        picked = jnp.where(best < top.shape[0], top[jnp.minimum(best, top.shape[0] - 1)], EMPTY)
        native = (picked[:, :, None] == fixed[:, None, :]).any(axis=2)  # its native expert again is no copy
        return jnp.where(native, EMPTY, picked)

    def _cost(
        self,
        parts: Float[Array, "node slot choice"],
        loads: Float[Array, " expert"],
        fixed: Int[Array, "node native"],
        top: Int[Array, " candidate"],
        far: Float[Array, "node candidate"],
        reduction: AbstractReduction,
    ) -> Float[Array, ""]:
        """Seconds of shadow slots that hold parts of candidates; the last choice is nothing."""
        held = parts[:, :, :-1].sum(axis=1)  # [node, candidate]
        copies = 1 + held.sum(axis=0)
        each = loads.at[top].set(loads[top] / copies)
        native = fixed != EMPTY
        rows = jnp.where(native, each[fixed], 0).sum(axis=1) + held @ each[top]
        read = (native * jnp.minimum(each[fixed], 1)).sum(axis=1) + held @ jnp.minimum(each[top], 1)
        computing, sending = self.model.computing(rows, read), sum(self.model.travelling(rows))
        layer = reduction(jnp.concatenate([computing, sending]))
        return self.horizon * layer + self.hop_seconds * (held * far).sum()


def _chosen(shadow: Int[Array, "node slot"], top: Int[Array, " candidate"]) -> Float[Array, "node slot choice"]:
    """1 at the candidate that a slot holds, or at the last place for nothing, or for what is no candidate."""
    held = (shadow[:, :, None] == top).astype(jnp.float32)
    return jnp.concatenate([held, 1 - held.sum(axis=2, keepdims=True)], axis=2)
