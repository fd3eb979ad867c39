"""Contention of routers: a time model that adds router contention and message order to the load of the busiest link.

`Contention` is the congestion model with two things more, neither of which builds on results of a simulation.

**Order.** With an order of messages, the work that a channel has left when a message comes cannot be done before it
has: a channel is done when the latest of all its messages has come and all that come after it are through,

    T_c = max over messages k of [arrival_k + load of those that come with or after k],

where a message comes when those before it have left its source's first channel, and it has passed the hops up to here
as if alone. That is the time of one machine with release dates (Jackson 1955), a lower bound. `shuffled` chunks are
there from the first on, so that the whole load counts from the earliest arrival. On top comes the shortest way onward.

**Contention.** Routers let their inputs take turns, whatever is behind them: fair here, unfair over the whole way, for
what comes over many contended routers gets the small share of a small share ("parking lot": Dally and Towles,
Principles and Practices of Interconnection Networks, 2004, 15.4.1). Say an output gets `H_i` of work from input `i`,
whose channel takes `T_i` for all it carries. Alone, the input brings it at the rate `H_i / T_i`. Where all together are
more than the output can take, every input gets the same rate, but for those that bring less. Meanwhile the rest of what
is in a throttled channel waits behind in its finite buffers: it goes on at `coupling` times its throttled and `1 -
coupling` times the freed rate. So the output is done when all inputs have been drained, and that is the `T_c` of its
channel for the routers behind it. The computation goes along all channels at once, `SWEEPS` times.

**Credits.** A channel may have as much under way as the buffers behind it hold, `num_vcs` x `vc_buf_size` flits, until
their credits are back. All beyond the first of such windows waits for one: the way of a flit, and of its credit.

**Coupling** is 1 where the crossbar is as fast as the links, as then an input that waits holds up what is behind it. It
is 1 / `internal_speedup`, the part of a crossbar's time that a link at full rate takes: in the rest others may pass. In
the same part of its time an input fills its buffers on the other side, so that much of them, `num_vcs` x `vc_buf_size`
x (1 - 1 / `internal_speedup`) flits, is not held up at all. No number was fitted; the exponent of the speed-up was
chosen on half of the MoE records of BookSim2 with speed-up 2. Without a router there is no contention.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.hardware import AbstractTopology, Router
from jaxmoe.network.flows import Flows, StageTime
from jaxmoe.network.time_models import Congestion, away_from_self, repeated
from jaxmoe.relax import largest

SWEEPS = 6  # how many routers back an output is slowed from
Order = Literal["shuffled", "staggered", "by_destination"]
TINY = 1e-12  # of what is divided by, all of which is about 1


class Passages(eqx.Module):
    """The channels that every pair of nodes passes: links, then injection ports, then ejection ports.

    Numbers of structure alone; `passages_of` makes them. A pair is source * nodes + destination.
    """

    channel: Int[np.ndarray | Array, "pair place"]  # as many as there are channels: none
    turn: Int[np.ndarray | Array, "pair place"]  # from the channel before to this one: channel * inputs + input
    inputs: Int[np.ndarray | Array, "channel input"]  # channels that come before; as many as there are: none
    first: Int[np.ndarray | Array, " pair"]  # pairs by the channel that limits their source, and in it by order
    begins: Bool[np.ndarray | Array, " pair"]  # whether that is the first pair of its channel


def passages_of(topology: AbstractTopology, order: Order = "shuffled", back: bool = False) -> Passages:
    """Passages of a network; `back`: of messages that retrace the paths, from destination to source."""
    nodes, links = topology.num_nodes, topology.num_links
    count, paths, reverse = links + 2 * nodes, topology.paths(), np.asarray(topology.reverse_links).tolist()
    rows: list[list[int]] = []
    for source in range(nodes):
        for destination in range(nodes):
            path = paths[source][destination]
            if back:
                path = tuple(reverse[link] for link in reversed(paths[destination][source]))
            rows.append([links + source, *path, links + nodes + destination] if path else [])
    channel = np.full((nodes**2, max(map(len, rows))), count)
    for pair, row in enumerate(rows):
        channel[pair, : len(row)] = row
    before = np.concatenate([np.full((nodes**2, 1), count), channel[:, :-1]], axis=1)
    turns, where = np.unique((channel * (count + 1) + before).ravel(), return_inverse=True)
    ends, starts = np.divmod(turns, count + 1)
    number = np.arange(len(turns)) - np.searchsorted(ends, ends)  # of an input of its channel
    width = int(number[ends < count].max(initial=0)) + 1
    inputs = np.full((count, width), count)
    inputs[ends[ends < count], number[ends < count]] = starts[ends < count]
    turn = np.where(ends < count, ends * width + number, count * width)[where].reshape(channel.shape)
    sender, receiver = np.divmod(np.arange(nodes**2), nodes)
    limit = channel[:, 0] if topology.injection_bandwidth is not None else channel[:, 1]
    rank = (receiver - sender) % nodes if order == "staggered" else receiver
    first = np.lexsort((rank, np.where(sender == receiver, count, limit)))
    begins = np.r_[True, limit[first][1:] != limit[first][:-1]]
    numbers = [each.astype(np.int32) for each in (channel, turn, inputs, first)]
    return Passages(numbers[0], numbers[1], numbers[2], numbers[3], begins)


class Contention(Congestion):
    """Congestion with an order of messages, and with what routers make of it; see above.

    The coupling falls with this `exponent` of the internal speed-up. Trees of links are timed as in `Congestion`.
    """

    order: Order = eqx.field(static=True, kw_only=True)
    ways: Passages = eqx.field(kw_only=True)
    ways_back: Passages = eqx.field(kw_only=True)
    exponent: Float[Array, ""] = eqx.field(kw_only=True, default=1.0, converter=jnp.asarray)

    def __call__(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        return self._stage(topology, traffic, self.ways)

    def mirrored(self, topology: AbstractTopology, traffic: Float[Array, "node node2"]) -> StageTime:
        return self._stage(topology, traffic.T, self.ways_back)

    def loaded(self, topology: AbstractTopology, flows: Flows) -> Flows:
        return flows if flows.route == "unicast" else super().loaded(topology, flows)

    def of_flows(self, topology: AbstractTopology, flows: Flows, vector_bytes: Float[Array, ""]) -> StageTime:
        if flows.route != "unicast":
            return super().of_flows(topology, flows, vector_bytes)
        return repeated(self(topology, flows.traffic(vector_bytes)), flows.rounds)

    def of_mirrored(self, topology: AbstractTopology, flows: Flows, vector_bytes: Float[Array, ""]) -> StageTime:
        if flows.route != "unicast":
            return super().of_mirrored(topology, flows, vector_bytes)
        return repeated(self.mirrored(topology, flows.traffic(vector_bytes)), flows.rounds)

    def _stage(self, topology: AbstractTopology, traffic: Float[Array, "node node2"], ways: Passages) -> StageTime:
        """Link and port times are when their work is done, if it comes at once or in order, and routers contend."""
        links, nodes = topology.num_links, topology.num_nodes
        away = traffic * away_from_self(topology, traffic.dtype)
        sent = away.ravel()[:, None]
        slowness = _slowness(topology)
        passed, onward = self._delays_on_the_way(topology, ways, sent, slowness)
        load = _sums(sent * jnp.ones_like(passed), ways.channel, len(slowness))
        used = (sent > 0) & (ways.channel < len(slowness))
        earliest, rest = (_least(each, used, ways.channel, len(slowness)) for each in (passed, onward))
        done = load * slowness
        if self.order != "shuffled":
            done = jnp.maximum(done, self._in_order(ways, sent[:, 0], passed, slowness) - earliest)
        if topology.router is not None:
            done = jnp.maximum(done, _by_credits(topology, topology.router, load, slowness))
            work = _sums(sent * jnp.ones_like(passed), ways.turn, ways.inputs.size).reshape(ways.inputs.shape)
            router = topology.router
            coupling = router.internal_speedup**-self.exponent
            absorbed = router.num_vcs * router.vc_buf_size * router.flit_bytes * (1 - 1 / router.internal_speedup)
            done = contended(work * slowness[:, None], done, absorbed * slowness, ways.inputs, coupling)
        ports = [done[links : links + nodes]] * (topology.injection_bandwidth is not None)
        ports += [done[links + nodes :]] * (topology.ejection_bandwidth is not None)
        port_time = jnp.concatenate([jnp.zeros(0, traffic.dtype), *ports])
        slowest = jnp.concatenate([done[:links], port_time])
        return StageTime(
            link_time=done[:links],
            port_time=port_time,
            pair_time=jnp.zeros(0, traffic.dtype),
            path_delay=largest(done + earliest + rest) - largest(slowest),
            link_bytes=load[:links],
        )

    def _delays_on_the_way(
        self,
        topology: AbstractTopology,
        ways: Passages,
        sent: Float[Array, "pair one"],
        slowness: Float[Array, " channel"],
    ) -> tuple[Float[Array, "pair place"], Float[Array, "pair place"]]:
        """Seconds that a lone message takes up to each of its channels, and from when that is through to its end."""
        zero = jnp.zeros(topology.num_nodes, slowness.dtype)
        latency = jnp.concatenate([topology.link_latency, zero, zero + topology.endpoint_latency, jnp.zeros(1)])
        held = jnp.zeros_like(slowness) if self.cut_through else slowness
        stored = self._chunk(sent) * jnp.concatenate([held, jnp.zeros(1)])[ways.channel]
        hop = latency[ways.channel] + stored
        through = jnp.cumsum(hop, axis=1)
        return through - hop, through[:, -1:] - through + latency[ways.channel]

    def _in_order(
        self,
        ways: Passages,
        sent: Float[Array, " pair"],
        passed: Float[Array, "pair place"],
        slowness: Float[Array, " channel"],
    ) -> Float[Array, " channel"]:
        """When every channel is done with messages that are sent in order."""
        count = len(slowness)
        limit = jnp.concatenate([slowness, jnp.zeros(1)])[ways.channel]
        seconds = (sent * jnp.maximum(limit[:, 0], limit[:, 1]))[ways.first]
        ahead = jnp.cumsum(seconds) - seconds
        start = jax.lax.cummax(jnp.where(ways.begins, ahead, 0))
        position = jnp.zeros_like(sent).at[ways.first].set(ahead - start)
        arrival, work = position[:, None] + passed, sent[:, None] * limit
        channel = jnp.asarray(ways.channel)
        by = jnp.lexsort((arrival.ravel(), channel.ravel()))
        sums = jnp.cumsum(work.ravel()[by])
        whole = _sums(work, channel, count)
        through = jnp.concatenate([jnp.cumsum(whole), jnp.zeros(1)])[channel.ravel()[by]]
        left = through - sums + work.ravel()[by]
        finish = jnp.where(work.ravel()[by] > 0, arrival.ravel()[by] + left, 0)
        return jax.ops.segment_max(finish, channel.ravel()[by], count + 1, indices_are_sorted=True)[:count]


def contended(
    work: Float[Array, "channel input"],
    done: Float[Array, " channel"],
    absorbed: Float[Array, " channel"],
    inputs: Int[np.ndarray | Array, "channel input"],
    coupling: Float[Array, ""],
) -> Float[Array, " channel"]:
    """When every channel is done, s, where `work` from its inputs takes so long and all of its own work takes `done`.

    Buffers take in what a channel carries in `absorbed` s.
    """
    unit = jax.lax.stop_gradient(jnp.maximum(largest(done), 1e-30))
    work, alone, absorbed = work / unit, done / unit, absorbed / unit

    def sweep(known: Float[Array, " channel"], _: None) -> tuple[Float[Array, " channel"], None]:
        behind = jnp.concatenate([known - absorbed, jnp.zeros(1)])[inputs]
        return jnp.maximum(alone, drained(work, jnp.maximum(behind, work), coupling)), None

    return unit * jax.lax.scan(sweep, alone, None, length=SWEEPS)[0]


def drained(
    work: Float[Array, "channel input"], behind: Float[Array, "channel input"], coupling: Float[Array, ""]
) -> Float[Array, " channel"]:
    """Seconds until an output has drained its inputs, which share it fairly.

    `work` is what each brings, `behind` what its channel takes for all that it carries, s. In every stretch of time the
    rates are constant; it ends when an input has brought all, or has nothing else left.
    """
    count = work.shape[1]

    def stretch(
        state: tuple[Float[Array, "channel input"], Float[Array, "channel input"], Float[Array, " channel"]], _: None
    ) -> tuple[tuple[Float[Array, "channel input"], Float[Array, "channel input"], Float[Array, " channel"]], None]:
        left, other, seconds = state
        active = left > 1e-6 * work
        offered = jnp.where(active, left / jnp.maximum(left + other, TINY), 0)
        rate = jnp.minimum(offered, _fair_rate(offered)[:, None])
        throttled = rate / jnp.maximum(offered, TINY)
        beside = jnp.minimum(1 - rate, (1 - offered) * (2 - throttled))
        beside = jnp.where(active, coupling * (1 - offered) * throttled + (1 - coupling) * beside, 0)
        ends = jnp.where(active, left / jnp.maximum(rate, TINY), jnp.inf)
        alone = active & (throttled < 1 - 1e-6) & (other > 1e-6 * work)
        ends = jnp.minimum(ends, jnp.where(alone, other / jnp.maximum(beside, TINY), jnp.inf)).min(axis=1)
        ends = jnp.where(jnp.isfinite(ends), ends, 0)
        left = jnp.where(active, jnp.maximum(left - ends[:, None] * rate, 0), 0)
        return (left, jnp.maximum(other - ends[:, None] * beside, 0), seconds + ends), None

    begin = (work, jnp.where(work > 0, jnp.maximum(behind - work, 0), 0), jnp.zeros(len(work), work.dtype))
    (left, _, seconds), _ = jax.lax.scan(stretch, begin, None, length=count + 2)
    return seconds + left.sum(axis=1)


def _fair_rate(offered: Float[Array, "channel input"]) -> Float[Array, " channel"]:
    """The rate that no input exceeds, so that all together are 1, or that of the largest where they are less."""
    count = offered.shape[1]
    rising = jnp.sort(offered, axis=1)
    below = jnp.cumsum(rising, axis=1) - rising
    return ((1 - below) / (count - jnp.arange(count))).max(axis=1)


def _slowness(topology: AbstractTopology) -> Float[Array, " channel"]:
    """Seconds per byte of every channel; 0 without a limit."""
    free = jnp.zeros(topology.num_nodes, topology.link_bandwidth.dtype)
    ports = [free if each is None else 1 / each for each in (topology.injection_rate, topology.ejection_rate)]
    return jnp.concatenate([1 / topology.link_rate, *ports])


def _by_credits(
    topology: AbstractTopology, router: Router, load: Float[Array, " channel"], slowness: Float[Array, " channel"]
) -> Float[Array, " channel"]:
    """Seconds until the buffers behind every channel have had room for its load; ports without a limit have room."""
    nodes = topology.num_nodes
    cycle = router.flit_bytes / topology.link_rate.max()
    begun = jnp.floor(2 / router.internal_speedup)  # cycles of a hop that are not on the wire
    there_and_back = 2 * topology.link_latency + (1 + router.credit_delay - 2 * begun) * cycle
    at_port = topology.endpoint_latency + (2 + router.credit_delay - begun) * cycle
    window = router.num_vcs * router.vc_buf_size * router.flit_bytes
    ports = [
        jnp.full(nodes, 0.0 if each is None else at_port / router.ports_per_node)
        for each in (topology.injection_bandwidth, topology.ejection_bandwidth)
    ]
    waits = jnp.maximum(load / window - 1, 0) * jnp.concatenate([there_and_back, *ports])
    return waits + jnp.minimum(load, window) * slowness


def _sums(
    values: Float[Array, "pair place"], index: Int[np.ndarray | Array, "pair place"], count: int
) -> Float[Array, " each"]:
    return jax.ops.segment_sum(values.ravel(), jnp.asarray(index).ravel(), count + 1)[:count]


def _least(
    values: Float[Array, "pair place"],
    used: Bool[Array, "pair place"],
    index: Int[np.ndarray | Array, "pair place"],
    count: int,
) -> Float[Array, " channel"]:
    """The least value of the messages that use a channel; 0 where none does."""
    least = jax.ops.segment_min(jnp.where(used, values, jnp.inf).ravel(), jnp.asarray(index).ravel(), count + 1)[:count]
    return jnp.where(jnp.isfinite(least), least, 0)
