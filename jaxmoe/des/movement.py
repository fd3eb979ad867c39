"""Weights on their way, simulated: parts of experts, from the nodes that store them to all that are to have the expert.

Each part travels along the tree of paths from its node, copied by the routers where paths part.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.des.description import LayerDescription
from jaxmoe.des.engine import simulate
from jaxmoe.des.tasks import GraphBuilder
from jaxmoe.des.transfers import add_transfers, no_rows
from jaxmoe.des.trees import tree_transfers

MOST_CHUNKS = 1000  # of a part: weights in chunks of a token's size would be millions of tasks


def movement_seconds(
    layer: LayerDescription,
    stored: Float[np.ndarray, "expert node"],
    destination: Bool[np.ndarray, "expert node"],
) -> float:
    """Seconds until all parts have arrived, with nothing else on the network. `stored` are parts of whole experts."""
    parts = [(e, n) for e, n in np.argwhere(stored > 0) if np.delete(destination[e], n).any()]
    if not parts:
        return 0.0
    largest = max(stored[part] for part in parts) * layer.expert_bytes
    chunk = max(layer.fabric.chunk_bytes or largest, largest / MOST_CHUNKS)
    fabric, nodes = replace(layer.fabric, chunk_bytes=chunk), layer.num_nodes
    graph, ready = GraphBuilder(len(fabric.rate), nodes, chunk), no_rows(nodes)
    for expert, node in parts:
        size = float(stored[expert, node]) * layer.expert_bytes
        receivers, sender = destination[expert][None], np.array([node])
        add_transfers(graph, tree_transfers(fabric, [fabric.routes], receivers, sender, size, mirrored=True), ready)
    return simulate(graph.build(), fabric.rate, fabric.latency, cut_through=fabric.cut_through).makespan
