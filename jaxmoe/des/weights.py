"""Weights on their way, simulated: parts of experts, from the nodes that store them to all that are to have the expert.

Each part travels along the tree of paths from its node, copied by the routers where paths part.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.des.description import LayerDescription
from jaxmoe.des.event_loop import run_on
from jaxmoe.des.fabric import Fabric
from jaxmoe.des.tasks import GraphBuilder, Transfers, add_transfers, no_rows
from jaxmoe.des.trees import TokenTrees, tree_transfers

MOST_CHUNKS = 1000  # of a part: weights in chunks of a token's size would be millions of tasks
Part = tuple[int, int]  # of an expert, and the node that stores it


def movement_seconds(
    layer: LayerDescription,
    stored: Float[np.ndarray, "expert node"],
    destination: Bool[np.ndarray, "expert node"],
) -> float:
    """Seconds until all parts have arrived, with nothing else on the network. `stored` are parts of whole experts."""
    parts = travelling(stored, destination)
    if not parts:
        return 0.0
    fabric = in_chunks(layer, stored, parts)
    graph, ready = GraphBuilder(len(fabric.rate), layer.num_nodes, fabric.chunk_bytes), no_rows(layer.num_nodes)
    for part in parts:
        add_transfers(graph, to_all(layer, fabric, stored, destination, part), ready)
    return run_on(fabric, graph.build()).makespan


def travelling(stored: Float[np.ndarray, "expert node"], destination: Bool[np.ndarray, "expert node"]) -> list[Part]:
    """Parts that another node is to have."""
    return [(e, n) for e, n in np.argwhere(stored > 0).tolist() if np.delete(destination[e], n).any()]


def in_chunks(layer: LayerDescription, stored: Float[np.ndarray, "expert node"], parts: list[Part]) -> Fabric:
    """The network, whose chunks are large enough for weights."""
    largest = max((stored[part] for part in parts), default=0.0) * layer.expert_bytes
    return replace(layer.fabric, chunk_bytes=max(layer.fabric.chunk_bytes or largest, largest / MOST_CHUNKS))


def to_all(
    layer: LayerDescription,
    fabric: Fabric,
    stored: Float[np.ndarray, "expert node"],
    destination: Bool[np.ndarray, "expert node"],
    part: Part,
) -> Transfers:
    """A part on its way to all nodes that are to have it, chunk by chunk."""
    expert, node = part
    trees = [TokenTrees(fabric.routes, destination[expert][None], np.array([node]))]
    return tree_transfers(fabric, trees, float(stored[part]) * layer.expert_bytes, mirrored=True)
