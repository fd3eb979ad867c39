"""Energy model of a machine: joules of a FLOP, of a byte of memory and of a link, and idle power of nodes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

COMPUTE, IDLE = "compute", "idle"

Joules = dict[str, Any]
"""Energy by resource, J [*lead]: `compute`, levels of memory, kinds of link, `idle`."""

Numbers = Array | np.ndarray  # of the model, or of the event simulator


class Energy(eqx.Module):
    """Energy of what the parts of a machine do. What is not known is `None`, or not there, and counts nothing.

    A byte counts at every link that it passes, so `links` are energies of a byte and hop.
    """

    compute: Float[Array, ""] | None = None  # J/FLOP
    memory: Mapping[str, Float[Array, ""]] = eqx.field(default_factory=dict)  # J/B, by name of a level
    links: Mapping[str, Float[Array, " link"]] = eqx.field(default_factory=dict)  # J/B, by kind; 0 at other kinds
    idle: Float[Array, ""] | None = None  # W of each node

    def of_links(self, carried: Float[Numbers, " link"]) -> Joules:
        """Energy of the bytes that every link carries, by kind of link, J."""
        return {kind: each @ carried for kind, each in self.links.items()}

    def of_flops(self, flops: Float[Numbers, " node"]) -> Joules:
        """Energy of the FLOPs of nodes, J."""
        return {} if self.compute is None else {COMPUTE: self.compute * flops.sum()}

    def of_memory(self, level: str, moved: Float[Numbers, " node"]) -> Joules:
        """Energy of the bytes that nodes move to and from a level of memory, J."""
        return {memory_part(level): self.memory[level] * moved.sum()} if level in self.memory else {}

    def of_nodes(self, flops: Float[Numbers, " node"], moved: Sequence[tuple[str, Float[Numbers, " node"]]]) -> Joules:
        """Energy of FLOPs, and of the bytes that the nodes move to and from every level of memory by name, J."""
        return added([self.of_flops(flops), *(self.of_memory(name, each) for name, each in moved)])

    def of_time(self, seconds: Float[Numbers, "*lead"], nodes: int) -> Joules:
        """Energy that all nodes take in so many seconds, busy or not, J."""
        return {} if self.idle is None else {IDLE: self.idle * seconds * nodes}


def memory_part(level: str) -> str:
    """The name of a level of memory among the parts."""
    return level if level == "memory" else f"memory_{level}"


def added(parts: Iterable[Mapping[str, Any]]) -> Joules:
    """Energies by resource, summed up."""
    total: Joules = {}
    for each in parts:
        for name, energy in each.items():
            total[name] = total[name] + energy if name in total else energy
    return total
