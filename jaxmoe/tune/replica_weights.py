"""A machine as sums over experts: what a choice, a copy and a move of an expert take of every resource.

The local search of slots adds and takes away such sums, and prices nothing anew.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.engine.copies import ReplicaModel


class Weights(NamedTuple):
    """The machine as sums over experts: which resources a choice or a copy uses, and for how long."""

    first: Int[np.ndarray, " pair_and_one"]  # of every pair from, to: where its resources begin
    resource: Int[np.ndarray, " step"]  # links, ports that send, ports that receive
    dispatch: Float[np.ndarray, " resource"]  # s of a choice
    combine: Float[np.ndarray, " resource"]
    moving: Float[np.ndarray, " resource"]  # s of an expert
    work: Float[np.ndarray, " node"]  # s of a choice at the die's rate
    channel: Int[np.ndarray, "level node"]
    reading: Float[np.ndarray, "level channel"]  # s of an expert read
    passing: Float[np.ndarray, "level channel"]  # s of a choice's vectors
    distance: Int[np.ndarray, "node node2"]  # places of distances
    origin: Float[np.ndarray, " node"]
    even: Float[np.ndarray, "node resource"]  # what a choice takes that is computed at a node, wherever its token lives


def weights_of(model: ReplicaModel) -> Weights:
    """The weights of a model. Of dies that state how well they multiply, the plain rate counts."""
    machine, costs = model.layer.machine, model.layer.costs
    topology, nodes = machine.topology, machine.num_nodes
    links = topology.num_links
    pairs = [
        [*path, links + source, links + nodes + destination] if source != destination else []
        for source, row in enumerate(topology.paths())
        for destination, path in enumerate(row)
    ]
    first = np.cumsum([0, *(len(pair) for pair in pairs)])
    resource = np.array([each for pair in pairs for each in pair], np.int64)
    rate = np.asarray(topology.link_rate, float)
    ports = [
        np.full(nodes, np.inf) if given is None else np.asarray(given, float)
        for given in (topology.injection_rate, topology.ejection_rate)
    ]
    slowness = 1 / np.concatenate([rate, *ports])
    back = 1 / np.concatenate([rate[np.asarray(topology.reverse_links)], *ports[::-1]])
    origin = np.asarray(model.origin, float)
    even = np.zeros((nodes, len(slowness)))
    for pair, steps in enumerate(pairs):
        even[pair // nodes, steps] += origin[pair % nodes]
    vectors = float(costs.dispatch_bytes) + float(costs.combine_bytes)
    channels = max([len(level.bandwidth) for level in machine.memory], default=0)
    reading, passing = np.zeros((2, len(machine.memory), channels))
    for depth, level in enumerate(machine.memory):
        slow = 1 / np.asarray(level.bandwidth, float)
        reading[depth, : len(slow)] = float(costs.expert_bytes) * slow
        passing[depth, : len(slow)] = vectors * slow if depth == 0 else 0
    return Weights(
        first,
        resource,
        back * float(costs.dispatch_bytes),
        slowness * float(costs.combine_bytes),
        np.where(np.arange(len(slowness)) < links, slowness, 0) * float(costs.expert_bytes),
        float(costs.flops_per_token_expert) / np.asarray(machine.die.flops, float),
        np.array([np.asarray(level.channel) for level in machine.memory], np.int64).reshape(-1, nodes),
        reading,
        passing,
        np.asarray(model.tier).astype(np.int64),
        origin,
        even,
    )
