"""Input of the simulator: the description of an MoE layer, the nodes of every token, and compute times of nodes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.exchanges import check_exchange
from jaxmoe.des.fabric import Fabric
from jaxmoe.placement.copies import Serving
from jaxmoe.placement.exchange import LOAD_WEIGHT, Exchange, Gather, Home
from jaxmoe.traces import Batch

# What the simulator needs to know of a machine and of one MoE layer on it: plain numbers and NumPy arrays.

Gemm = Callable[[Int[np.ndarray, " gemm"], Int[np.ndarray, " gemm"], Float[np.ndarray, " gemm"]], np.ndarray]
"""Seconds of the products of one expert on a node, each from the node, its tokens, and the part of the expert there."""


@dataclass(frozen=True)
class Memory:
    """A level of memory: channels with a bandwidth and a latency, each shared by the nodes that use it."""

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
    serving: Serving | None = None  # the rule by which one of an expert's copies serves
    choice_seconds: float = 0.0  # s: one choice, where a rule has to know the batch
    told_bytes: float = 0.0  # B: what then tells every node of one token
    overlap: bool = True  # a node reads memory while it multiplies

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


# Where the tokens of one batch are computed and come together, worked out from shares and draws.


@dataclass(frozen=True)
class TokenPlan:
    """Nodes that the tokens of a batch visit, the node that gathers their results, and the work of every node.

    `home` is the node to which a gather brings a token's results, of no meaning for a token that visits no node; under
    other exchanges, the node where the token lives. `part` is the part of every choice that a node computes, and
    `served` the node that computes a choice alone, or -1.
    """

    visited: Bool[np.ndarray, "token node"]
    home: Int[np.ndarray, " token"]
    part: Float[np.ndarray, "token top_k node"]
    served: Int[np.ndarray, "token top_k"]
    experts_read: Float[np.ndarray, " node"]  # weights that pass the memory, in experts


def plan_tokens(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None = None,
) -> TokenPlan:
    """Assign the tokens of a batch of one layer to nodes, by the placement `share` and the decisions of a policy.

    `share` is the part of every expert on every node. `served` names the node that computes a choice alone, from a
    whole copy of the expert; -1: as placed. Raises `ValueError` for a batch or decisions that do not fit the layer.
    """
    experts = np.asarray(batch.experts)
    served = np.full_like(experts, -1) if served is None else served
    _check(layer, share, batch, experts)
    _check_served(layer, experts, served)
    share = share.astype(np.float64)
    chosen = (experts >= 0)[..., None]
    part = share[experts] * chosen if layer.mode == "sharded" else _drawn(share, batch) * chosen
    part = np.where(served[..., None] < 0, part, served[..., None] == np.arange(layer.num_nodes))
    rule: Home = layer.exchange.home if isinstance(layer.exchange, Gather) else "token_home"
    home = homes_of(rule, batch, part > 0, layer.fabric.hops, layer.fabric.mesh_shape)
    return TokenPlan(np.asarray((part > 0).any(axis=1)), home, part, served, _read(layer, share, experts, part, served))


def _read(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    experts: Int[np.ndarray, "token k"],
    part: Float[np.ndarray, "token k node"],
    served: Int[np.ndarray, "token k"],
) -> Float[np.ndarray, " node"]:
    """Weights that every node reads from memory, in experts: parts of experts that any token uses, and whole copies."""
    sliced = served < 0 if layer.mode == "sharded" else np.zeros_like(served, bool)
    read = share[np.unique(experts[(experts >= 0) & sliced])].sum(axis=0, dtype=float)
    token, choice, node = np.nonzero((part > 0) & ~sliced[..., None])
    _, whole = np.unique(np.stack([experts[token, choice], node]), axis=1)
    return read + np.bincount(whole, minlength=layer.num_nodes)


def _drawn(share: Float[np.ndarray, "expert node"], batch: Batch) -> Float[np.ndarray, "token top_k node"]:
    """Part of every choice on every node, under replication: 1 at the host that the token's draw picks, else 0.

    A host has the interval [lower, upper) of the cumulative shares, scaled to 1; the draw lies in one of them.
    """
    upper = np.cumsum(share, axis=1)
    upper = upper / upper[:, -1:]
    lower = np.concatenate([np.zeros_like(upper[:, :1]), upper[:, :-1]], axis=1)
    experts, draw = np.asarray(batch.experts), np.asarray(batch.draw).astype(np.float64)[..., None]
    return ((lower[experts] <= draw) & (draw < upper[experts])).astype(np.float64)


def _check(
    layer: LayerDescription, share: Float[np.ndarray, "expert node"], batch: Batch, experts: Int[np.ndarray, "token k"]
) -> None:
    if share.shape[1] != layer.num_nodes:
        raise ValueError(f"share is for {share.shape[1]} nodes but the network has {layer.num_nodes}")
    if experts.min(initial=0) < -1 or experts.max(initial=0) >= len(share):
        raise ValueError(f"expert ids span {experts.min()}..{experts.max()}, expected -1..{len(share) - 1}")
    if (np.asarray(batch.weight) != 1).any():
        raise ValueError("a simulated token is one token: every weight of the batch must be 1")
    home = layer.exchange.home if isinstance(layer.exchange, Gather) else None
    source = token_sources(batch, layer.num_nodes)
    if home == "token_home" and not ((source >= 0) & (source < layer.num_nodes)).all():
        raise ValueError(
            f"tokens live at nodes {source.min()}..{source.max()}, expected source to name 0..{layer.num_nodes - 1}"
        )


def _check_served(layer: LayerDescription, experts: Int[np.ndarray, "token k"], served: Int[np.ndarray, "..."]) -> None:
    if served.shape != experts.shape:
        raise ValueError(f"served has shape {served.shape}, expected one node for each choice, {experts.shape}")
    if served.min(initial=-1) < -1 or served.max(initial=-1) >= layer.num_nodes:
        raise ValueError(f"served nodes span {served.min()}..{served.max()}, expected -1..{layer.num_nodes - 1}")
    if (served[experts < 0] >= 0).any():
        raise ValueError("served names a node for a choice that names no expert; expected -1 there")
    if layer.mode != "sharded" and (served >= 0).any():
        raise ValueError(f"served names nodes in a {layer.mode} placement; a policy decides on sharded ones alone")


# Where the results of a token meet: its home, worked out token by token.


def homes_of(
    home: Home,
    batch: Batch,
    hosts: Bool[np.ndarray, "token top_k node"],
    hops: Int[np.ndarray, "node node2"],
    mesh_shape: tuple[int, int] | None = None,
) -> Int[np.ndarray, " token"]:
    """Node where the results of every token are gathered; of no meaning for a token that visits no node.

    `home` is the rule that picks it among the visited nodes, `hosts` the nodes that compute each choice.
    """
    visited = np.asarray(hosts.any(axis=1))
    tokens, nodes = visited.shape
    if home == "lowest_host":
        return hosts[np.arange(tokens), np.asarray(batch.gather_slot)].argmax(axis=1)
    if home == "random_host":
        draw, count = np.asarray(batch.token_draw), visited.sum(axis=1)
        index = np.minimum((draw * count.astype(draw.dtype)).astype(int), count - 1)
        return (np.cumsum(visited, axis=1) > index[:, None]).argmax(axis=1)
    if home == "fewest_hops":
        return np.where(visited, visited @ hops, np.inf).argmin(axis=1)
    if home == "least_loaded":
        return _least_loaded(visited, visited @ hops)
    if home == "corner_host":
        corners = _corners(mesh_shape, nodes)
        near = hops[[corners[token % len(corners)] for token in range(tokens)]]
        return np.where(visited, near, np.inf).argmin(axis=1)
    return token_sources(batch, nodes)


def _corners(mesh_shape: tuple[int, int] | None, nodes: int) -> list[int]:
    """The corners of a mesh in the order of their numbers; all nodes of another network."""
    if mesh_shape is None:
        return list(range(nodes))
    x, y = mesh_shape
    return sorted({row * y + column for row in (0, x - 1) for column in (0, y - 1)})


def token_sources(batch: Batch, nodes: int) -> Int[np.ndarray, " token"]:
    """Node where every token lives: as the batch says, else equal runs of successive tokens on successive nodes."""
    if batch.source is not None:
        return np.asarray(batch.source)
    tokens = len(batch.experts)
    return np.arange(tokens) * nodes // tokens


def _least_loaded(
    visited: Bool[np.ndarray, "token node"], hops_in_all: Int[np.ndarray, "token node"]
) -> Int[np.ndarray, " token"]:
    """Home of every token by least cost: its hops, plus a penalty for every earlier token with the same home."""
    tokens, nodes = visited.shape
    home, count = np.zeros(tokens, np.int64), np.zeros(nodes, np.int64)
    for token in np.flatnonzero(visited.any(axis=1)):
        cost = hops_in_all[token] * tokens + LOAD_WEIGHT * nodes * count
        home[token] = np.where(visited[token], cost, np.iinfo(np.int64).max).argmin()
        count[home[token]] += 1
    return home


# How long every node computes: its products, and what its memory channels have to bring for them.


def node_seconds(layer: LayerDescription, plan: TokenPlan, batch: Batch) -> Float[np.ndarray, " node"]:
    """Compute time of every node, s, from its products and its channels, each serving all its users."""
    if layer.gemm is None:
        seconds = node_flops(layer, plan) / layer.flops
    else:
        seconds = _gemm_seconds(layer.gemm, plan, np.asarray(batch.experts), layer.mode == "sharded")
    return with_memory(layer, seconds, node_bytes(layer, plan))


def with_memory(
    layer: LayerDescription, products: Float[np.ndarray, " node"], moved: Float[np.ndarray, "level node"]
) -> Float[np.ndarray, " node"]:
    """Seconds of every node whose products take so long, and that moves so many bytes of each level."""
    waited = np.zeros(layer.num_nodes)
    for level, asked in zip(layer.memory, moved, strict=True):
        served = np.bincount(level.channel, asked, len(level.bandwidth))
        channel = np.where(served > 0, level.latency + served / level.bandwidth, 0.0)
        waited = np.maximum(waited, channel[level.channel])
    return np.maximum(products, waited) if layer.overlap else products + waited


def even_seconds(layer: LayerDescription, flops: float, moved: float) -> float:
    """Seconds of work that all nodes share evenly: FLOPs, and bytes of every level of memory."""
    each = np.full((len(layer.memory), layer.num_nodes), moved / layer.num_nodes)
    return float(with_memory(layer, flops / layer.num_nodes / layer.flops, each).max())


def node_flops(layer: LayerDescription, plan: TokenPlan) -> Float[np.ndarray, " node"]:
    """FLOPs of every node, without the padding of tiles."""
    return plan.part.sum(axis=(0, 1)) * layer.flops_per_token_expert


def node_bytes(layer: LayerDescription, plan: TokenPlan) -> Float[np.ndarray, "level node"]:
    """Bytes that every node moves to and from each level: weights pass all of them, hidden vectors the nearest."""
    weights = plan.experts_read * layer.expert_bytes
    vectors = plan.visited.sum(axis=0) * (layer.dispatch_bytes + layer.combine_bytes)
    moved = [weights if depth else weights + vectors for depth, _ in enumerate(layer.memory)]
    return np.array(moved, float).reshape(len(moved), layer.num_nodes)


def _gemm_seconds(
    gemm: Gemm, plan: TokenPlan, experts: Int[np.ndarray, "token top_k"], sharded: bool
) -> Float[np.ndarray, " node"]:
    """Time of the matrix products of every node, s, one expert after the other.

    Tokens of a whole copy of an expert are a product apart from those of the part that is placed there.
    """
    token, choice, node = np.nonzero(plan.part)
    is_copy = plan.served[token, choice] >= 0
    part = np.where(is_copy | (not sharded), 1.0, plan.part[token, choice, node])
    products = np.stack([node, experts[token, choice], is_copy])
    (node, _, _), first, tokens = np.unique(products, axis=1, return_index=True, return_counts=True)
    return np.bincount(node, gemm(node, tokens, part[first]), plan.part.shape[2])
