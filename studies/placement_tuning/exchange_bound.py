"""Lower bounds on the communication of a plan under any exchange, node by node."""

import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.engine import Layer
from jaxmoe.network import Congestion
from jaxmoe.traces import Batch
from jaxmoe.tune.bounds import BISECTIONS


def exchange_bound(
    model: Layer, share: Float[np.ndarray, "expert node"], batches: Batch
) -> Float[np.ndarray, " batch"]:
    """Communication time of a sharded plan that no exchange beats, s, for drawn or merged batches of one layer.

    It holds for the congestion model and choices computed where they are placed; not for exchanges that leave
    traffic out. Raises `ValueError` for replicas and other time models.

    Every node that a token visits sends its part of the result on, over its own links, and all tokens together keep no
    more than one vector each: where `v` tokens visit a node whose links carry `r` vectors in a second, the most loaded
    links are busy for L seconds with sum(max(v - L r, 0)) at most the number of tokens. Dispatch likewise.
    """
    if model.mode != "sharded" or not isinstance(model.time_model, Congestion):
        raise ValueError("exchange_bound is of sharded plans under the congestion model")
    topology, costs, nodes = model.machine.topology, model.costs, model.machine.num_nodes
    visited, weight = visited_nodes(share, batches)
    visits = np.stack([w @ of for w, of in zip(weight, visited, strict=True)])
    kept = np.array([w @ of.any(axis=1) for w, of in zip(weight, visited, strict=True)])
    rates = np.asarray(topology.link_rate, float)
    seconds = np.zeros(len(weight))
    for end, size in zip(topology.link_ends.T, (costs.combine_bytes, costs.dispatch_bytes), strict=True):
        carried = np.bincount(end, rates, nodes)[:nodes]  # the last ends may be switches
        seconds += _least_busy(visits, carried / float(size), kept)
    return seconds


def visited_nodes(
    share: Float[np.ndarray, "expert node"], batches: Batch
) -> tuple[Bool[np.ndarray, "batch token node"], Float[np.ndarray, "batch token"]]:
    """The nodes that tokens of one layer visit under a sharded plan, and the tokens' weights."""
    weight = np.asarray(batches.weight, float)
    experts = np.broadcast_to(batches.experts, (*weight.shape, batches.experts.shape[-1]))
    held = np.append(share > 0, np.zeros((1, share.shape[1]), bool), axis=0)  # -1 chooses none
    return np.stack([held[chosen].any(axis=1) for chosen in experts]), weight


def _least_busy(
    visits: Float[np.ndarray, "batch node"], carried: Float[np.ndarray, " node"], kept: Float[np.ndarray, " batch"]
) -> Float[np.ndarray, " batch"]:
    """Least L with sum(max(visits - L carried, 0)) at most `kept`, by bisection from below."""
    alone = np.divide(visits, carried, out=np.zeros_like(visits), where=carried > 0)  # a lone node has no links
    low, high = np.zeros(len(visits)), alone.max(axis=1)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = np.maximum(visits - middle[:, None] * carried, 0).sum(axis=1) <= kept
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return low
