"""One MoE layer, token by token."""

from dataclasses import dataclass

import numpy as np

from jaxmoe.hardware.mesh import blocks, hop_counts, ring_order
from oracles.network import NumpyMachine, stage


@dataclass
class Tokens:
    """A batch: chosen experts (-1 is none), which choice names the gather node, replica draws, multiplicity."""

    experts: np.ndarray
    gather_slot: np.ndarray
    draw: np.ndarray
    weight: np.ndarray


@dataclass
class Costs:
    """Bytes and FLOPs of one layer."""

    message_bytes: float
    expert_bytes: float
    flops_per_token_expert: float
    chunk_bytes: float


def visited_nodes(share: np.ndarray, tokens: Tokens, token: int, mode: str) -> list[list[int]]:
    """Nodes that each choice of a token visits, in the order of its choices; none for no expert."""
    visits = []
    for slot, expert in enumerate(tokens.experts[token]):
        hosts = [int(node) for node in np.flatnonzero(share[expert] > 0)] if expert >= 0 else []
        if mode == "replicated" and hosts:
            hosts = [_serving_host(share[expert], hosts, tokens.draw[token, slot])]
        visits.append(hosts)
    return visits


def _serving_host(share: np.ndarray, hosts: list[int], draw: float) -> int:
    reached = 0.0
    for node in hosts:
        reached += float(share[node])
        if draw < reached:
            return node
    return hosts[-1]


def medoids(shape: tuple[int, int], nodes: set[int]) -> list[int]:
    """Nodes of the set with the fewest hops to the others, ascending."""
    hops = hop_counts(shape)
    cost = {node: sum(int(hops[other, node]) for other in nodes) for node in sorted(nodes)}
    return [node for node in cost if cost[node] == min(cost.values())]


def gather_node(shape: tuple[int, int], visits: list[list[int]], slot: int, rule: str) -> int:
    """Where the results of a token come together."""
    if rule == "lowest":
        return min(visits[slot])
    return medoids(shape, {node for hosts in visits for node in hosts})[0]


def gather_messages(machine: NumpyMachine, share: np.ndarray, tokens: Tokens, mode: str, rule: str) -> np.ndarray:
    """Hidden vectors from node to node: one from every visited node of a token."""
    messages = np.zeros((machine.num_nodes, machine.num_nodes))
    for token, weight in enumerate(tokens.weight):
        visits = visited_nodes(share, tokens, token, mode)
        target = gather_node(machine.shape, visits, tokens.gather_slot[token], rule)
        for node in {node for hosts in visits for node in hosts}:
            messages[node, target] += weight
    return messages


def ring_messages(
    machine: NumpyMachine, share: np.ndarray, tokens: Tokens, mode: str, rings: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Messages of one round of ring reduce-scatter in every ring, the hidden vectors of each, and the rounds."""
    messages = np.zeros((machine.num_nodes, machine.num_nodes))
    sizes = np.zeros_like(messages)
    block = blocks(machine.shape, rings)
    for ring in range(rings):
        order = [int(node) for node in ring_order(machine.shape, np.flatnonzero(block == ring))]
        visiting = 0.0
        for token, weight in enumerate(tokens.weight):
            visits = visited_nodes(share, tokens, token, mode)
            visiting += weight * any(node in order for hosts in visits for node in hosts)
        for index, node in enumerate(order):
            following = order[(index + 1) % len(order)]
            messages[node, following] = visiting > 0
            sizes[node, following] = visiting / len(order)
    return messages, sizes, machine.num_nodes // rings - 1


def node_times(machine: NumpyMachine, share: np.ndarray, tokens: Tokens, costs: Costs, mode: str) -> np.ndarray:
    """Seconds every node computes: work over FLOP/s, or weights and activations over memory bandwidth."""
    work, moved = np.zeros(machine.num_nodes), np.zeros(machine.num_nodes)
    used = {int(e) for row, w in zip(tokens.experts, tokens.weight, strict=True) for e in row if e >= 0 and w > 0}
    for token, weight in enumerate(tokens.weight):
        visits = visited_nodes(share, tokens, token, mode)
        for expert, hosts in zip(tokens.experts[token], visits, strict=True):
            for node in hosts:
                work[node] += weight * (share[expert, node] if mode == "sharded" else 1)
        for node in {node for hosts in visits for node in hosts}:
            moved[node] += 2 * weight * costs.message_bytes
    for expert in used:
        for node in range(machine.num_nodes):
            held = share[expert, node] if mode == "sharded" else float(share[expert, node] > 0)
            moved[node] += held * costs.expert_bytes
    times = work * costs.flops_per_token_expert / machine.flops
    if machine.memory_bandwidth is not None:
        times = np.maximum(times, moved / machine.memory_bandwidth)
    return times


def layer(
    machine: NumpyMachine, share: np.ndarray, tokens: Tokens, costs: Costs, mode: str, rule: str, rings: int = 0
) -> dict[str, np.ndarray | float]:
    """All parts of the layer's latency; with `rings` above 0 results come together in that many rings."""
    if rings:
        messages, vectors, rounds = ring_messages(machine, share, tokens, mode, rings)
    else:
        messages, vectors, rounds = gather_messages(machine, share, tokens, mode, rule), 1.0, 1
    node_time = node_times(machine, share, tokens, costs, mode)
    sizes = (messages, costs.message_bytes, costs.chunk_bytes, rounds)
    dispatch, dispatch_links = stage(machine, *sizes, mirrored=True, vectors=vectors)
    combine, combine_links = stage(machine, *sizes, vectors=vectors)
    return {
        "compute": node_time.max(),
        "dispatch": dispatch,
        "combine": combine,
        "total": dispatch + node_time.max() + combine,
        "node_time": node_time,
        "dispatch_link_time": dispatch_links,
        "combine_link_time": combine_links,
    }
