"""Experts that dies fetch from another die's memory: who reads what, and how long channels and links are busy with it.

The machine of the wafer-scale study of data movement (IV, V-A): weights stay in the HBM of their home dies, and a die
that computes another die's expert reads it over the mesh, once a layer, unless it has a copy. Hidden vectors are not
counted, as in the paper, whose data path is of weights alone.
"""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.engine.demand import LINK_BYTES, AbstractDemand, Usage
from jaxmoe.hardware import Machine, MemoryLevel
from jaxmoe.network.loads import link_loads, path_maxima, path_sums
from jaxmoe.relax import AbstractReduction, AbstractSupport, as_number

Figures = Mapping[str, Float[Array, "*lead"]]
"""Figures of what moved, by name: hops, and bytes by source."""


class FetchCosts(eqx.Module):
    """Bytes, FLOPs and cache latencies, s, of reading and computing one expert; latencies are of the study's Table I.

    Every slice of an expert that a die reads from a remote die takes a request of `request_bytes`. `hit` is the
    latency of the last-level cache (LLC), `miss` its penalty before HBM is read, and `write` the latency of writing
    remote data into the LLC.
    """

    expert_bytes: Float[Array, ""] = eqx.field(converter=as_number)  # B
    flops_per_request: Float[Array, ""] = eqx.field(converter=as_number)
    slices: Float[Array, ""] = eqx.field(default=2.0, converter=as_number)  # of an expert
    request_bytes: Float[Array, ""] = eqx.field(default=16.0, converter=as_number)  # B
    hit: Float[Array, ""] = eqx.field(default=100e-9, converter=as_number)
    miss: Float[Array, ""] = eqx.field(default=110e-9, converter=as_number)
    write: Float[Array, ""] = eqx.field(default=30e-9, converter=as_number)


class Fetches(eqx.Module):
    """Who computes what in a layer, and from where it reads. Data, no times; `vmap` adds leading axes.

    `local` is 1 where a die has the expert in its own HBM: its home, or a copy from before the layer. `copied` is 1
    where what is read from afar is also written into the die's HBM. `hits` is the part of the expert that the LLC has.
    """

    requests: Float[Array, "*lead expert die"]
    home: Int[Array, "*lead expert"]
    local: Float[Array, "*lead expert die"]
    copied: Float[Array, "*lead expert die"]
    hits: Float[Array, "*lead expert die"] | None = None

    def reads(self, costs: FetchCosts, support: AbstractSupport) -> "Reads":
        """Who reads what from where. Relaxed by `support`, an expert is read to the degree that a die computes it.

        The support sees a die's part of the expert's requests, from 0 to 1.
        """
        requests = self.requests
        nodes = requests.shape[1]
        total = requests.sum(axis=1, keepdims=True)
        present = support.presence(support.amount(requests / jnp.maximum(total, 1)))
        hits = jnp.zeros_like(present) if self.hits is None else present * self.hits
        missed = present - hits
        asked = present if self.hits is None else present * (self.hits < 1)
        remote = missed * (1 - self.local)
        at_home = jax.nn.one_hot(self.home, nodes, dtype=requests.dtype)
        afar = at_home.T @ remote
        return Reads(
            reads=(afar + jnp.diag((missed * self.local).sum(axis=0))) * costs.expert_bytes,
            llc=hits.sum(axis=0) * costs.expert_bytes,
            writes=(remote * self.copied).sum(axis=0) * costs.expert_bytes,
            remote_slices=afar * costs.slices,
            experts=at_home.T @ (asked * (1 - self.local)) + jnp.diag((asked * self.local).sum(axis=0)),
            costs=costs,
        )


class Reads(AbstractDemand):
    """Experts that dies read from each other's HBM; `reads[h, d]` is what die d reads from the HBM of die h.

    The machine's first memory level is the LLC, its last the HBM of the dies. A die has its weights when the busiest of
    the channels and links on their ways is done.
    """

    server = "network"
    reads: Float[Array, "die die2"]  # B
    llc: Float[Array, " die"]  # B read from the LLC
    writes: Float[Array, " die"]  # B of copies written into a die's HBM
    remote_slices: Float[Array, "die die2"]
    experts: Float[Array, "die die2"]  # of which die d reads anything from the HBM of die h
    costs: FetchCosts

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        topology, llc, hbm, costs = machine.topology, machine.memory[0], machine.memory[-1], self.costs
        carried = link_loads(topology, self.reads + self.remote_slices.T * costs.request_bytes)
        link, moved = carried / topology.link_rate, self.reads.sum(axis=1) + self.writes
        channel, cache = _busy(hbm, moved), _busy(llc, self.llc)
        part = jnp.minimum(self.experts, 1)  # of an expert that is waited for, 1 unless relaxed
        own = jnp.diagonal(part)
        part = part + jnp.diag(jnp.minimum(self.writes / costs.expert_bytes, 1) * (own <= 0))
        waits = part * jnp.maximum(channel[hbm.channel][:, None], path_maxima(topology, link))
        first = part * _first_slice(machine, costs)
        delay = reduction(first.T)
        die = jnp.maximum(reduction(waits.T) + delay, (cache[llc.channel] + costs.hit) * (self.llc > 0))
        die = die + costs.write * (self.writes > 0)
        return Usage(
            seconds=reduction(die),
            busy={"link": link, hbm.name: channel, llc.name: cache},
            amount={LINK_BYTES: carried, hbm.name: moved, llc.name: self.llc},
            delay=reduction(delay),
        )

    def figures(self, machine: Machine) -> Figures:
        """Hops of all remote slices (V-D), and bytes by source (V-E)."""
        hops = jnp.asarray(machine.topology.hop_counts(), self.reads.dtype)
        own = jnp.diagonal(self.reads).sum()
        return {
            "hops": (hops * self.remote_slices).sum(),
            "local_read": own,
            "remote_read": self.reads.sum() - own,
            "local_write": self.writes.sum(),
            "llc_read": self.llc.sum(),
        }


def _busy(level: MemoryLevel, moved: Float[Array, " die"]) -> Float[Array, " channel"]:
    """Seconds of every channel for what its dies move, without latency, which is on the way of the first slice."""
    return jax.ops.segment_sum(moved, level.channel, level.bandwidth.shape[0]) / level.bandwidth


def _first_slice(machine: Machine, costs: FetchCosts) -> Float[Array, "die die2"]:
    """Latency of what die d reads from die h: a miss, the way of the request, HBM, and the way of the data."""
    hbm = machine.memory[-1]
    way = path_sums(machine.topology, machine.topology.link_latency)
    return costs.miss + hbm.latency[hbm.channel][:, None] + way + way.T
