"""Which die computes which requests of which expert: round-robin dealing, and Algorithm 1 of the wafer-scale study.

Both deal the requests of a layer in blocks (IV-D5). `deal` is the study's base, which knows nothing of where weights
are. `allocate` is Algorithm 1: of the dies that hold an expert and their neighbours, the least loaded, and of these for
every block the cheapest.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
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


_Totals = tuple[Array, Array, Array]  # experts read, hops, and requests of every die


def allocate(
    counts: Int[Array, " expert"],
    holders: Bool[Array, "expert die"],
    home: Int[Array, " expert"],
    hops: Int[Array, "die die2"],
    costs: AllocationCosts,
    block: int = BLOCK,
    spare: int = SPARE,
    free: Float[Array, "expert die"] | None = None,
) -> Int[Array, "expert die"]:
    """Algorithm 1 on the counts of one layer; `holders` have the expert in their HBM. Choices are made one by one.

    Experts come in the order of their numbers. Candidates are dies with the expert and those one hop from any; the
    `max_split` of fewest requests stay, of equals the lowest. Each block goes where the cost is least, of equals to the
    lowest die: the seconds of all that the die has been given, one thing after the other, with this block. `free` is
    the part of an expert that a die need not read from DRAM, such as what its LLC has. `vmap` adds layers and batches.
    """
    near = (jnp.asarray(hops) <= 1).astype(costs.dram.dtype)
    dies, index = near.shape[0], jnp.arange(near.shape[0])
    candidates = (holders.astype(near.dtype) @ near) > 0
    away = jnp.where(holders, 0, jnp.asarray(hops)[home])  # hops that a read takes
    fresh = jnp.ones(holders.shape, near.dtype) if free is None else 1 - free
    splits = max_split(counts, block, spare)

    def expert(carry: _Totals, given: tuple[Array, Array, Array, Array, Array]) -> tuple[_Totals, Array]:
        reads, hopped, load = carry
        count, candidate, away, fresh, split = given
        before = (load < load[:, None]) | ((load == load[:, None]) & (index < index[:, None]))
        kept = candidate & ((before & candidate).sum(axis=1) < split)

        def one(state: tuple[Array, Array]) -> tuple[Array, Array]:
            left, taken = state
            size = jnp.minimum(left, block)
            cost = (reads + fresh) * costs.dram + (hopped + away) * costs.hop + (load + taken + size) * costs.request
            best = jnp.argmin(jnp.where(kept, cost, jnp.inf))
            return left - size, taken + jnp.where(index == best, size, 0)

        _, taken = jax.lax.while_loop(lambda state: state[0] > 0, one, (count, jnp.zeros_like(load)))
        used = taken > 0
        return (reads + used * fresh, hopped + used * away, load + taken), taken

    start = jnp.zeros(dies, near.dtype), jnp.zeros(dies, away.dtype), jnp.zeros(dies, counts.dtype)
    return jax.lax.scan(expert, start, (counts, candidates, away, fresh, splits))[1]
