"""Where the tokens of one batch are computed and gathered, worked out token by token from shares and draws."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.des.description import LayerDescription
from jaxmoe.traces import Batch


@dataclass(frozen=True)
class TokenPlan:
    """What a batch asks of the nodes: `work` in token-expert products, `bytes_moved` to and from memory in B.

    `gather` of a token that visits no node is of no meaning.
    """

    visited: Bool[np.ndarray, "token node"]
    gather: Int[np.ndarray, " token"]
    work: Float[np.ndarray, " node"]
    bytes_moved: Float[np.ndarray, " node"]


def plan_tokens(
    layer: LayerDescription,
    share: Float[np.ndarray, "expert node"],
    batch: Batch,
    served: Int[np.ndarray, "token top_k"] | None = None,
) -> TokenPlan:
    """Apply the placement `share` to a batch of one layer, and what a policy decided for it.

    `served` names the node that computes a choice alone, from a whole copy of the expert; -1: as placed.
    """
    experts, slot = np.asarray(batch.experts), np.asarray(batch.gather_slot)
    served = np.full_like(experts, -1) if served is None else served
    _check(layer, share, batch, experts)
    _check_served(layer, experts, served)
    share = share.astype(np.float64)
    chosen = (experts >= 0)[..., None]
    part = share[experts] * chosen if layer.mode == "sharded" else _drawn(share, batch) * chosen
    part = np.where(served[..., None] < 0, part, served[..., None] == np.arange(layer.num_nodes))
    hosts = part > 0  # [token, top_k, node]
    visited = hosts.sum(axis=1) > 0
    if layer.gather == "lowest_host":
        gather = hosts[np.arange(len(slot)), slot].argmax(axis=1)
    else:
        hops_in_all = visited @ layer.fabric.hops
        gather = np.where(visited, hops_in_all, np.inf).argmin(axis=1)
    used = share[np.unique(experts[(experts >= 0) & (served < 0)])]
    held = (used if layer.mode == "sharded" else used > 0).sum(axis=0)
    copies = np.unique(np.stack([experts[served >= 0], served[served >= 0]]), axis=1)[1]
    held = held + np.bincount(copies, minlength=layer.num_nodes)
    # Weights of the experts that any token uses are read; a token's vector is read in and written out.
    moved = held * layer.expert_bytes + 2 * layer.message_bytes * visited.sum(axis=0)
    return TokenPlan(visited, gather, work=part.sum(axis=(0, 1)), bytes_moved=moved)


def node_seconds(layer: LayerDescription, plan: TokenPlan) -> Float[np.ndarray, " node"]:
    """How long each node computes: the larger of FLOPs over rate and bytes over memory bandwidth."""
    seconds = plan.work * layer.flops_per_token_expert / layer.flops
    if layer.memory_bandwidth is None:
        return seconds
    return np.maximum(seconds, plan.bytes_moved / layer.memory_bandwidth)


def _drawn(share: Float[np.ndarray, "expert node"], batch: Batch) -> Float[np.ndarray, "token top_k node"]:
    """1 at the host whose slice [lower, upper) of the cumulated shares, scaled to 1, holds the token's draw."""
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
    named = np.take_along_axis(experts, np.asarray(batch.gather_slot)[:, None], axis=1)[:, 0]
    if layer.gather == "lowest_host" and ((named < 0) & (experts >= 0).any(axis=1)).any():
        raise ValueError("the gather slot of a token names no expert, so the token has no gather node")


def _check_served(layer: LayerDescription, experts: Int[np.ndarray, "token k"], served: Int[np.ndarray, "..."]) -> None:
    if served.shape != experts.shape:
        raise ValueError(f"served has shape {served.shape}, expected one node for each choice, {experts.shape}")
    if served.min(initial=-1) < -1 or served.max(initial=-1) >= layer.num_nodes:
        raise ValueError(f"served nodes span {served.min()}..{served.max()}, expected -1..{layer.num_nodes - 1}")
    if (served[experts < 0] >= 0).any():
        raise ValueError("served names a node for a choice that names no expert; expected -1 there")
    if layer.mode != "sharded" and (served >= 0).any():
        raise ValueError(f"served names nodes in a {layer.mode} placement; a policy decides on sharded ones alone")
