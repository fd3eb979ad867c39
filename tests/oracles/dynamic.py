"""Dynamic placement of one MoE layer, expert by expert and token by token."""

import numpy as np

from oracles.layer import Tokens


def chosen_experts(share: np.ndarray, forecast: np.ndarray, seconds_each: np.ndarray, allowed: int) -> set[int]:
    """The experts to broadcast: again and again that of the most expected work on the most congested node."""
    broadcast: set[int] = set()
    for _ in range(allowed):
        best, most_congested = None, 0.0
        for node in range(share.shape[1]):
            seconds = {
                expert: share[expert, node] * forecast[expert] * seconds_each[node]
                for expert in range(len(share))
                if expert not in broadcast
            }
            if sum(seconds.values()) > most_congested:
                most_congested = sum(seconds.values())
                best = max(seconds, key=lambda expert: (seconds[expert], -expert))
        if best is None:
            break
        broadcast.add(best)
    return broadcast


def hosts_of(share: np.ndarray, expert: int) -> set[int]:
    """Nodes with a part of an expert; none for no expert."""
    return set(np.flatnonzero(share[expert] > 0).tolist()) if expert >= 0 else set()


def served_nodes(share: np.ndarray, tokens: Tokens, broadcast: set[int], seconds_each: np.ndarray) -> np.ndarray:
    """The node that serves each choice, int [token, top_k]; -1 where it is computed as placed."""
    work = np.zeros(share.shape[1])
    for experts, weight in zip(tokens.experts.tolist(), tokens.weight, strict=True):
        for expert in experts:
            if expert >= 0 and expert not in broadcast:
                work += weight * share[expert]
    served = np.full(tokens.experts.shape, -1)
    for token, experts in enumerate(tokens.experts.tolist()):
        candidates = set().union(*(hosts_of(share, expert) for expert in experts))
        for slot, expert in enumerate(experts):
            if expert in broadcast:
                node = min(candidates, key=lambda node: (work[node] * seconds_each[node], node))
                work[node] += tokens.weight[token]
                served[token, slot] = node
    return served


def decided_hosts(share: np.ndarray, tokens: Tokens, served: np.ndarray) -> list[list[set[int]]]:
    """Nodes where each choice of each token is computed."""
    return [
        [hosts_of(share, expert) if node < 0 else {node} for expert, node in zip(*choices, strict=True)]
        for choices in zip(tokens.experts.tolist(), served.tolist(), strict=True)
    ]
