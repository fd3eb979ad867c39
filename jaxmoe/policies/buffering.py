"""Token buffering: requests that wait at a layer whose expert would be loaded for few tokens.

Source: expert_streaming_fse_dp IV-A and Algorithm 2. A request that waits keeps its activations and its gating, and
goes on from the same layer in the next iteration, with other requests' tokens. What it may cost a request is slack:
once in so many forward passes it may be deferred.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Buffered(NamedTuple):
    """What passes every layer in every iteration."""

    served: Bool[Array, "step layer request"]  # whether the request passes the layer
    of_pass: Int[Array, "step layer request"]  # which of its forward passes that is, from 0
    finished: Int[Array, " step"]  # forward passes that are finished in the iteration


class _Requests(NamedTuple):
    layer: Int[Array, " request"]  # where each goes on
    of_pass: Int[Array, " request"]
    forward: Int[Array, " request"]  # passes since the timer last rose, C_fw
    timer: Int[Array, " request"]  # T_QoS


def buffer_requests(
    experts: Int[Array, "layer step request top_k"],
    num_experts: int,
    least: Float[Array, ""],
    slack: Float[Array, ""],
) -> Buffered:
    """Run Algorithm 2: `experts` are the choices of every request's forward passes, one in every iteration.

    A request with time left waits where one of its experts has fewer than `least` tokens (theta_min). A `slack` of 0.1
    lets every request wait once in ten forward passes (N_threshold = 1 / slack), and 0 never.
    """
    layers, steps, requests, _ = experts.shape
    often = jnp.where(slack > 0, jnp.round(1 / jnp.maximum(slack, 1e-6)), steps + 1).astype(jnp.int32)
    who = jnp.arange(requests)

    def layer_step(state, layer):
        asked, waiting = state
        here = ~waiting & (asked.layer <= layer)
        chosen = experts[layer, asked.of_pass, who]
        counts = jax.nn.one_hot(chosen, num_experts).sum(axis=1) * here[:, None]
        cold = (counts.sum(axis=0)[chosen] < least).any(axis=1)
        defer = here & cold & (asked.timer > 0)
        after = asked._replace(layer=jnp.where(defer, layer, asked.layer), timer=asked.timer - defer)
        return (after, waiting | defer), (here & ~defer, asked.of_pass)

    def step(asked, _):
        (asked, waiting), seen = jax.lax.scan(
            layer_step, (asked, jnp.zeros(requests, bool)), jnp.arange(layers, dtype=jnp.int32)
        )
        forward = asked.forward + ~waiting
        rises = forward >= often
        after = _Requests(
            layer=jnp.where(waiting, asked.layer, 0),
            of_pass=jnp.minimum(asked.of_pass + ~waiting, steps - 1),
            forward=jnp.where(rises, 0, forward),
            timer=asked.timer + rises,
        )
        return after, (*seen, (~waiting).sum())

    zero = jnp.zeros(requests, jnp.int32)
    _, seen = jax.lax.scan(step, _Requests(zero, zero, zero, zero), None, length=steps)
    return Buffered(*seen)
