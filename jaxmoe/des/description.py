"""What the simulator needs to know of a machine and of one MoE layer on it: plain numbers and NumPy arrays."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.exchanges import check_exchange
from jaxmoe.des.fabric import Fabric
from jaxmoe.placement.exchange import Exchange, Gather

Gemm = Callable[[Int[np.ndarray, " gemm"], Int[np.ndarray, " gemm"], Float[np.ndarray, " gemm"]], np.ndarray]
"""Seconds of the products of one expert on a node, each from the node, its tokens, and the part of the expert there."""


@dataclass(frozen=True)
class Memory:
    """A level of memory. A channel serves what all nodes that use it ask for."""

    bandwidth: Float[np.ndarray, " channel"]  # B/s
    latency: Float[np.ndarray, " channel"]  # s
    channel: Int[np.ndarray, " node"]  # the channel that a node uses


@dataclass(frozen=True)
class LayerDescription:
    """A network of dies and the costs of one MoE layer. SI units.

    `sharded`: a token visits every host of its experts. `replicated`: one host of each, picked by its draw.
    `memory` is listed from the nearest level on: weights pass every one, hidden vectors the first alone. Without
    `gemm`, products take their FLOPs at the rate of the node. Of several micro-batches, successive tokens, the network
    serves one stage at a time: dispatch 1, dispatch 2, combine 1, dispatch 3, combine 2, and so on. Raises
    `ExchangeError` for an exchange that does not suit the network.
    """

    fabric: Fabric
    flops: Float[np.ndarray, " node"]  # achievable FLOP/s
    dispatch_bytes: float  # B: one hidden vector on its way to the experts
    combine_bytes: float  # B: one on its way back
    expert_bytes: float  # B: weights of one expert
    flops_per_token_expert: float
    mode: Literal["sharded", "replicated"]
    exchange: Exchange = field(default_factory=Gather)
    memory: tuple[Memory, ...] = ()
    gemm: Gemm | None = None
    micro_batches: int = 1  # in a pipeline of network and nodes

    def __post_init__(self) -> None:
        # A run-time type checker may be absent, and an unknown mode would silently take a branch.
        if self.mode not in ("sharded", "replicated"):
            raise ValueError(f"mode is {self.mode!r}, expected 'sharded' or 'replicated'")
        if len(self.flops) != self.num_nodes:
            raise ValueError(f"flops are given for {len(self.flops)} nodes of a network of {self.num_nodes}")
        for level in self.memory:
            if len(level.channel) != self.num_nodes:
                raise ValueError(f"memory has channels of {len(level.channel)} nodes, the network {self.num_nodes}")
        check_exchange(self.exchange, self.fabric)

    @property
    def num_nodes(self) -> int:
        return self.fabric.num_nodes
