"""Which die computes which requests of which expert: round-robin dealing, homes, and Algorithm 1 of the wafer study.

Dealing and Algorithm 1 go by blocks of requests (IV-D5). `descended_allocation` has one by gradient.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxmoe.engine import FetchCosts
from jaxmoe.hardware import Machine
from jaxmoe.network.loads import path_sums

BLOCK = 50  # requests, IV-D5
SPARE = 4  # candidates beyond one for each block: with it, a home and its neighbours are all tried


class AllocationTask(NamedTuple):
    """A layer to allocate: requests of every expert, its home die, and which dies have it in their own HBM, 1 or 0.

    `hits` are the parts of experts that LLCs have.
    """

    counts: Int[Array, " expert"]
    home: Int[Array, " expert"]
    local: Shaped[Array, "expert die"]
    hits: Float[Array, "expert die"] | None = None

    @property
    def at_home(self) -> Int[Array, "expert die"]:
        """The requests of every expert at its home."""
        return self.counts[:, None] * (self.home[:, None] == jnp.arange(self.local.shape[1]))


Allocation = Callable[[AllocationTask], Int[Array, "expert die"]]  # requests of every expert on each die


class AllocationCosts(eqx.Module):
    """Algorithm 1's cost model in fs: an expert read from each die's HBM, its way from die to die, and a request.

    A remote expert keeps each link on its way for its bytes, and pays its latency. Whole femtoseconds add up exactly in
    float64, so that equal costs are equal in whatever order they are added: on the study's machines an expert's DRAM
    time is that of just 250 requests. A machine's numbers are float32, and so is each cost until it is rounded; what
    adds up is of the default precision.
    """

    dram: Float[Array, " die"]
    way: Float[Array, "die die2"]  # from a home to who reads it
    request: Float[Array, " die"]

    @classmethod
    def of(cls, machine: Machine, costs: FetchCosts) -> "AllocationCosts":
        topology, hbm = machine.topology, machine.memory[-1]
        rate = hbm.bandwidth[hbm.channel]
        size, flops = (jnp.asarray(number, rate.dtype) for number in (costs.expert_bytes, costs.flops_per_request))
        link = size / topology.link_rate + topology.link_latency
        dram, link, request = (
            jnp.round(seconds * 1e15).astype(float) for seconds in (size / rate, link, flops / machine.die.flops)
        )
        return cls(dram, path_sums(topology, link), request)


def deal(
    counts: Int[Array, " expert"], dies: int, block: int | Int[Array, " expert"] = BLOCK
) -> Int[Array, "expert die"]:
    """Deals blocks of all experts in order to one die after the other, wherever weights are: the study's base (V-A).

    Each kernel begins at die 0. The last block of an expert is what is left. Blocks of one expert that come to one die
    are one task: what the LLC has read for the first serves the next.
    """
    block = jnp.broadcast_to(jnp.asarray(block, counts.dtype), counts.shape)
    blocks = -(-counts // block)
    first = jnp.cumsum(blocks) - blocks
    turn = (jnp.arange(dies) - first[:, None]) % dies  # how many blocks later the die is first dealt one
    dealt = jnp.maximum(0, -(-(blocks[:, None] - turn) // dies))
    last = (first + blocks - 1) % dies
    short = (blocks * block - counts)[:, None] * (jnp.arange(dies) == last[:, None])
    return dealt * block[:, None] - short


class Dealt(eqx.Module):
    """The study's base, which ignores where weights are: blocks of `block` requests, dealt to dies in turn.

    With `split`, every expert comes to so many dies in equal parts, however many requests it has.
    """

    block: int = eqx.field(static=True, default=BLOCK)
    split: int | None = eqx.field(static=True, default=None)

    def __call__(self, task: AllocationTask) -> Int[Array, "expert die"]:
        block = self.block if self.split is None else jnp.maximum(1, -(-task.counts // self.split))
        return deal(task.counts, task.local.shape[1], block)


class AtHome(eqx.Module):
    """Every expert is computed where it lives: expert parallelism, with nothing fetched from afar."""

    def __call__(self, task: AllocationTask) -> Int[Array, "expert die"]:
        return task.at_home


def max_split(counts: Int[Array, "*shape"], block: int = BLOCK, spare: int = SPARE) -> Int[Array, "*shape"]:
    """Dies among which an expert's blocks may go, from its requests: one for each block, and some to choose from.

    The study says that requests determine it, not how.
    """
    return -(-counts // block) + spare


_Totals = tuple[Array, Array]  # what the reads of every die take, and its requests


class GreedyAllocation(eqx.Module):
    """Algorithm 1 of the wafer study, greedy: choices are made expert by expert, and of each block by block.

    Candidates are dies with the expert and those one hop from any; the `max_split` of fewest requests stay, of equals
    the lowest. Each block goes where the cost is least, of equals to the lowest die. `vmap` adds layers and batches.

    The text leaves three things open. `cost` is the time that the die then needs: `overlapped`, the longer of what it
    reads and of what it computes, or `serial`, their sum. `begin` is the workload that dies have at first: that of
    their own experts (`homes`), from which each expert is taken out when its turn comes, or none (`idle`). `order` is
    by the number of requests, fewest first, as a later edition of the paper prints it, or by the number of the expert.
    With these settings, the first of each, "most tasks are distributed to local dies holding related experts, with only
    extremely popular experts requiring remote allocation" (V-D).

    Where homes alone hold experts, `neighbours`, the most dies within a hop of any (`widest`), spares all others: the
    same choices several times as fast.
    """

    hops: Int[Array, "die die2"]
    costs: AllocationCosts
    block: int = eqx.field(static=True, default=BLOCK)
    spare: int = eqx.field(static=True, default=SPARE)
    cost: Literal["overlapped", "serial"] = eqx.field(static=True, default="overlapped")
    begin: Literal["homes", "idle"] = eqx.field(static=True, default="homes")
    order: Literal["ascending", "number"] = eqx.field(static=True, default="ascending")
    neighbours: int | None = eqx.field(static=True, default=None)

    def __call__(self, task: AllocationTask) -> Int[Array, "expert die"]:
        counts, home, local, hits = task
        holders, costs = local > 0, self.costs
        candidate, valid = self._candidates(holders, home)
        held = jnp.take_along_axis(holders, candidate, axis=1)
        read = jnp.where(held, costs.dram[candidate], costs.dram[home][:, None] + costs.way[home[:, None], candidate])
        if hits is not None:
            read = read * (1 - jnp.take_along_axis(hits.astype(read.dtype), candidate, axis=1))
        # What reading an expert adds to each candidate; sums of whole numbers, so in whatever order.
        read = jnp.where(valid, read, jnp.inf)
        asked = counts.astype(jnp.int32)
        at_home = jnp.where((asked > 0)[:, None] & (candidate == home[:, None]), read, 0).sum(axis=1)
        turns = jnp.arange(len(home))
        if self.order == "ascending":  # numbers that differ sort several times as fast as pairs
            turns = jnp.sort(asked.astype(int) * len(home) + turns) % len(home)
        totals = jnp.zeros(holders.shape[1], read.dtype), jnp.zeros(holders.shape[1], jnp.int32)
        if self.begin == "homes":
            totals = totals[0].at[home].add(at_home), totals[1].at[home].add(asked)
        split = max_split(asked, self.block, self.spare)
        given = (asked, candidate, read, split, home, at_home)
        _, dealt = jax.lax.scan(lambda *each: self._expert(*each), totals, tuple(each[turns] for each in given))
        empty = jnp.zeros(holders.shape, counts.dtype)
        place = empty.at[turns[:, None], candidate[turns]]
        return place.set(dealt.astype(counts.dtype), mode="promise_in_bounds", unique_indices=True)

    def _candidates(
        self, holders: Shaped[Array, "expert die"], home: Int[Array, " expert"]
    ) -> tuple[Int[Array, "expert candidate"], Shaped[Array, "expert candidate"]]:
        """Numbers of dies in their order, and whether they are candidates."""
        near = (jnp.asarray(self.hops) <= 1).astype(jnp.int32)
        if self.neighbours is None:
            candidate = jnp.broadcast_to(jnp.arange(near.shape[0], dtype=jnp.int32), holders.shape)
            return candidate, (holders.astype(jnp.float32) @ near.astype(jnp.float32)) > 0
        present, first = jax.lax.top_k(near, self.neighbours)
        return first.astype(jnp.int32)[home], present[home] > 0

    def _expert(self, carry: _Totals, given: tuple[Array, ...]) -> tuple[_Totals, Array]:
        """The blocks of one expert; the result is what each candidate is given."""
        moved, load = carry
        count, die, read, split, home, at_home = given
        # What the home had for it at first is taken out.
        at_first = (die == home) & (self.begin == "homes")
        begun, own = moved[die] - at_home * at_first, load[die] - count * at_first
        request, place = self.costs.request[die], jnp.arange(len(die), dtype=jnp.int32)
        # Of fewest requests first, then of the lowest number; those that are no candidates last.
        order = jnp.where(jnp.isfinite(read), own * len(moved) + die, jnp.iinfo(jnp.int32).max)
        before = (order < order[:, None]).sum(axis=1, dtype=jnp.int32)
        start = jnp.where(before < split, begun + read, jnp.inf)

        def one(state: tuple[Array, Array]) -> tuple[Array, Array]:
            left, taken = state
            size = jnp.minimum(left, self.block)
            computed = (taken + size).astype(read.dtype) * request
            cost = start + computed if self.cost == "serial" else jnp.maximum(start, computed)
            # Comparing with the minimum is faster than argmin here.
            best = jnp.where(cost == cost.min(), place, place.size).min()
            return left - size, taken + jnp.where(place == best, size, 0)

        _, taken = jax.lax.while_loop(lambda state: state[0] > 0, one, (count, own))
        given_now = taken - own
        read_now = jnp.where(given_now > 0, read, 0) - at_home * at_first
        moved, load = (
            total.at[die].add(more, mode="promise_in_bounds", unique_indices=True)
            for total, more in ((moved, read_now), (load, given_now - count * at_first))
        )
        return (moved, load), given_now


def widest(hops: Int[np.ndarray, "die die2"]) -> int:
    """The most dies within a hop of any die, itself among them: what `GreedyAllocation` takes as `neighbours`."""
    return int((np.asarray(hops) <= 1).sum(axis=1).max())
