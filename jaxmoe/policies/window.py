"""How many experts a layer may have broadcast ahead of it: a number, or as many as the layer before leaves time for."""

import abc
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import Machine
from jaxmoe.latency import LayerTime
from jaxmoe.network import ChunkedBroadcast


class AbstractAllowance(eqx.Module):
    """Says before a step how many experts every layer may have broadcast."""

    @abc.abstractmethod
    def __call__(self, machine: Machine, last: LayerTime, limit: int) -> Int[Array, " layer"]:
        """At most `limit`, from the times [layer] of the step before."""


class FixedAllowance(AbstractAllowance):
    """The same number in every step, of all layers or of each."""

    experts: Int[Array, "*layer"]

    def __call__(self, machine: Machine, last: LayerTime, limit: int) -> Int[Array, " layer"]:
        return jnp.minimum(jnp.broadcast_to(self.experts, last.total.shape), limit)


class WindowAllowance(AbstractAllowance):
    """As many as fit the time of the layer before (hd_moe IV-D1, Eq. 17), as the step before tells it.

    The window of the first layer is the last layer of the step before; there is none before the first step. Chunks pass
    the slowest link. The paper counts hidden x intermediate elements of an expert.
    """

    hidden: Float[Array, ""]
    intermediate: Float[Array, ""]
    element_bytes: Float[Array, ""]

    def __call__(self, machine: Machine, last: LayerTime, limit: int) -> Int[Array, " layer"]:
        topology = machine.topology
        broadcast = ChunkedBroadcast(
            alpha=topology.link_latency.max(),
            beta=self.element_bytes / (topology.link_bandwidth.min() * topology.efficiency),
            nodes=jnp.asarray(float(topology.num_nodes)),
            hidden=self.hidden,
            intermediate=self.intermediate,
        )
        return experts_in_window(broadcast, jnp.roll(last.total, 1), limit)


def experts_in_window(
    broadcast: ChunkedBroadcast, window: Float[Array, "*windows"], limit: int
) -> Int[Array, "*windows"]:
    """The largest k, up to `limit`, whose broadcast at its best chunk size takes no longer than the window, in s.

    As in the paper, the broadcast has the links to itself: what the layer before sends is not counted.
    """
    seconds = jax.vmap(lambda k: replace(broadcast, iterations=k).least_time())(jnp.arange(1.0, limit + 1))
    return (seconds <= window[..., None]).sum(axis=-1)
