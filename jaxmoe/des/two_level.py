"""The exchange of two levels as the simulator carries it out, message by message."""

import numpy as np
from jaxtyping import Bool, Int

from jaxmoe.des.exchanges import phases
from jaxmoe.des.fabric import Fabric
from jaxmoe.des.tasks import Transfers
from jaxmoe.placement.exchange import Exchange


def two_level(
    exchange: Exchange,
    fabric: Fabric,
    visited: Bool[np.ndarray, "token node"],
    home: Int[np.ndarray, " token"],
    size: float,
    mirrored: bool,
) -> list[Transfers]:
    """Visited nodes send to the node of the home's place in their group, and these send one message to the home."""
    nodes = fabric.num_nodes // int(exchange.name.rsplit("_", 1)[1])  # of a group
    token, node = np.nonzero(visited)
    meeting = node - node % nodes + home[token] % nodes
    inside = node != meeting
    # Of each token and group one message, if its home is in another group.
    met = np.unique(np.stack([token, meeting], axis=1), axis=0)
    met = met[met[:, 1] != home[met[:, 0]]]
    sent = [
        (node[inside], meeting[inside], np.full(int(inside.sum()), float(size))),
        (met[:, 1], home[met[:, 0]], np.full(len(met), float(size))),
    ]
    return phases(fabric, sent, mirrored)
