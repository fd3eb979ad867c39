"""The congestion model: a stage of communication takes as long as its most loaded link or port.

Added to that is the delay of the longest path used: the latency of each hop and, under store-and-forward,
the time to receive one chunk whole at every node on the way.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.mesh import Mesh, hop_counts, reverse_links
from jaxmoe.network.loads import flow_traffic, path_maxima, path_sums
from jaxmoe.relax import AbstractReduction


class Flows(eqx.Module):
    """Traffic as a sum of flows: flow f sends source[f, n] * destination[f, m] messages from n to m.

    A message is of `vectors` hidden vectors, one number or one for each flow. Rows of `destination` sum to 1.
    What a node sends itself is free. A stage runs its flows `rounds` times, one after the other.
    """

    source: Float[Array, "flow node"]
    destination: Float[Array, "flow node"]
    vectors: Float[Array, ""] | Float[Array, " flow"]
    rounds: int = eqx.field(static=True, default=1)


class StageTime(eqx.Module):
    """How long one stage (dispatch or combine) keeps each resource."""

    link_time: Float[Array, " link"]  # s: load over bandwidth
    port_time: Float[Array, " port"]  # s: ports that send, then ports that receive; empty without port limits
    path_delay: Float[Array, ""]  # s: delay of the longest path used

    def total(self, reduction: AbstractReduction) -> Float[Array, ""]:
        """Time of the stage, s."""
        return reduction(jnp.concatenate([self.link_time, self.port_time])) + self.path_delay


def congestion(
    mesh: Mesh,
    flows: Flows,
    vector_bytes: Float[Array, ""],
    chunk_bytes: Float[Array, ""],
) -> StageTime:
    """Time of a stage whose hidden vectors are of `vector_bytes` each.

    `chunk_bytes` is what store-and-forward receives whole before it sends on; 0 means cut-through. A path
    counts by the part of a message that it carries, so that a relaxed trace of a message counts little.
    One lone message is exact: bytes / slowest link, plus latencies, plus a chunk on each of the other links.
    """
    sent, unit = _sent(flows)
    message_bytes = flows.rounds * vector_bytes * unit  # B
    loads = flow_traffic(mesh.shape, sent, flows.destination).link_loads()
    return StageTime(
        link_time=loads * (message_bytes / mesh.link_bandwidth),
        port_time=_port_times(mesh, sent, flows.destination, message_bytes),
        path_delay=flows.rounds * _longest_delay(mesh, flows, vector_bytes, chunk_bytes),
    )


def mirrored_congestion(
    mesh: Mesh,
    flows: Flows,
    vector_bytes: Float[Array, ""],
    chunk_bytes: Float[Array, ""],
) -> StageTime:
    """The same messages sent back: from destination to source, over the same links reversed (hd_moe IV-C1)."""
    stage = congestion(mesh.reversed(), flows, vector_bytes, chunk_bytes)
    return eqx.tree_at(lambda s: s.link_time, stage, stage.link_time[reverse_links(mesh.shape)])


def _longest_delay(
    mesh: Mesh, flows: Flows, vector_bytes: Float[Array, ""], chunk_bytes: Float[Array, ""]
) -> Float[Array, ""]:
    """Seconds that the longest path used adds: its latencies, and a chunk on each link but the slowest."""
    # XLA's CPU compiler (jaxlib 0.10) misreads a constant matrix of equal entries in a product, such as no
    # latency at all, or no second link. Times far below any other keep the entries apart.
    hops = jnp.asarray(hop_counts(mesh.shape), mesh.link_latency.dtype)
    latency = path_sums(mesh.shape, mesh.link_latency) + 1e-20 * hops
    slowness = 1 / mesh.link_bandwidth
    per_byte = path_sums(mesh.shape, slowness) - path_maxima(mesh.shape, slowness) + 1e-30 * hops
    chunk = jnp.minimum(chunk_bytes, flows.vectors * vector_bytes)  # a message may be smaller than a chunk
    delay = latency + chunk[..., None, None] * per_byte  # one matrix, or one for each flow
    per_flow = "fm,fnm->fn" if chunk.ndim else "fm,nm->fn"
    from_node = jnp.einsum(per_flow, flows.destination, delay)
    return jnp.max(from_node * jnp.minimum(flows.source, 1))


def _sent(flows: Flows) -> tuple[Float[Array, "flow node"], Float[Array, ""]]:
    """What every node sends into every flow, and of how many hidden vectors a unit of it is.

    Loads are linear, so a size that all messages share is left for the end: it spares a pass over all flows.
    """
    if flows.vectors.ndim:
        return flows.source * flows.vectors[:, None], jnp.ones((), flows.source.dtype)
    return flows.source, flows.vectors


def _port_times(
    mesh: Mesh,
    sent: Float[Array, "flow node"],
    destination: Float[Array, "flow node"],
    message_bytes: Float[Array, ""],
) -> Float[Array, " port"]:
    """Seconds that every injection port, then every ejection port is busy."""
    times = [jnp.zeros((0,), sent.dtype)]
    if mesh.injection_bandwidth is not None:
        times.append((sent * (1 - destination)).sum(axis=0) * (message_bytes / mesh.injection_bandwidth))
    if mesh.ejection_bandwidth is not None:
        received = destination * (sent.sum(axis=1, keepdims=True) - sent)
        times.append(received.sum(axis=0) * (message_bytes / mesh.ejection_bandwidth))
    return jnp.concatenate(times)
