"""The congestion model: a stage of communication takes as long as its most loaded link or port.

Added to that is the delay of the longest path used: the latency of each hop and, under store-and-forward,
the time to receive one chunk whole at every node on the way.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.mesh import Mesh, reverse_links
from jaxmoe.network.loads import link_loads, path_maxima, path_sums
from jaxmoe.relax import AbstractReduction, AbstractSupport


class StageTime(eqx.Module):
    """How long one stage (dispatch or combine) keeps each resource."""

    link_time: Float[Array, " link"]  # s: load over bandwidth
    port_time: Float[Array, " port"]  # s: injection then ejection of every node; empty without port limits
    path_delay: Float[Array, ""]  # s: delay of the longest path used

    def total(self, reduction: AbstractReduction) -> Float[Array, ""]:
        """Time of the stage, s."""
        return reduction(jnp.concatenate([self.link_time, self.port_time])) + self.path_delay


def congestion(
    mesh: Mesh,
    messages: Float[Array, "node node2"],
    message_bytes: Float[Array, ""],
    chunk_bytes: Float[Array, ""],
    support: AbstractSupport,
    rounds: int = 1,
) -> StageTime:
    """Time of a stage of `rounds` equal steps, each sending `messages` [source, destination] of `message_bytes`.

    `chunk_bytes` is what store-and-forward receives whole before it sends on; 0 means cut-through. A pair
    counts towards the longest path by its presence (`support`), so that a trace of a message counts little.
    One lone flow is exact: bytes / slowest link, plus latencies, plus a chunk on each of the other links.
    """
    apart = messages * (1 - jnp.eye(mesh.num_nodes, dtype=messages.dtype))
    chunk_time = chunk_bytes / mesh.link_bandwidth
    delay = path_sums(mesh.shape, mesh.link_latency + chunk_time) - path_maxima(mesh.shape, chunk_time)
    return StageTime(
        link_time=rounds * link_loads(mesh.shape, apart) * message_bytes / mesh.link_bandwidth,
        port_time=rounds * _port_times(mesh, apart * message_bytes),
        path_delay=rounds * jnp.max(delay * support.presence(support.amount(apart))),
    )


def mirrored_congestion(
    mesh: Mesh,
    messages: Float[Array, "node node2"],
    message_bytes: Float[Array, ""],
    chunk_bytes: Float[Array, ""],
    support: AbstractSupport,
    rounds: int = 1,
) -> StageTime:
    """The same messages sent back: from destination to source, over the same links reversed (hd_moe IV-C1)."""
    stage = congestion(mesh.reversed(), messages, message_bytes, chunk_bytes, support, rounds)
    return eqx.tree_at(lambda s: s.link_time, stage, stage.link_time[reverse_links(mesh.shape)])


def _port_times(mesh: Mesh, load: Float[Array, "node node2"]) -> Float[Array, " port"]:
    times = [jnp.zeros((0,), load.dtype)]
    if mesh.injection_bandwidth is not None:
        times.append(load.sum(axis=1) / mesh.injection_bandwidth)
    if mesh.ejection_bandwidth is not None:
        times.append(load.sum(axis=0) / mesh.ejection_bandwidth)
    return jnp.concatenate(times)
