"""The congestion model: a stage of communication takes as long as its most loaded link or port.

Added to that is the delay of the longest path used: the latency of each hop and, under store-and-forward,
the time to receive one chunk whole at every node on the way.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.mesh import Mesh, reverse_links
from jaxmoe.network.loads import flow_traffic, path_maxima, path_sums
from jaxmoe.relax import AbstractReduction


class Flows(eqx.Module):
    """Traffic as a sum of flows: flow f sends source[f, n] * destination[f, m] messages from n to m.

    Rows of `destination` sum to 1. What a node sends itself is free. A stage runs its flows `rounds` times.
    """

    source: Float[Array, "flow node"]
    destination: Float[Array, "flow node"]
    rounds: int = eqx.field(static=True, default=1)


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
    flows: Flows,
    message_bytes: Float[Array, ""],
    chunk_bytes: Float[Array, ""],
) -> StageTime:
    """Time of a stage whose messages are of `message_bytes` each.

    `chunk_bytes` is what store-and-forward receives whole before it sends on; 0 means cut-through. A path
    counts by the part of a message that it carries, so that a relaxed trace of a message counts little.
    One lone message is exact: bytes / slowest link, plus latencies, plus a chunk on each of the other links.
    """
    seconds = flows.rounds * message_bytes
    load = flow_traffic(mesh.shape, flows.source, flows.destination).link_loads()
    return StageTime(
        link_time=load * seconds / mesh.link_bandwidth,
        port_time=_port_loads(mesh, flows) * seconds,
        path_delay=flows.rounds * _longest_delay(mesh, flows, jnp.minimum(chunk_bytes, message_bytes)),
    )


def mirrored_congestion(
    mesh: Mesh,
    flows: Flows,
    message_bytes: Float[Array, ""],
    chunk_bytes: Float[Array, ""],
) -> StageTime:
    """The same messages sent back: from destination to source, over the same links reversed (hd_moe IV-C1)."""
    stage = congestion(mesh.reversed(), flows, message_bytes, chunk_bytes)
    return eqx.tree_at(lambda s: s.link_time, stage, stage.link_time[reverse_links(mesh.shape)])


def _longest_delay(mesh: Mesh, flows: Flows, chunk_bytes: Float[Array, ""]) -> Float[Array, ""]:
    """Seconds from first to last link of the longest path used, the slowest link's own chunk left out."""
    chunk_time = chunk_bytes / mesh.link_bandwidth
    delay = path_sums(mesh.shape, mesh.link_latency + chunk_time) - path_maxima(mesh.shape, chunk_time)
    from_node = flows.destination @ delay.T  # [flow, node]: from a node to the flow's destination
    return jnp.max(from_node * jnp.minimum(flows.source, 1))


def _port_loads(mesh: Mesh, flows: Flows) -> Float[Array, " port"]:
    """Messages through each port over its bandwidth."""
    times = [jnp.zeros((0,), flows.source.dtype)]
    if mesh.injection_bandwidth is not None:
        sent = (flows.source * (1 - flows.destination)).sum(axis=0)
        times.append(sent / mesh.injection_bandwidth)
    if mesh.ejection_bandwidth is not None:
        received = (flows.destination * (flows.source.sum(axis=1, keepdims=True) - flows.source)).sum(axis=0)
        times.append(received / mesh.ejection_bandwidth)
    return jnp.concatenate(times)
