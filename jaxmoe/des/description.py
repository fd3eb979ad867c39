"""What the simulator needs to know of a machine and of one MoE layer on it: plain numbers and NumPy arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from jaxmoe.des.fabric import Fabric


@dataclass(frozen=True)
class LayerDescription:
    """A network of dies and the costs of one MoE layer. SI units.

    `sharded`: a token visits every host of its experts. `replicated`: one host of each, picked by its draw.
    `gather` says where a token's results come together: at the lowest-numbered host of the expert its gather
    slot names (replicated: at the host that serves it), or at the visited node with the fewest hops to all
    visited nodes, the lowest-numbered of equals. With `rings`, lists of nodes in ring order, each ring combines
    by ring reduce-scatter instead (one ring over all nodes: tensor parallelism), and nothing gathers.
    """

    fabric: Fabric
    flops: Float[np.ndarray, " node"]  # achievable FLOP/s
    message_bytes: float  # B: one hidden vector
    expert_bytes: float  # B: weights of one expert
    flops_per_token_expert: float
    mode: Literal["sharded", "replicated"]
    memory_bandwidth: Float[np.ndarray, " node"] | None = None  # B/s; None is no limit
    gather: Literal["lowest_host", "fewest_hops"] = "lowest_host"
    rings: Sequence[Sequence[int]] | None = None
    both_ways: bool = False  # round every ring

    def __post_init__(self) -> None:
        # A run-time type checker may be absent, and a wrong word would otherwise choose a branch in silence.
        if self.mode not in ("sharded", "replicated"):
            raise ValueError(f"mode is {self.mode!r}, expected 'sharded' or 'replicated'")
        if self.gather not in ("lowest_host", "fewest_hops"):
            raise ValueError(f"gather is {self.gather!r}, expected 'lowest_host' or 'fewest_hops'")
        if len(self.flops) != self.num_nodes:
            raise ValueError(f"flops are given for {len(self.flops)} nodes of a network of {self.num_nodes}")

    @property
    def num_nodes(self) -> int:
        return self.fabric.num_nodes
