"""Slices of experts that a die reads in turn, with so many reads outstanding, and computes when they are there.

The wafer-scale study simulates "at expert slice granularity", with "contention and congestion" (V-A). So a slice waits
for HBM and for every link until those that came before it have passed. Time is a recurrence over the moves of slices,
the earliest of all dies first. What asks for a slice waits for no data.
"""

from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine.demand import FLOPS, AbstractDemand, Usage
from jaxmoe.engine.fetch import FetchCosts, Fetches, Reads
from jaxmoe.engine.times import COMPUTE, NODE
from jaxmoe.hardware import Machine
from jaxmoe.hardware.paths import path_lengths
from jaxmoe.network.loads import path_sums
from jaxmoe.relax import AbstractReduction


class ReadsInTurn(AbstractDemand):
    """Reads of whole slices and their products. A die asks for a slice when the one `outstanding` before it is there.

    Each die begins with another expert and goes on in the order of their numbers. Slices are stored and forwarded, or
    `cut_through` every link: then the head moves on as soon as it is served, and the tail holds each link.
    """

    server = "machine"
    fetches: Fetches
    reads: Reads
    outstanding: int = eqx.field(static=True)
    cut_through: bool = eqx.field(static=True)

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        known, costs = self.reads.usage(machine, reduction), self.reads.costs
        flops = self.fetches.requests.sum(axis=0) * costs.flops_per_request
        node = flops / machine.die.flops
        trip = _Trips.of(machine, self.fetches, costs)
        return replace(
            known,
            seconds=_last_moment(trip, self.outstanding, self.cut_through).astype(known.seconds.dtype),
            busy=known.busy | {NODE: node, COMPUTE: node},
            amount=known.amount | {FLOPS: flops},
        )


class _Slice(NamedTuple):
    """One slice that a die reads, or several of them."""

    exists: Bool[Array, "*slice"]
    asked: Float[Array, "*slice"]  # s until its first server is asked
    source: Int[Array, "*slice"]
    hit: Bool[Array, "*slice"]
    copied: Bool[Array, "*slice"]
    product: Float[Array, "*slice"]  # s


class _Trips(eqx.Module):
    """Reads of every die, in its order, and servers on the way: links, channels of HBM, and those of the LLC."""

    expert: Int[Array, "die turn"]  # those with requests come first
    count: Int[Array, " die"]  # slices
    size: Float[Array, ""]  # B of a slice
    fetches: Fetches
    costs: FetchCosts
    request: Float[Array, " die"]  # s of one request's product with a slice
    asks: Float[Array, "die die2"]  # s from who asks to a source
    first: Int[Array, "die 2"]  # numbers of the HBM and LLC channels of a die
    rate: Float[Array, " server"]
    latency: Float[Array, " server"]
    links: Int[Array, " hop"]
    begin: Int[Array, " pair"]
    hops: Int[Array, "die die2"]

    @classmethod
    def of(cls, machine: Machine, fetches: Fetches, costs: FetchCosts) -> "_Trips":
        topology, llc, hbm = machine.topology, machine.memory[0], machine.memory[-1]
        experts, dies = fetches.requests.shape
        turn = (jnp.arange(experts)[:, None] - jnp.arange(dies) * experts // dies) % experts
        present = fetches.requests > 0
        slices = jnp.round(costs.slices).astype(int)
        hops, lengths = topology.hops(), jnp.asarray(path_lengths(topology.hops(), dies))
        ends = jnp.cumsum(lengths.ravel())
        number = jax.dtypes.canonicalize_dtype(float)
        return cls(
            expert=jnp.argsort(jnp.where(present, turn, experts + turn), axis=0).T,
            count=present.sum(axis=0) * slices,
            size=costs.expert_bytes / costs.slices,
            fetches=fetches,
            costs=costs,
            request=costs.flops_per_request / costs.slices / machine.die.flops,
            asks=path_sums(topology, topology.link_latency + costs.request_bytes / topology.link_rate),
            first=topology.num_links + jnp.stack([hbm.channel, hbm.bandwidth.shape[0] + llc.channel], axis=1),
            rate=jnp.concatenate([topology.link_rate, hbm.bandwidth, llc.bandwidth]).astype(number),
            latency=jnp.concatenate([topology.link_latency, hbm.latency, 0 * llc.latency]).astype(number),
            links=jnp.asarray(hops.link),
            begin=ends - lengths.ravel(),
            hops=lengths,
        )

    def slice(self, die: Int[Array, "*slice"], number: Int[Array, "*slice"]) -> _Slice:
        """The slice that a die reads as its `number`th."""
        asked, each = self.fetches, jnp.round(self.costs.slices).astype(int)
        expert = self.expert[die, jnp.minimum(number // each, self.expert.shape[1] - 1)]
        hits = jnp.zeros(()) if asked.hits is None else asked.hits[expert, die]
        hit = number % each < jnp.round(hits * each)
        away = (asked.local[expert, die] <= 0) & ~hit
        source = jnp.where(away, asked.home[expert], die)
        return _Slice(
            exists=number < self.count[die],
            asked=jnp.where(hit, self.costs.hit, self.costs.miss + self.asks[die, source]),
            source=source,
            hit=hit,
            copied=away & (asked.copied[expert, die] > 0),
            product=asked.requests[expert, die] * self.request[die],
        )


class _Moment(NamedTuple):
    """Where the reads of all dies are: each read's slice, how many servers it has passed, and when it comes to the next
    one, s; infinite where nothing is left to read. Then until when servers and dies are busy."""

    number: Int[Array, " read"]
    passed: Int[Array, " read"]
    time: Float[Array, " read"]  # of the head
    tail: Float[Array, " read"]
    free: Float[Array, " server"]
    done: Float[Array, " die"]
    written: Float[Array, ""]


def _last_moment(trips: _Trips, outstanding: int, cut_through: bool) -> Float[Array, ""]:
    """When the last product is done and the last copy written, s."""
    dies = len(trips.count)
    numbers, die_of = jnp.divmod(jnp.arange(dies * outstanding), dies)  # at equal moments the earlier slice is first

    def ask(die: Array, number: Array, now: Array) -> Array:
        wanted = trips.slice(die, number)
        return jnp.where(wanted.exists, now + wanted.asked, jnp.inf)

    def move(at: _Moment) -> _Moment:
        """The earliest read moves on: it passes a server, or is there, and its die asks for another."""
        read = jnp.argmin(at.time)
        die, now, passed = die_of[read], at.time[read], at.passed[read]
        own = trips.slice(die, at.number[read])
        pair, hops = own.source * dies + die, trips.hops[own.source, die]
        there = passed > hops
        link = trips.links[jnp.clip(trips.begin[pair] + passed - 1, 0, len(trips.links) - 1)]
        server = jnp.where(passed == 0, trips.first[own.source, own.hit.astype(int)], link)
        begin = jnp.maximum(now, at.free[server])
        end = begin + trips.size / trips.rate[server]
        if cut_through:
            end = jnp.maximum(end, at.tail[read])
        whole = (passed == hops) | (not cut_through)
        head = jnp.where(whole, end, begin) + trips.latency[server]
        following = at.number[read] + outstanding
        # A copy is written into the HBM of the die.
        store = trips.first[die, 0]
        written = jnp.maximum(now + trips.costs.write, at.free[store]) + trips.size / trips.rate[store]
        served, kept = ~there, there & own.copied
        free = at.free.at[server].set(jnp.where(served, end, at.free[server]))
        return _Moment(
            number=at.number.at[read].set(jnp.where(there, following, at.number[read])),
            passed=at.passed.at[read].set(jnp.where(there, 0, passed + 1)),
            time=at.time.at[read].set(jnp.where(there, ask(die, following, now), head)),
            tail=at.tail.at[read].set(jnp.where(there, 0.0, end + trips.latency[server])),
            free=free.at[store].set(jnp.where(kept, written, free[store])),
            done=at.done.at[die].set(jnp.where(there, jnp.maximum(at.done[die], now) + own.product, at.done[die])),
            written=jnp.where(kept, jnp.maximum(at.written, written + trips.latency[store]), at.written),
        )

    nothing = jnp.zeros_like(trips.rate)
    start = ask(die_of, numbers, jnp.zeros((), trips.rate.dtype)).astype(trips.rate.dtype)
    begun = _Moment(
        numbers,
        jnp.zeros_like(numbers),
        start,
        jnp.zeros_like(start),
        nothing,
        nothing[:dies],
        jnp.zeros_like(start[0]),
    )
    ended = jax.lax.while_loop(lambda at: jnp.isfinite(at.time).any(), move, begun)
    return jnp.maximum(ended.done.max(), ended.written)
