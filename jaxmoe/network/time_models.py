"""Time models: how long a network takes over given traffic. Each has a name, and all have one interface.

- `Congestion`: the most loaded link or port, plus the delay of the longest path used.
- `Uncongested`: (volume / bandwidth + latency) x hops of every pair, as if it were alone (moentwine Eq. 1).
- `OneByOne`: the same, and a node sends and receives its messages one after the other.
- `AlphaBeta`: alpha + beta x volume of every pair, measured or summed over hops (camoe Eq. 7 and 9).
"""

import abc
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.chains import chain_delay
from jaxmoe.network.flows import FlowLoads, Flows, StageTime
from jaxmoe.network.loads import crossed, link_loads, path_maxima, path_peaks, path_sums, port_times, round_loads
from jaxmoe.relax import OneOf, is_number, largest, least_at, look_up


class AbstractTimeModel(eqx.Module):
    """Predicts how long traffic takes when all of it is there at time 0."""

    @abc.abstractmethod
    def __call__(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        """Time of one message of traffic[s, d] bytes from every s to every d; zeros send nothing."""

    def loaded(self, topology: AbstractTopology, flows: Flows) -> Flows:
        """The flows with what is the same whichever way they run, to be worked out once; by default nothing."""
        return flows

    def of_flows(self, topology: AbstractTopology, flows: Flows, vector_bytes: Float[Array, ""]) -> StageTime:
        """Time of flows whose hidden vectors are of `vector_bytes` each."""
        return repeated(self(topology, flows.traffic(vector_bytes)), flows.rounds)

    def of_mirrored(self, topology: AbstractTopology, flows: Flows, vector_bytes: Float[Array, ""]) -> StageTime:
        """Time of flows sent back, from destination to source over the same links reversed (hd_moe IV-C1).

        `vector_bytes` is the size of one hidden vector. Links and ports are numbered as in `topology`.
        """
        return _turned_back(self.of_flows(topology.reversed(), flows, vector_bytes), topology)

    def mirrored(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        """Time of traffic[s, d] bytes sent back, from every d to every s, over the same links reversed."""
        return _turned_back(self(topology.reversed(), traffic), topology)


class Congestion(AbstractTimeModel):
    """The most loaded link or port, and on top of that the delay of the longest path used.

    The delay is the latency of the end points and of each hop and, under store-and-forward, the time to receive
    one chunk whole at every port and link on the way but the slowest. A lone message is exact; where its last
    chunk is shorter and links differ, an upper bound. Router efficiency divides loads, not delays.
    `chunk_bytes` above a message's size, or 0, is the message whole.

    `pair_by_pair` takes the longest path among the pairs of nodes that any flow uses, not flow by flow: the same, and
    much faster where many machines share their flows, for which pairs are used does not depend on a machine.
    """

    chunk_bytes: Float[Array, ""]
    cut_through: bool = eqx.field(static=True, default=False)
    pair_by_pair: bool = eqx.field(static=True, default=False)

    def __call__(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        away = traffic * away_from_self(topology, traffic.dtype)
        latency, per_byte = self._delays(topology)
        delay = latency + self._chunk(away) * per_byte
        loads = link_loads(topology, away)
        return StageTime(
            link_time=loads / topology.link_rate,
            port_time=port_times(topology, away.sum(axis=1), away.sum(axis=0)),
            pair_time=jnp.zeros(0, traffic.dtype),
            path_delay=largest(jnp.where(away > 0, delay, 0).ravel()),
            link_bytes=loads,
        )

    def loaded(self, topology: AbstractTopology, flows: Flows) -> Flows:
        return replace(flows, loads=self.loads_of(topology, flows))

    def loads_of(self, topology: AbstractTopology, flows: Flows) -> FlowLoads:
        """Loads of one round of flows: those that they carry, or worked out here."""
        return round_loads(topology, flows) if flows.loads is None else flows.loads

    def of_flows(self, topology: AbstractTopology, flows: Flows, vector_bytes: Float[Array, ""]) -> StageTime:
        """As for traffic, but no matrix of it is built: most flows come from one node or go to one.

        A path counts by the part of a message that it carries, so that a relaxed trace of a message counts little.
        """
        loads = self.loads_of(topology, flows)
        link_time = loads.link * (vector_bytes / topology.link_rate)
        port_time = port_times(topology, loads.sent, loads.received) * vector_bytes
        if flows.chain is None:
            delay = self._longest_delay(topology, flows, vector_bytes)
        else:
            delay = self._delay_of_chains(topology, flows, vector_bytes, link_time, port_time)
        pair_time = jnp.zeros(0, loads.link.dtype)
        return repeated(StageTime(link_time, port_time, pair_time, delay, loads.link * vector_bytes), flows.rounds)

    def _longest_delay(
        self, topology: AbstractTopology, flows: Flows, vector_bytes: Float[Array, ""]
    ) -> Float[Array, ""]:
        timed = self
        if flows.route != "unicast":  # routers hold a chunk whole before they add it up, under either switching
            timed = replace(self, cut_through=False)
        latency, per_byte = timed._delays(crossed(topology) if flows.route == "cross_tree" else topology)
        if flows.messages is not None:
            size = flows.traffic(vector_bytes) / jnp.maximum(flows.messages, 1e-9)  # the mean of a pair
            delay = latency + self._chunk(size) * per_byte
            return largest((delay * jnp.minimum(flows.messages, 1) * away_from_self(topology, delay.dtype)).ravel())
        chunk = self._chunk(flows.vectors * vector_bytes)
        if self.pair_by_pair and is_number(flows.destination) and not chunk.ndim:
            return largest(((latency + chunk * per_byte) * _most_carried(flows).T).ravel())
        if not chunk.ndim:
            delay = latency + chunk * per_byte
            weight = jnp.ones(len(flows.source), delay.dtype) if flows.weight is None else flows.weight
            if is_number(flows.destination):
                return _longest_sent(flows.source, weight, flows.destination, delay)
            return _longest_used(flows.source * weight[:, None], flows.destination, delay)
        # Sums of products apart, for a matrix of delays of each flow would be large.
        from_node = _columns(latency, flows.destination) + chunk[..., None] * _columns(per_byte, flows.destination)
        delays = largest(from_node * jnp.minimum(flows.source, 1))
        if flows.weight is not None:
            delays *= jnp.minimum(flows.weight, 1)
        return largest(delays)

    def _delay_of_chains(
        self,
        topology: AbstractTopology,
        flows: Flows,
        vector_bytes: Float[Array, ""],
        link_time: Float[Array, " link"],
        port_time: Float[Array, " port"],
    ) -> Float[Array, ""]:
        """A round's part of what chains take on top of the busiest link or port, s; those are of one round."""
        assert flows.chain is not None
        running, pair = flows.source.max(axis=1), (flows.source.argmax(axis=1), flows.destination)
        size = flows.vectors * vector_bytes * running
        one = jnp.ones(topology.num_nodes, size.dtype)
        alone = size * path_peaks(topology, 1 / topology.link_rate, port_times(topology, one, one))[pair]
        shared = running * path_peaks(topology, link_time, port_time)[pair]
        latency, per_byte = self._delays(topology)
        delay = running * latency[pair] + self._chunk(size) * per_byte[pair]
        return chain_delay(alone, shared, delay, flows.chain, flows.rounds, topology.num_nodes - 1)

    def _chunk(self, message_bytes: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return jnp.where(self.chunk_bytes > 0, jnp.minimum(self.chunk_bytes, message_bytes), message_bytes)

    def _delays(self, topology: AbstractTopology) -> tuple[Float[Array, "node node2"], Float[Array, "node node2"]]:
        """Seconds of every pair, and seconds per byte of a chunk."""
        away = away_from_self(topology, topology.link_latency.dtype)
        latency = path_sums(topology, topology.link_latency) + topology.endpoint_latency * away
        if self.cut_through:
            return never_constant(latency, topology), never_constant(jnp.zeros_like(latency), topology)
        slowness = 1 / topology.link_bandwidth
        stations, slowest = path_sums(topology, slowness), path_maxima(topology, slowness)
        for port in _port_slowness(topology):
            stations, slowest = stations + port, jnp.maximum(slowest, port)
        return never_constant(latency, topology), never_constant((stations - slowest) * away, topology)


# The longest delay, with the derivative of one longest path, the first: that of all would take longer than the value.


@jax.custom_jvp
def _longest_sent(
    source: Float[Array, "flow node"],
    weight: Float[Array, " flow"],
    destination: Int[Array, " flow"],
    delay: Float[Array, "node node2"],
) -> Float[Array, ""]:
    """The longest delay of any flow to one node each, by the part of a message that it carries."""
    return largest(_of_flows(source, weight, destination, delay))


def _of_flows(source, weight, destination, delay) -> Float[Array, " flow"]:
    return largest(look_up(destination, delay.T) * jnp.minimum(source, 1)) * jnp.minimum(weight, 1)


@_longest_sent.defjvp
def _longest_sent_jvp(primals, tangents):
    (source, weight, destination, delay), (of_source, of_weight, _, of_delay) = primals, tangents
    delays = _of_flows(source, weight, destination, delay)
    flow = least_at(-delays)
    stop = destination[flow]
    node = least_at(-delay[:, stop] * jnp.minimum(source[flow], 1))
    part, many = jnp.minimum(source[flow, node], 1), jnp.minimum(weight[flow], 1)
    there = jnp.arange(len(source)) == flow  # transposed, masks are part of the sum of derivatives; scatters are not
    at = there[:, None] & (jnp.arange(len(delay)) == node)
    change = jnp.where(at, of_source, 0).sum() * (source[flow, node] <= 1) * many
    change += jnp.where(there, of_weight, 0).sum() * (weight[flow] <= 1) * part
    return largest(delays), change * delay[node, stop] + part * many * of_delay[node, stop]


@jax.custom_jvp
def _longest_used(
    part: Float[Array, "flow node"], destination: Float[Array, "flow node2"], delay: Float[Array, "node node2"]
) -> Float[Array, ""]:
    """The longest delay between any two nodes, by the messages that run there, up to one."""
    return largest((jnp.minimum(part.T @ destination, 1) * delay).ravel())


@_longest_used.defjvp
def _longest_used_jvp(primals, tangents):
    (part, destination, delay), (of_part, of_destination, of_delay) = primals, tangents
    messages = part.T @ destination
    used = jnp.minimum(messages, 1)
    delays = used * delay
    start = least_at(-delays.max(axis=1))
    stop = least_at(-delays[start])
    nodes = jnp.arange(len(delay))
    change = jnp.where(nodes == start, of_part, 0).sum(axis=1) @ destination[:, stop]
    change += part[:, start] @ jnp.where(nodes == stop, of_destination, 0).sum(axis=1)
    change *= (messages[start, stop] < 1) * delay[start, stop]
    return jnp.maximum(delays[start, stop], 0), change + used[start, stop] * of_delay[start, stop]


class Uncongested(AbstractTimeModel):
    """(volume / bandwidth + latency) x hops of the slowest pair, as if all were alone (moentwine Eq. 1).

    Links that differ add up along the path: each receives the whole message before it sends it on.
    """

    def __call__(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        slowness = path_sums(topology, 1 / topology.link_rate)
        return _pairwise(topology, traffic, path_sums(topology, topology.link_latency), slowness)


class OneByOne(AbstractTimeModel):
    """(volume / bandwidth + latency) x hops of all that a node sends or receives, one message after the other.

    moentwine Eq. 1 for an all-to-all: the volume of a device and its average hops (IV-A), as if no other device sent.
    """

    def __call__(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        alone = Uncongested()(topology, traffic)
        seconds = alone.pair_time.reshape(traffic.shape)
        of_nodes = jnp.concatenate([seconds.sum(axis=1), seconds.sum(axis=0)])
        return eqx.tree_at(lambda stage: stage.pair_time, alone, of_nodes)


class AlphaBeta(AbstractTimeModel):
    """alpha + beta x volume of the slowest pair (camoe Eq. 9), whatever lies between its ends.

    `alpha` in s and `beta` in s/B are of every pair [source, destination], as measured end to end;
    `alpha_beta` adds them up from hops.
    """

    alpha: Float[Array, "node node2"]
    beta: Float[Array, "node node2"]

    def __call__(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        return _pairwise(topology, traffic, self.alpha, self.beta)

    def of_mirrored(self, topology: AbstractTopology, flows: Flows, vector_bytes: Float[Array, ""]) -> StageTime:
        """Sent back, a message takes what was measured the other way."""
        return repeated(self(topology, flows.traffic(vector_bytes).T), flows.rounds)

    def mirrored(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        return self(topology, traffic.T)


def alpha_beta(topology: AbstractTopology, pipelined: bool = False) -> AlphaBeta:
    """Per-pair constants from those of hops: latencies add up; so do seconds per byte, unless pipelined.

    Store-and-forward is camoe Eq. 7; pipelined (cut-through) has the slowest hop's seconds per byte (camoe,
    limitations: multi-hop and asymmetry).
    """
    slowness = 1 / topology.link_rate
    along = path_maxima if pipelined else path_sums
    return AlphaBeta(path_sums(topology, topology.link_latency), along(topology, slowness))


def _pairwise(
    topology: AbstractTopology,
    traffic: Float[Array, "node node2"],
    alpha: Float[Array, "node node2"],
    beta: Float[Array, "node node2"],
) -> StageTime:
    """Every pair for itself; no link is kept busy."""
    away = traffic * away_from_self(topology, traffic.dtype)
    seconds = jnp.where(away > 0, alpha + beta * away, 0)
    return StageTime(
        link_time=jnp.zeros(topology.num_links, traffic.dtype),
        port_time=jnp.zeros(0, traffic.dtype),
        pair_time=seconds.ravel(),
        path_delay=jnp.zeros((), traffic.dtype),
        link_bytes=link_loads(topology, away),
    )


def away_from_self(topology: AbstractTopology, dtype: jnp.dtype) -> Float[Array, "node node2"]:
    """1 between different nodes, 0 for a node to itself."""
    return 1 - jnp.eye(topology.num_nodes, dtype=dtype)


def never_constant(matrix: Float[Array, "node node2"], topology: AbstractTopology) -> Float[Array, "node node2"]:
    """The matrix, by traces far below any time made one whose entries are not all equal.

    XLA's CPU compiler (jaxlib 0.10) goes wrong where a product with a constant matrix of equal entries is reduced at
    once: `tests/network/test_constant_matrix.py` has the case. Latencies that are all 0 would be such a matrix.
    """
    # On a mesh NumPy multiplies: XLA is long over large constants.
    return matrix + (1e-30 * topology.hop_counts()).astype(matrix.dtype)


def _columns(table: Float[Array, "node node2"], destination: OneOf) -> Float[Array, "flow node"]:
    """The column of every flow's destination, or their mean. Rings have few: to keep the table would not pay."""
    return table[:, destination].T if is_number(destination) else destination @ table.T


def _most_carried(flows: Flows) -> Float[Array, "node2 node"]:
    """The largest part of a message that any flow brings to a node, from every node."""
    carried = jnp.minimum(flows.source, 1)
    if flows.weight is not None:
        carried *= jnp.minimum(flows.weight, 1)[:, None]
    return jnp.maximum(jax.ops.segment_max(carried, flows.destination, carried.shape[1]), 0)


def _turned_back(stage: StageTime, topology: AbstractTopology) -> StageTime:
    """A stage of the reversed network, with the numbers of links and ports of the network itself."""
    link_time, link_bytes = (each[topology.reverse_links] for each in (stage.link_time, stage.link_bytes))
    # The ports that send stand second, as those that receive in the reversed network.
    sending = 0 if topology.injection_bandwidth is None else topology.num_nodes
    port_time = jnp.roll(stage.port_time, sending)
    changed = (link_time, link_bytes, port_time)
    return eqx.tree_at(lambda s: (s.link_time, s.link_bytes, s.port_time), stage, changed)


def repeated(stage: StageTime, rounds: Float[Array, ""] | int) -> StageTime:
    """Time and bytes of a stage run `rounds` times in sequence: every field times `rounds`."""
    return eqx.tree_at(
        lambda s: (s.link_time, s.port_time, s.pair_time, s.path_delay, s.link_bytes),
        stage,
        replace_fn=lambda amount: rounds * amount,
    )


def _port_slowness(topology: AbstractTopology) -> list[Float[Array, "..."]]:
    """Seconds per byte of the ports at both ends of a path, to be broadcast over [source, destination]."""
    slowness = []
    if topology.injection_bandwidth is not None:
        slowness.append(1 / topology.injection_bandwidth[:, None])
    if topology.ejection_bandwidth is not None:
        slowness.append(1 / topology.ejection_bandwidth[None, :])
    return slowness
