"""One MoE layer, token by token."""

from dataclasses import dataclass

import numpy as np

from jaxmoe.hardware.networks import hop_counts
from oracles.network import NumpyMachine


@dataclass
class Tokens:
    """A batch: chosen experts (-1 is none), draws of tokens and of choices, multiplicity, and where tokens live."""

    experts: np.ndarray
    token_draw: np.ndarray
    draw: np.ndarray
    weight: np.ndarray
    source: np.ndarray | None = None

    def named_choice(self, token: int) -> int:
        """The choice that the token's draw names among those that it has."""
        present = [slot for slot, expert in enumerate(self.experts[token]) if expert >= 0]
        return present[int(self.token_draw[token] * len(present))]

    def living_node(self, token: int, nodes: int) -> int:
        """As given, or successive tokens on successive nodes."""
        return token * nodes // len(self.weight) if self.source is None else int(self.source[token])


@dataclass
class Costs:
    """Bytes and FLOPs of one layer."""

    combine_bytes: float
    expert_bytes: float
    flops_per_token_expert: float
    chunk_bytes: float
    dispatch_bytes: float


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
    if rule == "lowest_host":
        return min(visits[slot])
    assert rule == "fewest_hops"
    return medoids(shape, {node for hosts in visits for node in hosts})[0]


def gather_messages(machine: NumpyMachine, share: np.ndarray, tokens: Tokens, mode: str, rule: str) -> np.ndarray:
    """Hidden vectors from node to node: one from every visited node of a token."""
    messages = np.zeros((machine.num_nodes, machine.num_nodes))
    for token, weight in enumerate(tokens.weight):
        visits = visited_nodes(share, tokens, token, mode)
        if any(visits):
            target = gather_node(machine.shape, visits, tokens.named_choice(token), rule)
            for node in {node for hosts in visits for node in hosts}:
                messages[node, target] += weight
    return messages


def node_times(machine: NumpyMachine, share: np.ndarray, tokens: Tokens, costs: Costs, mode: str) -> np.ndarray:
    """Seconds every node computes: work over FLOP/s, or weights and activations over memory bandwidth."""
    work, moved = np.zeros(machine.num_nodes), np.zeros(machine.num_nodes)
    read = set()  # (expert, node) whose weights pass the memory
    for token, weight in enumerate(tokens.weight):
        visits = visited_nodes(share, tokens, token, mode)
        for expert, hosts in zip(tokens.experts[token], visits, strict=True):
            for node in hosts:
                work[node] += weight * (share[expert, node] if mode == "sharded" else 1)
                read |= {(int(expert), node)} if weight > 0 else set()
        for node in {node for hosts in visits for node in hosts}:
            moved[node] += weight * (costs.dispatch_bytes + costs.combine_bytes)
    for expert, node in read:
        moved[node] += (share[expert, node] if mode == "sharded" else 1) * costs.expert_bytes
    times = work * costs.flops_per_token_expert / machine.flops
    if machine.memory_bandwidth is not None:
        times = np.maximum(times, moved / machine.memory_bandwidth)
    return times
