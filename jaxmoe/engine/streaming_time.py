"""How long groups of experts take that stream through dies in micro-slices: a recurrence over the groups.

Source: expert_streaming_fse_dp section IV. Every group of experts asks for seconds of each DDR channel, of each die's
array, and of each sender, receiver and link between dies. All work on different groups at once, each in the order of
loading. A channel loads a group when it has loaded the ones before, and when the buffers of its dies have room: when as
many of its own micro-slices have left as these are short of. A closed form stands for the micro-slices of a group: the
slowest resource, plus filling (the first micro-slice has to be there) and draining (the last one goes round).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine.slices import SliceCosts
from jaxmoe.hardware import Machine
from jaxmoe.relax import AbstractReduction

PARTS = 4  # that the recurrence cuts a group into
# The part of the time that a sender is busy where transfers are what takes longest: each waits until its sender and
# its receiver are both idle. All dies are nearly in step on one ring, less so where rule 5 loads into any die, and
# least where rings run both ways, which those of more than four dies do.
ONE_WAY, ANY_DIE, BOTH_WAYS = 0.96, 0.9, 0.82
# The same of arrays, and the part of a channel's loads that are late where arrays are what takes longest: the busiest
# die puts off its own micro-slices while it gets others', so its buffer is full and its channel stalls. With rule 5
# there is always a die with room. All of these are calibrated on runs of the event simulator.
FED, LATE = 0.98, 0.16


class LoadRules(eqx.Module):
    """Rules that model and simulator each carry out.

    With `matched` the next group is one for an idle die (Algorithm 1), else the next in order. Groups `in_turn` begin
    when those before are computed. `balanced`, loads go where there is room (rule 5). Slices of dies may be `uncut`.
    `apart`, channels load different experts, so the buffers of each fill and empty by themselves; else all go in step.
    """

    matched: bool = eqx.field(static=True, default=True)
    in_turn: bool = eqx.field(static=True, default=False)
    balanced: bool = eqx.field(static=True, default=False)
    uncut: bool = eqx.field(static=True, default=False)
    apart: bool = eqx.field(static=True, default=False)

    @property
    def parts(self) -> int:
        """Parts of a group that the recurrence goes through."""
        return 1 if self.uncut else PARTS


class SliceDemand(NamedTuple):
    """Demand of every expert, or of every group of experts, for channels, arrays, senders, receivers and links."""

    slices: Float[Array, " group"]  # micro-slices in all
    load: Float[Array, "group channel"]  # s
    into: Float[Array, "group lane"]  # micro-slices into the buffers of a channel's dies, or into all where in step
    compute: Float[Array, "group die"]  # s
    move: Float[Array, "group resource"]  # s of senders, receivers and links
    stops: Float[Array, " group"]  # dies that a micro-slice passes, at most
    first: Float[Array, " group"]  # s until the first micro-slice is there
    hold: Float[Array, " group"]  # slot-seconds of a micro-slice, where it never waits
    round: Float[Array, " group"]  # s that a micro-slice takes to its last die, where it never waits
    one: Float[Array, "group die"]  # s that each die computes a micro-slice
    covers: Float[Array, "group die"]  # 1 at the dies that compute it
    held: Float[Array, " group"]  # micro-slices that are on their dies from the start


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


def grouped(asked: SliceDemand, members: Float[Array, "group expert"]) -> SliceDemand:
    """The demand of groups, whose micro-slices are loaded in turns; members may be relaxed."""
    weight = members * asked.slices
    weight = weight / jnp.maximum(weight.sum(axis=1, keepdims=True), 1)
    most = jax.vmap(lambda member, each: _largest(member[:, None] * each), (0, None))
    return SliceDemand(
        slices=members @ asked.slices,
        load=members @ asked.load,
        into=members @ asked.into,
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
    """When each resource is free; micro-slices of a lane so far, and when those before had left, by part.

    A lane is a channel where these run apart, or all of them.
    """

    load: Float[Array, " channel"]
    compute: Float[Array, " die"]
    move: Float[Array, " resource"]
    done: Float[Array, ""]
    loaded: Float[Array, " lane"]
    counts: Float[Array, "part lane"]
    left: Float[Array, "part lane"]
    remaining: Bool[Array, " group"]
    chosen: Int[Array, ""]  # the group whose parts are loaded
    present: Bool[Array, ""]  # whether that one has tokens, and was not loaded before
    before: Float[Array, ""]  # when the groups before it were done


def stream_seconds(
    machine: Machine, costs: SliceCosts, asked: SliceDemand, rules: LoadRules, reduction: AbstractReduction
) -> Float[Array, ""]:
    """Time of groups in their order, or matched to idle dies, s. `vmap` adds machines and batches."""
    asked, sending = _hindered(machine, costs, asked, rules)
    parts = rules.parts
    (groups, dies), lanes = asked.compute.shape, asked.into.shape[1]
    state = _State(
        load=machine.memory[-1].latency,
        compute=jnp.zeros(dies),
        move=jnp.zeros(asked.move.shape[1]),
        done=jnp.zeros(()),
        loaded=jnp.zeros(lanes),
        counts=jnp.full((groups * parts + 1, lanes), jnp.inf).at[0].set(0),
        left=jnp.zeros((groups * parts + 1, lanes)),
        remaining=asked.slices > 0,
        chosen=jnp.zeros((), int),
        present=jnp.zeros((), bool),
        before=jnp.zeros(()),
    )

    def step(state: _State, place: Int[Array, ""]) -> tuple[_State, None]:
        index = place // parts
        first = place % parts == 0
        chosen = jnp.where(first, _idle_first(state, asked) if rules.matched else index, state.chosen)
        before = jnp.where(first, state.done, state.before)
        group = jax.tree.map(lambda leaf: leaf[chosen], asked)
        present = jnp.where(first, state.remaining[chosen], state.present)
        after = _part(costs, state._replace(before=before), group, place + 1, rules, sending, reduction)
        state = jax.tree.map(lambda new, old: jnp.where(present, new, old), after, state)
        remaining = state.remaining.at[chosen].set(False)
        return state._replace(chosen=chosen, present=present, before=before, remaining=remaining), None

    state, _ = jax.lax.scan(step, state, jnp.arange(groups * parts))
    return state.done


def _hindered(machine: Machine, costs: SliceCosts, asked: SliceDemand, rules: LoadRules) -> tuple[SliceDemand, float]:
    """The demand with the array time that late micro-slices add, and the largest share of time that a sender is busy.

    Nothing is added under rule `in_turn`, where all experts move round the dies in step, under rule `balanced`, nor
    where dies share memory channels: then a channel never waits for one of its dies.
    """
    if rules.in_turn:
        return asked, 1.0
    dies = costs.dies
    if rules.balanced or asked.load.shape[1] < dies:
        return asked, ANY_DIE
    own = asked.load[:, machine.memory[-1].channel]
    late = LATE * jnp.maximum(own - asked.compute / dies, 0) * (asked.compute > 0)
    return asked._replace(compute=asked.compute / FED + late), BOTH_WAYS if dies > 4 else ONE_WAY


def _idle_first(state: _State, asked: SliceDemand) -> Int[Array, ""]:
    """The first group left that has tokens on a die whose array is idle when the next load begins; else the first."""
    idle = (state.compute <= state.load.min()).astype(asked.covers.dtype)
    suits = state.remaining & (asked.covers @ idle > 0)
    return jnp.argmax(jnp.where(suits.any(), suits, state.remaining))


def _left(state: _State, count: Float[Array, " lane"]) -> Float[Array, " lane"]:
    """When so many micro-slices of each lane had left, as far as that is known."""
    known = jax.vmap(jnp.interp, (0, 1, 1))(count, state.counts, state.left)
    return jnp.where(count > 0, known, 0)


def _part(
    costs: SliceCosts,
    state: _State,
    group: SliceDemand,
    place: Array,
    rules: LoadRules,
    sending: float,
    most: AbstractReduction,
) -> _State:
    """One of the equal parts of a group."""
    parts = rules.parts
    slices = group.into / parts
    # Slots that loads may fill: those that the rest of the trajectory needs stay free.
    dies = costs.dies / group.into.shape[0]  # of a lane
    room = dies * jnp.maximum(costs.slots - group.stops + 1, 1)
    loaded = state.loaded + slices
    takes = group.load > 0
    begin = jnp.maximum(state.load, state.before if rules.in_turn else _left(state, state.loaded - room))
    # A micro-slice keeps its slot while it is loaded and goes round, so buffers limit how many come (Little's law).
    pace = slices * group.hold / (dies * costs.slots)
    load = jnp.maximum(begin + jnp.maximum(group.load / parts, pace), _left(state, loaded - room) + group.first)
    load = jnp.where(takes, load, state.load)
    there = jnp.where(group.held > 0, 0.0, jnp.where(takes, begin, jnp.inf).min() + group.first)
    end = jnp.where(takes, load, 0)
    end = end if rules.apart else most(end)[None]
    move = jnp.where(group.move > 0, jnp.maximum(state.move, there) + group.move / parts / sending, state.move)
    compute = jnp.where(group.covers > 0, jnp.maximum(state.compute, there) + group.compute / parts, state.compute)
    # The last that a lane loads has to go round; when all moves are done it is where it ends, and is computed there.
    arrived = jnp.maximum(end + group.round, most(jnp.where(group.move > 0, move, 0)))

    def computed(there: Float[Array, ""]) -> Float[Array, ""]:
        return most(jnp.where(group.covers > 0, jnp.maximum(compute, there + group.one), 0))

    left = jax.vmap(computed)(arrived)
    return state._replace(
        load=load,
        compute=compute,
        move=move,
        done=jnp.maximum(state.done, most(left)),
        loaded=loaded,
        counts=state.counts.at[place].set(loaded),
        left=state.left.at[place].set(jnp.where(slices > 0, left, state.left[place - 1])),
    )
