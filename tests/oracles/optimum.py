"""The best of all sharded placements, by going through all sets of hosts."""

import itertools

import numpy as np
from scipy.optimize import linprog

from oracles.layer import Costs, Tokens, gather_messages, node_times
from oracles.network import NumpyMachine, stage


def best_plan(
    machine: NumpyMachine, batches: list[Tokens], experts: int, costs: Costs, rule: str, room: float | None = None
) -> tuple[float, np.ndarray]:
    """Least mean total time over the batches, and hosts that reach it, bool [expert, node].

    `room` is in experts that fit a node.
    """
    nodes = machine.num_nodes
    sets = [np.array(members, bool) for members in itertools.product([False, True], repeat=nodes) if any(members)]
    best, where = np.inf, np.zeros((experts, nodes), bool)
    for chosen in itertools.product(sets, repeat=experts):
        support = np.array(chosen)
        communication = np.mean([_communication(machine, support, tokens, costs, rule) for tokens in batches])
        if communication < best:
            total = communication + _compute(machine, support, batches, costs, room)
            if total < best:
                best, where = total, support
    return best, where


def _communication(machine: NumpyMachine, support: np.ndarray, tokens: Tokens, costs: Costs, rule: str) -> float:
    messages = gather_messages(machine, support.astype(float), tokens, "sharded", rule)
    dispatch, _ = stage(machine, messages, costs.dispatch_bytes, costs.chunk_bytes, mirrored=True)
    combine, _ = stage(machine, messages, costs.combine_bytes, costs.chunk_bytes)
    return dispatch + combine


def _compute(
    machine: NumpyMachine, support: np.ndarray, batches: list[Tokens], costs: Costs, room: float | None
) -> float:
    """Least mean seconds of the slowest node, over all divisions of the experts among their hosts; inf if none fits."""
    experts, nodes = support.shape
    # Variables: the share of every expert on every node, then the seconds of every batch.
    objective = np.append(np.zeros(support.size), np.full(len(batches), 1 / len(batches)))
    rows, limits = [], []
    for index, tokens in enumerate(batches):
        for node in range(nodes):
            row = np.zeros(len(objective))
            for expert in range(experts):
                alone = np.zeros(support.shape)
                alone[expert, node] = 1  # the time of a node is the sum of what each of its experts takes there
                row[expert * nodes + node] = node_times(machine, alone, tokens, costs, "sharded")[node] * 1e6
            row[support.size + index] = -1
            rows.append(row)
            limits.append(0.0)
    if room is not None:
        for node in range(nodes):
            row = np.zeros(len(objective))
            row[node : support.size : nodes] = 1
            rows.append(row)
            limits.append(room)
    whole = np.zeros((experts, len(objective)))
    for expert in range(experts):
        whole[expert, expert * nodes : (expert + 1) * nodes] = 1
    bounds = [(0, float(held)) for held in support.ravel()] + [(0, None)] * len(batches)
    solved = linprog(objective, rows, limits, whole, np.ones(experts), bounds)
    return float(solved.fun) * 1e-6 if solved.status == 0 else np.inf
