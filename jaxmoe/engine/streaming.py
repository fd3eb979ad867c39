"""How long experts take that stream through dies in micro-slices: a recurrence over groups of experts.

Source: expert_streaming_fse_dp section IV. Every group of experts asks for seconds of each DDR channel, of each die's
array, and of each sender, receiver and link between dies. All work on different groups at once, each in the order of
loading. A group is loaded when the channel has loaded the ones before, and when buffers have room: when as many
micro-slices before it have left as the buffers are short of. A closed form stands for the micro-slices of a group: the
slowest resource, plus filling (the first micro-slice has to be there) and draining (the last one goes round).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine.lower import LayerCosts
from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.network.loads import link_loads, path_maxima, path_sums
from jaxmoe.relax import AbstractReduction, HardMax

PARTS = 4  # that the recurrence cuts a group into
# The part of the time that a sender is busy where transfers are what takes longest: each waits until its sender and
# its receiver are both idle. All dies are nearly in step on one ring, less so where rule 5 loads into any die, and
# least where rings run both ways, which those of more than four dies do.
ONE_WAY, ANY_DIE, BOTH_WAYS = 0.96, 0.9, 0.82
# The same of arrays, and the part of a channel's loads that are late where arrays are what takes longest: the busiest
# die puts off its own micro-slices while it gets others', so its buffer is full and its channel stalls. With rule 5
# there is always a die with room. All of these are calibrated on runs of the event simulator.
FED, LATE = 0.98, 0.16


class StreamCosts(eqx.Module):
    """A machine and one layer's experts, cut in `micro_slices` for each die. The buffer is the nearest memory level.

    `control` is what setting up takes: each load, transfer and computation of a micro-slice (IV, VI-D).
    """

    machine: Machine
    costs: LayerCosts
    micro_slices: Float[Array, ""]
    buffer_bytes: Float[Array, " die"]
    control: Float[Array, ""]  # s

    @property
    def dies(self) -> int:
        return self.machine.num_nodes

    @property
    def slice_bytes(self) -> Float[Array, ""]:
        """Of one micro-slice."""
        return self.costs.expert_bytes / (self.dies * self.micro_slices)

    @property
    def slots(self) -> Float[Array, ""]:
        """Micro-slices that the smallest buffer holds, with fractions."""
        return self.buffer_bytes.min() / self.slice_bytes

    @property
    def load(self) -> Float[Array, " channel"]:
        """Seconds of a DDR channel for one micro-slice, once its latency is over."""
        return self.slice_bytes / self.machine.memory[-1].bandwidth + self.control

    @property
    def send(self) -> Float[Array, "die die2"]:
        """Seconds from one die to another, all links of the path held meanwhile, for one micro-slice."""
        topology = self.machine.topology
        away = 1 - jnp.eye(self.dies)
        return self.slice_bytes * send_slowness(topology) + send_latency(topology) + away * self.control

    def compute(self, tokens: Float[Array, "expert die"]) -> Float[Array, "expert die"]:
        """Seconds of one micro-slice of every expert on every die; none without tokens."""
        return self.part(tokens, 1 / (self.dies * self.micro_slices))

    def whole(self, tokens: Float[Array, "expert die"]) -> Float[Array, "expert die"]:
        """Seconds of whole experts that are not cut."""
        return self.part(tokens, jnp.ones(()))

    def part(self, tokens: Float[Array, "expert die"], part: Float[Array, ""]) -> Float[Array, "expert die"]:
        """Seconds of this part of every expert, in one piece; none without tokens."""
        costs, die = self.costs, self.machine.die
        present = (tokens > 0).astype(tokens.dtype)
        rate = die.flops / costs.flops_per_token_expert
        if die.gemm is None:
            return present * self.control + tokens * part / rate
        parts = jnp.broadcast_to(part, tokens.shape)
        return present * self.control + die.gemm.seconds(tokens, parts, present, rate, costs.columns, costs.gemms)


def send_slowness(topology: AbstractTopology) -> Float[Array, "die die2"]:
    """Seconds for each byte between dies: of the slowest port or link on the way."""
    slowest = path_maxima(topology, 1 / topology.link_rate)
    away = 1 - jnp.eye(topology.num_nodes)
    for port, axis in ((topology.injection_rate, 1), (topology.ejection_rate, 0)):
        if port is not None:
            slowest = jnp.maximum(slowest, jnp.expand_dims(1 / port, axis))
    return away * slowest


def send_latency(topology: AbstractTopology) -> Float[Array, "die die2"]:
    """Seconds of all hops between dies, and of the end points."""
    away = 1 - jnp.eye(topology.num_nodes)
    return path_sums(topology, topology.link_latency) + away * topology.endpoint_latency


class Asked(NamedTuple):
    """What every expert, or group of them, asks for."""

    slices: Float[Array, " group"]  # micro-slices in all
    load: Float[Array, "group channel"]  # s
    compute: Float[Array, "group die"]  # s
    move: Float[Array, "group resource"]  # s of senders, receivers and links
    stops: Float[Array, " group"]  # dies that a micro-slice passes, at most
    first: Float[Array, " group"]  # s until the first micro-slice is there
    hold: Float[Array, " group"]  # slot-seconds of a micro-slice, where it never waits
    round: Float[Array, " group"]  # s that a micro-slice takes to its last die, where it never waits
    one: Float[Array, "group die"]  # s that each die computes a micro-slice
    covers: Float[Array, "group die"]  # 1 at the dies that compute it
    held: Float[Array, " group"]  # micro-slices that are on their dies from the start


class StreamTime(NamedTuple):
    """Seconds in all; busy seconds of channels, of arrays, and of senders, receivers and links."""

    seconds: Float[Array, ""]
    load: Float[Array, " channel"]
    compute: Float[Array, " die"]
    move: Float[Array, " resource"]


def asked_of(
    costs: StreamCosts,
    tokens: Float[Array, "expert die"],
    needed: Float[Array, "expert die"],
    following: Float[Array, "expert die die2"],
    loaders: Float[Array, "expert die"],
    balanced: bool = False,
    held: Float[Array, "expert die"] | None = None,
) -> Asked:
    """What every expert asks for, along its trajectory; `loaders` are the parts of it that the dies load.

    `balanced`, loads go to dies with tokens in equal parts, whichever channel they come from (rule 5). Of the
    micro-slices of every die so many are `held` from the start.
    """
    dies = costs.dies
    stops = needed.sum(axis=1)
    active = (stops > 0).astype(needed.dtype)
    slices = active * dies * costs.micro_slices
    parts = needed / jnp.maximum(stops, 1)[:, None] if balanced else loaders
    outside = parts * (1 - needed)
    # Micro-slices that begin at a die: its own, and those that dies without tokens have loaded.
    entering = slices[:, None] * (parts * needed + jnp.einsum("ed,edf->ef", outside, following))
    ends = jnp.einsum("edf,ef->ed", following, entering)  # those that end at the die before
    sent = needed * (slices[:, None] - ends) + slices[:, None] * outside
    traffic = sent[:, :, None] * following
    each, one = costs.send, costs.compute(tokens)
    busy = traffic * each
    links = jax.vmap(lambda moved: link_loads(costs.machine.topology, moved * each))(traffic)
    channel, held = costs.machine.memory[-1].channel, jnp.zeros_like(loaders) if held is None else held
    onto = jax.nn.one_hot(channel, costs.load.shape[0], dtype=loaders.dtype)
    # The last micro-slice goes round: at every stop it is sent on while it is computed.
    hop = jnp.einsum("edf,df->ed", following, each)
    around = (needed * hop).sum(axis=1) * (1 - 1 / jnp.maximum(stops, 1))
    return Asked(
        slices=slices,
        load=((slices[:, None] * loaders - held) @ onto) * costs.load,
        compute=slices[:, None] * one,
        move=jnp.concatenate([busy.sum(axis=2), busy.sum(axis=1), links], axis=1),
        stops=active * stops + jnp.minimum(outside.sum(axis=1) * 1e6, 1),
        first=active * costs.load.max(),
        hold=active * (costs.load.max() + (needed * (jnp.maximum(one, hop) + hop)).sum(axis=1)),
        round=around,
        one=needed * one,
        covers=needed,
        held=held.sum(axis=1),
    )


@jax.custom_jvp
def _largest(values: Float[Array, "each of"]) -> Float[Array, " of"]:
    """The largest of each column; its slope is that of the first such value.

    JAX's own asks which values equal the largest, and is NaN where XLA works them out twice and rounds otherwise.
    """
    return values.max(axis=0)


@_largest.defjvp
def _largest_slope(values: tuple[Array], changes: tuple[Array]) -> tuple[Array, Array]:
    first = values[0].argmax(axis=0, keepdims=True)
    return _largest(values[0]), jnp.take_along_axis(changes[0], first, axis=0)[0]


def grouped(asked: Asked, members: Float[Array, "group expert"]) -> Asked:
    """The same for groups, whose micro-slices are loaded in turns; members may be relaxed."""
    weight = members * asked.slices
    weight = weight / jnp.maximum(weight.sum(axis=1, keepdims=True), 1)
    most = jax.vmap(lambda member, each: _largest(member[:, None] * each), (0, None))
    return Asked(
        slices=members @ asked.slices,
        load=members @ asked.load,
        compute=members @ asked.compute,
        move=members @ asked.move,
        stops=weight @ asked.stops,
        first=most(members, asked.first[:, None])[:, 0],
        hold=weight @ asked.hold,
        round=most(members, asked.round[:, None])[:, 0],
        one=most(members, asked.one),
        covers=jnp.minimum(members @ asked.covers, 1),
        held=members @ asked.held,
    )


class _State(NamedTuple):
    """When each resource is free; micro-slices loaded so far, and when those before had left, by part."""

    load: Float[Array, " channel"]
    compute: Float[Array, " die"]
    move: Float[Array, " resource"]
    done: Float[Array, ""]
    loaded: Float[Array, ""]
    counts: Float[Array, " part"]
    left: Float[Array, " part"]
    remaining: Bool[Array, " group"]
    chosen: Int[Array, ""]  # the group whose parts are loaded
    present: Bool[Array, ""]  # whether that one has tokens, and was not loaded before
    before: Float[Array, ""]  # when the groups before it were done


def stream_time(
    costs: StreamCosts,
    asked: Asked,
    matched: bool = False,
    in_turn: bool = False,
    balanced: bool = False,
    parts: int = PARTS,
    reduction: AbstractReduction | None = None,
) -> StreamTime:
    """Time of groups in their order, or `matched` to idle dies (Algorithm 1). `vmap` adds machines and batches.

    `in_turn` groups begin when those before are computed; `balanced`, loads go where there is room (rule 5).
    """
    busy = asked.compute.sum(axis=0)
    asked, sending = _hindered(costs, asked, in_turn, balanced)
    most = HardMax() if reduction is None else reduction
    groups, dies = asked.compute.shape
    state = _State(
        load=costs.machine.memory[-1].latency,
        compute=jnp.zeros(dies),
        move=jnp.zeros(asked.move.shape[1]),
        done=jnp.zeros(()),
        loaded=jnp.zeros(()),
        counts=jnp.full(groups * parts + 1, jnp.inf).at[0].set(0),
        left=jnp.zeros(groups * parts + 1),
        remaining=asked.slices > 0,
        chosen=jnp.zeros((), int),
        present=jnp.zeros((), bool),
        before=jnp.zeros(()),
    )

    def step(state: _State, place: Int[Array, ""]) -> tuple[_State, None]:
        index = place // parts
        first = place % parts == 0
        chosen = jnp.where(first, _idle_first(state, asked) if matched else index, state.chosen)
        before = jnp.where(first, state.done, state.before)
        group = jax.tree.map(lambda leaf: leaf[chosen], asked)
        present = jnp.where(first, state.remaining[chosen], state.present)
        after = _part(costs, state._replace(before=before), group, place + 1, parts, in_turn, sending, most)
        state = jax.tree.map(lambda new, old: jnp.where(present, new, old), after, state)
        remaining = state.remaining.at[chosen].set(False)
        return state._replace(chosen=chosen, present=present, before=before, remaining=remaining), None

    state, _ = jax.lax.scan(step, state, jnp.arange(groups * parts))
    return StreamTime(state.done, asked.load.sum(axis=0), busy, asked.move.sum(axis=0))


def _hindered(costs: StreamCosts, asked: Asked, in_turn: bool, balanced: bool) -> tuple[Asked, float]:
    """What arrays take when they are not always fed, and the part of the time that senders are busy at most.

    Experts that come in turn go round in step. A channel that dies share is never idle for one of them.
    """
    if in_turn:
        return asked, 1.0
    dies = costs.dies
    if balanced or asked.load.shape[1] < dies:
        return asked, ANY_DIE
    own = asked.load[:, costs.machine.memory[-1].channel]
    late = LATE * jnp.maximum(own - asked.compute / dies, 0) * (asked.compute > 0)
    return asked._replace(compute=asked.compute / FED + late), BOTH_WAYS if dies > 4 else ONE_WAY


def _idle_first(state: _State, asked: Asked) -> Int[Array, ""]:
    """The first group left that has tokens on a die whose array is idle when the next load begins; else the first."""
    idle = (state.compute <= state.load.min()).astype(asked.covers.dtype)
    suits = state.remaining & (asked.covers @ idle > 0)
    return jnp.argmax(jnp.where(suits.any(), suits, state.remaining))


def _left(state: _State, count: Float[Array, ""]) -> Float[Array, ""]:
    """When so many micro-slices had left, as far as that is known."""
    return jnp.where(count > 0, jnp.interp(count, state.counts, state.left), 0)


def _part(
    costs: StreamCosts,
    state: _State,
    group: Asked,
    place: Array,
    parts: int,
    in_turn: bool,
    sending: float,
    most: AbstractReduction,
) -> _State:
    """One of `parts` equal parts of a group."""
    slices = group.slices / parts
    # Slots that loads may fill: those that the rest of the trajectory needs stay free.
    room = costs.dies * jnp.maximum(costs.slots - group.stops + 1, 1)
    loaded = state.loaded + slices
    takes = group.load > 0
    begin = jnp.maximum(state.load, state.before if in_turn else _left(state, state.loaded - room))
    # A micro-slice keeps its slot while it is loaded and goes round, so buffers limit how many come (Little's law).
    pace = slices * group.hold / (costs.dies * costs.slots)
    load = jnp.maximum(begin + jnp.maximum(group.load / parts, pace), _left(state, loaded - room) + group.first)
    load = jnp.where(takes, load, state.load)
    there = jnp.where(group.held > 0, 0.0, jnp.where(takes, begin, jnp.inf).min() + group.first)
    end = most(jnp.where(takes, load, 0))
    move = jnp.where(group.move > 0, jnp.maximum(state.move, there) + group.move / parts / sending, state.move)
    compute = jnp.where(group.covers > 0, jnp.maximum(state.compute, there) + group.compute / parts, state.compute)
    # The last loaded has to go round; when all moves are done it is where it ends, and is computed there.
    arrived = jnp.maximum(end + group.round, most(jnp.where(group.move > 0, move, 0)))
    left = most(jnp.where(group.covers > 0, jnp.maximum(compute, arrived + group.one), 0))
    return state._replace(
        load=load,
        compute=compute,
        move=move,
        done=jnp.maximum(state.done, left),
        loaded=loaded,
        counts=state.counts.at[place].set(loaded),
        left=state.left.at[place].set(left),
    )
