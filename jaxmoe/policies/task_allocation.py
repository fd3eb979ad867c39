"""Which die computes which requests of which expert: round-robin dealing, and Algorithm 1 of the wafer-scale study.

Both deal the requests of a layer in blocks (IV-D5). `deal` is the study's base, which knows nothing of where weights
are. `allocate` is Algorithm 1: of the dies that hold an expert and their neighbours, the least loaded, and of these for
every block the cheapest.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.hardware import Machine
from jaxmoe.latency.fetch import FetchCosts
from jaxmoe.relax import as_number

BLOCK = 50  # requests, IV-D5
SPARE = 4  # candidates beyond one for each block: with it, a home and its neighbours are all tried


class AllocationCosts(eqx.Module):
    """Algorithm 1's cost model in fs: DRAM of an expert read, a hop of one read afar, and a request computed.

    Numbers of a machine whose dies are alike. A remote expert keeps each link on its way for `hop`. Whole femtoseconds
    add up exactly in float64, so that equal costs are equal in whatever order they are added: on the study's machines
    an expert's DRAM time is that of just 250 requests.
    """

    dram: Float[Array, ""] = eqx.field(converter=as_number)
    hop: Float[Array, ""] = eqx.field(converter=as_number)
    request: Float[Array, ""] = eqx.field(converter=as_number)

    @classmethod
    def of(cls, machine: Machine, costs: FetchCosts) -> "AllocationCosts":
        """From the machine's first die, link and HBM channel."""
        topology = machine.topology
        seconds = (
            costs.expert_bytes / machine.memory[-1].bandwidth[0],
            costs.expert_bytes / topology.link_bandwidth[0] + topology.link_latency[0],
            costs.flops_per_request / machine.die.flops[0],
        )
        return cls(*(jnp.round(each * 1e15) for each in seconds))


def deal(counts: Int[Array, " expert"], dies: int, block: int = BLOCK) -> Int[Array, "expert die"]:
    """Blocks of all experts in their order, one die after the other, whatever the data is: the study's base (V-A).

    Each kernel begins at die 0. The last block of an expert is what is left. Blocks of one expert that come to one die
    are one task: what the LLC has read for the first serves the next.
    """
    blocks = -(-counts // block)
    first = jnp.cumsum(blocks) - blocks
    turn = (jnp.arange(dies) - first[:, None]) % dies  # how many blocks later the die is first dealt one
    dealt = jnp.maximum(0, -(-(blocks[:, None] - turn) // dies))
    last = (first + blocks - 1) % dies
    short = (blocks * block - counts)[:, None] * (jnp.arange(dies) == last[:, None])
    return dealt * block - short


def max_split(counts: Int[Array, "*shape"], block: int = BLOCK, spare: int = SPARE) -> Int[Array, "*shape"]:
    """Dies among which an expert's blocks may go, from its requests: one for each block, and some to choose from.

    The study says that requests determine it, not how.
    """
    return -(-counts // block) + spare


_Totals = tuple[Array, Array]  # what the reads of every die take, and its requests


def allocate(
    counts: Int[Array, " expert"],
    holders: Bool[Array, "expert die"],
    home: Int[Array, " expert"],
    hops: Int[Array, "die die2"],
    costs: AllocationCosts,
    block: int = BLOCK,
    spare: int = SPARE,
    neighbours: int | None = None,
) -> Int[Array, "expert die"]:
    """Algorithm 1 on the counts of one layer; `holders` have the expert in their HBM. Choices are made one by one.

    Experts come in the order of their numbers. Candidates are dies with the expert and those one hop from any; the
    `max_split` of fewest requests stay, of equals the lowest. Each block goes where the cost is least, of equals to the
    lowest die: the time of all that the die has been given, one thing after the other, with this block. `vmap` adds
    layers and batches.

    Where homes alone hold experts, `neighbours`, the most dies within a hop of any (`widest`), spares all others: the
    same choices several times as fast.
    """
    dtype = costs.dram.dtype
    near = (jnp.asarray(hops) <= 1).astype(jnp.int32)
    dies = near.shape[0]
    if neighbours is None:
        candidate = jnp.broadcast_to(jnp.arange(dies, dtype=jnp.int32), holders.shape)
        valid = (holders.astype(dtype) @ near.astype(dtype)) > 0
    else:
        present, first = jax.lax.top_k(near, neighbours)  # in the order of their numbers
        candidate, valid = first.astype(jnp.int32)[home], present[home] > 0
    away = jnp.where(jnp.take_along_axis(holders, candidate, axis=1), 0, jnp.asarray(hops)[home[:, None], candidate])
    # What reading an expert adds to each candidate; sums of whole numbers, so in whatever order.
    read = jnp.where(valid, costs.dram + away.astype(dtype) * costs.hop, jnp.inf)
    asked, place = counts.astype(jnp.int32), jnp.arange(candidate.shape[1], dtype=jnp.int32)

    def expert(carry: _Totals, given: tuple[Array, Array, Array, Array]) -> tuple[_Totals, Array]:
        moved, load = carry
        count, die, read, split = given
        own = load[die]
        # Of fewest requests first, then of the lowest number; those that are no candidates last.
        order = jnp.where(jnp.isfinite(read), own * dies + die, jnp.iinfo(jnp.int32).max)
        before = (order < order[:, None]).sum(axis=1, dtype=jnp.int32)
        start = jnp.where(before < split, moved[die] + read, jnp.inf)

        def one(state: tuple[Array, Array]) -> tuple[Array, Array]:
            left, taken = state
            size = jnp.minimum(left, block)
            cost = start + (taken + size).astype(dtype) * costs.request
            # Comparing with the minimum is faster than argmin here.
            best = jnp.where(cost == cost.min(), place, place.size).min()
            return left - size, taken + jnp.where(place == best, size, 0)

        _, taken = jax.lax.while_loop(lambda state: state[0] > 0, one, (count, own))
        given_now = taken - own
        moved = moved.at[die].add(jnp.where(given_now > 0, read, 0), mode="promise_in_bounds")
        return (moved, load.at[die].add(given_now, mode="promise_in_bounds")), given_now

    totals = jnp.zeros(dies, dtype), jnp.zeros(dies, jnp.int32)
    _, dealt = jax.lax.scan(expert, totals, (asked, candidate, read, max_split(asked, block, spare)))
    rows = jnp.arange(len(home))[:, None]
    return jnp.zeros(holders.shape, counts.dtype).at[rows, candidate].add(dealt.astype(counts.dtype))


def widest(hops: Int[np.ndarray, "die die2"]) -> int:
    """The most dies within a hop of any die, itself among them: what `allocate` takes as `neighbours`."""
    return int((np.asarray(hops) <= 1).sum(axis=1).max())
