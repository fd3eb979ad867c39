"""Usage of resources by one stage: busy seconds, and the bytes and FLOPs from which its energy follows."""

from collections.abc import Iterable, Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware import Machine
from jaxmoe.hardware.energy import Joules, added
from jaxmoe.network import StageTime
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
