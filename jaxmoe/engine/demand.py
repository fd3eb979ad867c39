"""Kinds of demand of a stage for the machine; each kind computes its usage of resources: seconds, bytes and FLOPs.

A new kind is rare. Traffic is of flows, of a matrix, of rounds, or of loads of links; `Work` is of nodes; `Launch` is
of kernels with a model of their own; `InTurn` joins several. Reads of `jaxmoe.engine.fetch` and the pipelines of
`jaxmoe.engine.streaming` are kinds of their own.
"""

import abc
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine.times import COMPUTE, NODE
from jaxmoe.hardware import Machine
from jaxmoe.hardware.kernels import AbstractGemm
from jaxmoe.hardware.machine import Joules, added
from jaxmoe.network import AbstractTimeModel, Phases, StageTime
from jaxmoe.network.collectives import price_rounds
from jaxmoe.network.flows import Rounds
from jaxmoe.network.token_communication import scaled
from jaxmoe.relax import AbstractReduction

LINK_BYTES, FLOPS = "link_bytes", "flops"  # amounts besides bytes of memory levels, which go by their names


class Usage(eqx.Module):
    """Busy seconds of resources by kind, and amounts by kind: bytes of links and of memory levels, and FLOPs.

    `seconds` is how long the stage takes; `delay` is the part of it that is latency, on top of the busiest resource.
    """

    seconds: Float[Array, "*lead"]
    busy: dict[str, Float[Array, "*lead resource"]]  # s
    amount: dict[str, Float[Array, "*lead resource"]]  # B, FLOP
    delay: Float[Array, "*lead"]  # s

    def energy(self, machine: Machine) -> Joules:
        """Energy of the amounts, J, by resource; without what nodes take all the time."""
        if machine.energy is None:
            return {}
        known, levels = machine.energy, machine.levels

        def of(kind: str, amount: Float[Array, " resource"]) -> Joules:
            if kind == LINK_BYTES:
                return known.of_links(amount)
            return known.of_flops(amount) if kind == FLOPS else known.of_memory(levels[kind].name, amount)

        return added(of(kind, amount) for kind, amount in self.amount.items())


def network_usage(phases: Sequence[StageTime], reduction: AbstractReduction) -> Usage:
    """Phases of traffic one after the other, each as a time model has it."""
    busy = {
        "link": _sum([phase.link_time for phase in phases]),
        "port": _sum([phase.port_time for phase in phases]),
    }
    if all(phase.pair_time.shape[-1] for phase in phases):  # of a time model that prices pairs of nodes
        busy["pair"] = _sum([phase.pair_time for phase in phases])
    return Usage(
        seconds=_sum([phase.total(reduction) for phase in phases]),
        busy=busy,
        amount={LINK_BYTES: _sum([phase.link_bytes for phase in phases])},
        delay=_sum([phase.path_delay for phase in phases]),
    )


def in_turn(usages: Iterable[Usage]) -> Usage:
    """Several usages one after the other, as one."""
    given = list(usages)
    return Usage(
        seconds=_sum([each.seconds for each in given]),
        busy=dict(added(each.busy for each in given)),
        amount=dict(added(each.amount for each in given)),
        delay=_sum([each.delay for each in given]),
    )


def _sum(values: list[Float[Array, "*lead"]]) -> Float[Array, "*lead"]:
    return values[0] if len(values) == 1 else jnp.stack(values).sum(axis=0)


Server = Literal["network", "nodes", "machine"]


class AbstractDemand(eqx.Module):
    """Demand of one stage for a machine's resources: traffic on links, work of nodes, or both.

    `server` is the part of the machine that serves it: `network`, `nodes`, or `machine` for both.
    """

    server: ClassVar[Server]

    @abc.abstractmethod
    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        """Seconds and amounts of every resource, exact or relaxed as the reduction is."""


class Traffic(AbstractDemand):
    """Phases of flows, whose hidden vectors, or experts, are of `unit` bytes each.

    Mirrored, messages go from destination to source over the same links reversed (hd_moe IV-C1).
    """

    server = "network"
    phases: Phases
    unit: Float[Array, ""]
    times: AbstractTimeModel
    mirrored: bool = eqx.field(static=True, default=False)

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        price = self.times.of_mirrored if self.mirrored else self.times.of_flows
        phases: list[StageTime] = []
        for flows in self.phases:
            first, *others = (price(machine.topology, each, self.unit) for each in flows)
            for other in others:  # flows that run at once add up
                first = first.beside(other)
            phases.append(first)
        return network_usage(phases, reduction)


class Matrix(AbstractDemand):
    """Traffic from every node to every other, B; mirrored, every message goes back over the same links reversed."""

    server = "network"
    traffic: Float[Array, "node node2"]
    times: AbstractTimeModel
    mirrored: bool = eqx.field(static=True, default=False)

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        price = self.times.mirrored if self.mirrored else self.times
        return network_usage([price(machine.topology, self.traffic)], reduction)


class Steps(AbstractDemand):
    """Rounds of traffic, one after the other, whose amounts are of `unit` bytes each.

    Mirrored, rounds come in the opposite order, and messages go back over the same links reversed.
    """

    server = "network"
    rounds: Rounds
    unit: Float[Array, ""]
    times: AbstractTimeModel
    mirrored: bool = eqx.field(static=True, default=False)

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        steps = price_rounds(self.times, machine.topology, scaled(self.rounds, self.unit), reduction, self.mirrored)
        pair = {"pair": steps.pair_time} if steps.pair_time.shape[-1] else {}
        return Usage(
            seconds=steps.seconds,
            busy={"link": steps.link_time, "port": steps.port_time, **pair},
            amount={LINK_BYTES: steps.link_bytes},
            delay=steps.path_delay,
        )


class Loads(AbstractDemand):
    """Bytes that every link carries, as a linear function of what was decided, and the delay of the longest path.

    Ports of nodes are not counted: links alone limit.
    """

    server = "network"
    carried: Float[Array, " link"]  # B
    delay: Float[Array, ""]  # s

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        seconds = self.carried / machine.topology.link_rate
        return Usage(
            seconds=reduction(seconds) + self.delay,
            busy={"link": seconds},
            amount={LINK_BYTES: self.carried},
            delay=self.delay,
        )


class Products(eqx.Module):
    """Products of matrices by copy and node, for dies that do not run all of them at their rate."""

    rows: Float[Array, "copy node"]  # tokens
    part: Float[Array, "copy node"]  # of the expert's columns
    present: Float[Array, "copy node"]  # 1 where the node computes the expert at all, or between when relaxed
    flops_per_row: Float[Array, ""]  # of a whole expert
    columns: Float[Array, ""]
    gemms: Float[Array, ""]

    def seconds(self, flops: Float[Array, " node"], gemm: AbstractGemm) -> Float[Array, " node"]:
        """Seconds of every node (hd_moe Eq. 1), by the die's kernel model and rate, FLOP/s."""
        rate = flops / self.flops_per_row
        return gemm.node_seconds(self.rows, self.part, self.present, rate, self.columns, self.gemms)


class Work(AbstractDemand):
    """Computation of every node, FLOP, and the bytes that its memory moves for it: a roofline, the longer of both, or
    the sum where dies do not overlap them.

    `weights`, B, pass every memory level on their way to the die; `vectors`, B, pass only the nearest level. Time of
    compute is that of `products` by the die's kernel model; without either, of `flops` at the die's rate.
    """

    server = "nodes"
    flops: Float[Array, " node"]
    weights: Float[Array, " node"]  # B
    vectors: Float[Array, " node"]  # B
    products: Products | None = None

    def computing(self, machine: Machine) -> Float[Array, " node"]:
        """Seconds in which every node multiplies matrices."""
        die = machine.die
        if self.products is None or die.gemm is None:
            return self.flops / die.flops
        return self.products.seconds(die.flops, die.gemm)

    def busy(self, machine: Machine) -> dict[str, Float[Array, " resource"]]:
        """Busy seconds of compute and of each memory level, and of nodes, by `die.overlap`."""
        moved = moved_bytes(machine, self.weights, self.vectors)
        seconds = self.computing(machine)
        levels = {name: level.seconds(moved[name]) for name, level in machine.levels.items()}
        reading = jnp.zeros_like(seconds)
        for name, level in machine.levels.items():  # a node waits for all that its channel moves, for whichever node
            reading = jnp.maximum(reading, levels[name][level.channel])
        node = jnp.maximum(seconds, reading) if machine.die.overlap else seconds + reading
        return {NODE: node, COMPUTE: seconds, **levels}

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        busy = self.busy(machine)
        taken = reduction(busy[NODE])
        amount = {FLOPS: self.flops, **moved_bytes(machine, self.weights, self.vectors)}
        return Usage(seconds=taken, busy=busy, amount=amount, delay=jnp.zeros_like(taken))


def moved_bytes(
    machine: Machine, weights: Float[Array, " node"], vectors: Float[Array, " node"]
) -> dict[str, Float[Array, " node"]]:
    """Bytes that every node moves to and from each level of memory, by its name; arguments as in `Work`."""
    return {name: weights + vectors if depth == 0 else weights for depth, name in enumerate(machine.levels)}


class InTurn(AbstractDemand):
    """Demands one after the other that count as one stage, of the server of all parts or else of the machine."""

    parts: tuple[AbstractDemand, ...]

    @property
    def server(self) -> Server:  # type: ignore[override]
        first, *others = {part.server for part in self.parts}
        return "machine" if others else first

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        return in_turn(part.usage(machine, reduction) for part in self.parts)


class Fixed(AbstractDemand):
    """Seconds that pass whatever the machine does, such as those of a scheduler or of a host.

    `waiting` is the part of the machine that waits for them.
    """

    seconds: Float[Array, ""]
    waiting: Server = eqx.field(static=True, default="machine")

    @property
    def server(self) -> Server:  # type: ignore[override]
        return self.waiting

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        return Usage(seconds=self.seconds, busy={}, amount={}, delay=self.seconds)


class Launch(AbstractDemand):
    """Kernels that are timed as a whole by a model of their own, on every node alike, or on the network.

    An exchange takes `held` of a node's processors, a part of them, as long as it lasts: what nodes compute beside it
    is so much slower.
    """

    seconds: Float[Array, "*lead"]
    on: Server = eqx.field(static=True, default="nodes")
    held: Float[Array, "..."] | None = None

    @property
    def server(self) -> Server:  # type: ignore[override]
        return self.on

    def usage(self, machine: Machine, reduction: AbstractReduction) -> Usage:
        seconds = self.seconds[..., None]
        busy = {"link": seconds} if self.on == "network" else {NODE: seconds, COMPUTE: seconds}
        if self.held is not None:
            busy[NODE] = self.held[..., None] * seconds
        return Usage(seconds=self.seconds, busy=busy, amount={}, delay=jnp.zeros_like(self.seconds))
