"""Token buffering: requests that wait at a layer whose expert would be loaded for few tokens.

Source: expert_streaming_fse_dp IV-A and Algorithm 2. A request that waits keeps its activations and its gating, and
continues at the same layer in the next iteration, with other requests' tokens. Slack limits the delay of a request: it
may be deferred once in so many forward passes. Newly arriving requests take the places of those that wait, as far
as there are spare ones; without any, a place stays empty for an iteration.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.traces import Batch


class Buffered(NamedTuple):
    """Forward passes that every layer serves in every iteration.

    A pass is identified by the iteration and the place of the batch in which it began.
    """

    served: Bool[Array, "step layer request"]  # whether the request passes the layer
    began: Int[Array, "step layer request"]  # the iteration in which its pass began
    place: Int[Array, "step layer request"]
    finished: Int[Array, " step"]  # forward passes that are finished in the iteration


class _Requests(NamedTuple):
    layer: Int[Array, " request"]  # where each goes on, -1 between passes
    began: Int[Array, " request"]
    place: Int[Array, " request"]
    idle_since: Int[Array, " request"]
    forward: Int[Array, " request"]  # passes since the timer last rose, C_fw
    timer: Int[Array, " request"]  # T_QoS


class Buffering(eqx.Module):
    """Algorithm 2: a request with time left waits where one of its experts has fewer than `least` tokens (theta_min).

    A `slack` of 0.1 lets every request wait once in ten forward passes (N_threshold = 1 / slack), and 0 never. There
    are `spare` requests more than places; those that are between passes take places in the order in which they came.
    Requests that came `together` earn their time in the same iterations; others count forward passes from different
    ones.
    """

    least: Float[Array, ""]
    slack: Float[Array, ""]
    spare: int = eqx.field(static=True, default=0)
    together: bool = eqx.field(static=True, default=True)

    @eqx.filter_jit
    def __call__(self, steps: Batch, num_experts: int, dies: int) -> Batch:
        """Steps [layer, step, ...] in which requests wait. Activations stay where the pass began."""
        made = self.passes(steps.experts, num_experts)
        served, began, place = (jnp.moveaxis(each, 1, 0) for each in made[:3])  # [layer, step, request]
        at = (jnp.arange(len(served))[:, None, None], began, place)
        experts = steps.experts[at]
        return Batch(
            experts=experts,
            token_draw=jnp.zeros(served.shape),
            draw=jnp.zeros(experts.shape),
            weight=served.astype(jnp.float32),
            source=steps.sources(dies)[at],
        )

    def passes(self, experts: Int[Array, "layer step place top_k"], num_experts: int) -> Buffered:
        """The passes that every layer serves, of the choices of those that may begin, one in every step and place."""
        layers, steps, places, _ = experts.shape
        requests = places + self.spare
        often = jnp.where(self.slack > 0, jnp.round(1 / jnp.maximum(self.slack, 1e-6)), steps + 1).astype(jnp.int32)

        def layer_step(state, layer):
            asked, waiting = state
            here = ~waiting & (asked.layer >= 0) & (asked.layer <= layer)
            chosen = experts[layer, asked.began, asked.place]
            counts = jax.nn.one_hot(chosen, num_experts).sum(axis=1) * here[:, None]
            cold = (counts.sum(axis=0)[chosen] < self.least).any(axis=1)
            defer = here & cold & (asked.timer > 0)
            after = asked._replace(layer=jnp.where(defer, layer, asked.layer), timer=asked.timer - defer)
            return (after, waiting | defer), (here & ~defer, asked.began, asked.place)

        def step(asked, now):
            # Places go to those between passes, the longest so first.
            order = jnp.argsort(jnp.where(asked.layer < 0, asked.idle_since, steps + 1), stable=True)
            rank = jnp.zeros(requests, jnp.int32).at[order].set(jnp.arange(requests, dtype=jnp.int32))
            begins = (asked.layer < 0) & (rank < places)
            asked = asked._replace(
                layer=jnp.where(begins, 0, asked.layer),
                began=jnp.where(begins, now, asked.began),
                place=jnp.where(begins, rank, asked.place),
            )
            (asked, waiting), seen = jax.lax.scan(
                layer_step, (asked, jnp.zeros(requests, bool)), jnp.arange(layers, dtype=jnp.int32)
            )
            done = ~waiting & (asked.layer >= 0)
            forward = asked.forward + done
            rises = forward >= often
            after = asked._replace(
                layer=jnp.where(done, -1, asked.layer),
                idle_since=jnp.where(done, now + 1, asked.idle_since),
                forward=jnp.where(rises, 0, forward),
                timer=asked.timer + rises,
            )
            return after, (*seen, done.sum())

        zero = jnp.zeros(requests, jnp.int32)
        forward = zero if self.together else jnp.arange(requests, dtype=jnp.int32) % often
        start = _Requests(zero - 1, zero, zero, zero, forward, zero)
        _, seen = jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))
        return Buffered(*seen)
