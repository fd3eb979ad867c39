"""Slices of experts: how long a die's memory, array and links take for a part of an expert.

Source: expert_streaming_fse_dp section IV. Every die has an equal slice of an expert, cut into micro-slices.
"""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.demand import FLOPS, LINK_BYTES, Usage, moved_bytes
from jaxmoe.engine.lowering import LayerCosts
from jaxmoe.engine.times import COMPUTE, NODE
from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.network.loads import link_loads, path_maxima, path_sums


class SliceCosts(eqx.Module):
    """One layer's experts, in `micro_slices` for each die, and the buffer of every die that keeps some of them.

    `control` is what setting up takes: each load, transfer and computation of a micro-slice (IV, VI-D). Experts come
    from the machine's last memory level.
    """

    costs: LayerCosts
    micro_slices: Float[Array, ""]
    buffer_bytes: Float[Array, " die"]
    control: Float[Array, ""]  # s

    def uncut(self) -> "SliceCosts":
        """Costs of slices that are one piece each, with room for one of every die."""
        whole = replace(self, micro_slices=jnp.ones(()))
        return replace(whole, buffer_bytes=jnp.maximum(whole.buffer_bytes, whole.dies * whole.slice_bytes))

    @property
    def dies(self) -> int:
        return self.buffer_bytes.shape[0]

    @property
    def slice_bytes(self) -> Float[Array, ""]:
        """Of one micro-slice."""
        return self.costs.expert_bytes / (self.dies * self.micro_slices)

    @property
    def slots(self) -> Float[Array, ""]:
        """Micro-slices that the smallest buffer holds, with fractions."""
        return self.buffer_bytes.min() / self.slice_bytes

    def load(self, machine: Machine) -> Float[Array, " channel"]:
        """Seconds of a memory channel for one micro-slice, once its latency is over."""
        return self.slice_bytes / machine.memory[-1].bandwidth + self.control

    def send(self, machine: Machine) -> Float[Array, "die die2"]:
        """Seconds from one die to another, all links of the path held meanwhile, for one micro-slice."""
        topology = machine.topology
        away = 1 - jnp.eye(self.dies)
        return self.slice_bytes * send_slowness(topology) + send_latency(topology) + away * self.control

    def compute(self, machine: Machine, tokens: Float[Array, "expert die"]) -> Float[Array, "expert die"]:
        """Seconds of one micro-slice of every expert on every die; none without tokens."""
        return self.part(machine, tokens, 1 / (self.dies * self.micro_slices))

    def part(
        self, machine: Machine, tokens: Float[Array, "expert die"], part: Float[Array, ""]
    ) -> Float[Array, "expert die"]:
        """Seconds of this part of every expert, in one piece; none without tokens."""
        present = (tokens > 0).astype(tokens.dtype)
        rate = machine.die.flops / self.costs.flops_per_token_expert
        if machine.die.gemm is None:
            return present * self.control + tokens * part / rate
        parts, numbers = jnp.broadcast_to(part, tokens.shape), (self.costs.columns, self.costs.gemms)
        return present * self.control + machine.die.gemm.seconds(tokens, parts, present, rate, *numbers)

    def usage(
        self,
        machine: Machine,
        seconds: Float[Array, ""],
        compute: Float[Array, " die"],
        load: Float[Array, " channel"],
        loaded: Float[Array, " die"],
        read: Float[Array, " die"],
        choices: Float[Array, " die"],
        vectors: Float[Array, " die"],
        send: Float[Array, "die die2"] | None = None,
        sent: Float[Array, "die die2"] | None = None,
    ) -> Usage:
        """Usage of a pipeline that takes so many seconds.

        Arrays `compute`, channels `load`, and dies `send` each other, s. Weights are `loaded` from the last memory
        level and `read` from those before it, B; dies compute so many whole `choices`, move so many `vectors` in and
        out of the nearest level, and send `sent`, B.
        """
        memory, sizes, topology = machine.memory[-1], self.costs, machine.topology
        near = replace(machine, memory=machine.memory[:-1])
        busy = {NODE: compute, COMPUTE: compute, memory.name: load}
        amount = moved_bytes(near, read, vectors * (sizes.dispatch_bytes + sizes.combine_bytes))
        amount |= {memory.name: loaded, FLOPS: choices * sizes.flops_per_token_expert}
        if send is not None and sent is not None:
            busy |= {"link": link_loads(topology, send), "port": jnp.concatenate([send.sum(axis=1), send.sum(axis=0)])}
            amount[LINK_BYTES] = link_loads(topology, sent)
        return Usage(seconds, busy, amount, delay=memory.latency.max())


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
