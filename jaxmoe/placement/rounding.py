"""From nearly legal shares to legal ones: which hosts an expert keeps, and how its work is then divided."""

import numpy as np
import scipy  # imports its submodules when they are first used
from jaxtyping import Bool, Float

from jaxmoe.placement.placement import PlanError

SMALLEST_SHARE = 1e-6  # below this an expert has no part worth sending tokens to
EVEN = 1e-3  # so little over even work is even
SLACK = 1 + 1e-6  # capacities are float32: a node filled to the brim may seem overfull by rounding


def keep_hosts(
    share: Float[np.ndarray, "*plan expert node"], least_part: Float[np.ndarray, "*plan expert"]
) -> Float[np.ndarray, "*plan expert node"]:
    """Drop the shares below `least_part` of their expert, never its largest, and divide their work over the rest."""
    largest = share.max(axis=-1, keepdims=True)
    kept = np.where((share >= least_part[..., None]) | (share == largest), share, 0)
    return kept / kept.sum(axis=-1, keepdims=True)


def is_even(
    share: Float[np.ndarray, "expert node"],
    counts: Float[np.ndarray, "batch expert"],
    seconds_per_token: Float[np.ndarray, " node"],
) -> bool:
    """Whether the slowest node takes a thousandth longer at most than if work were even."""
    slowest = ((counts @ share) * seconds_per_token).max(axis=1).mean()
    return bool(slowest <= counts.sum(axis=1).mean() / (1 / seconds_per_token).sum() * (1 + EVEN))


def rebalance(
    support: Bool[np.ndarray, "expert node"],
    counts: Float[np.ndarray, "batch expert"],
    seconds_per_token: Float[np.ndarray, " node"],
    room: Float[np.ndarray, " node"],
) -> Float[np.ndarray, "expert node"]:
    """Divide experts over given hosts so that the slowest node is as fast as can be, on average over batches.

    A linear programme: minimise mean_b t_b with t_b >= seconds_per_token[n] * sum_e counts[b, e] share[e, n],
    rows of share summing to 1 and columns to at most `room` (experts that fit a node). Communication depends
    on the support alone, so with the support given this is the best there is. Raises `PlanError` when the
    experts do not fit these hosts.
    """
    expert, node = np.nonzero(support)
    batches, hosts = len(counts), len(expert)
    # One row per batch and node: work of that node's hosts, less the batch's time. Scaled to be near 1.
    work = counts[:, expert] * seconds_per_token[node]
    scale = work.sum(axis=1).mean() / len(room)
    rows = (np.arange(batches)[:, None] * len(room) + node).ravel()
    load = scipy.sparse.csr_matrix(
        (work.ravel() / scale, (rows, np.tile(np.arange(hosts), batches))), (batches * len(room), hosts)
    )
    slowest = scipy.sparse.kron(scipy.sparse.eye(batches), -np.ones((len(room), 1)))
    limited = np.flatnonzero(np.isfinite(room))
    held = scipy.sparse.csr_matrix((np.ones(hosts), (node, np.arange(hosts))), (len(room), hosts))[limited]
    solution = scipy.optimize.linprog(
        c=np.concatenate([np.zeros(hosts), np.full(batches, 1 / batches)]),
        A_ub=scipy.sparse.bmat([[load, slowest], [held, None]], format="csr")
        if limited.size
        else scipy.sparse.hstack([load, slowest]),
        b_ub=np.concatenate([np.zeros(batches * len(room)), room[limited] * SLACK]),
        A_eq=scipy.sparse.csr_matrix((np.ones(hosts), (expert, np.arange(hosts))), (len(support), hosts + batches)),
        b_eq=np.ones(len(support)),
        method="highs",
    )
    if solution.x is None:
        raise PlanError(f"no division of the experts over these hosts fits the nodes' memory ({solution.message})")
    share = np.zeros(support.shape)
    share[expert, node] = np.where(solution.x[:hosts] < SMALLEST_SHARE, 0, solution.x[:hosts])
    return share / share.sum(axis=1, keepdims=True)


def fit_memory(
    share: Float[np.ndarray, "expert node"], room: Float[np.ndarray, " node"]
) -> Float[np.ndarray, "expert node"]:
    """The placement nearest to `share` that fits: `room` is in experts that fit a node.

    A linear programme: of every share as much is kept as fits, and the least possible put elsewhere.
    """
    experts, nodes = share.shape
    rows = scipy.sparse.kron(scipy.sparse.eye(experts), np.ones((1, nodes)))
    columns = scipy.sparse.kron(np.ones((1, experts)), scipy.sparse.eye(nodes))
    solution = scipy.optimize.linprog(
        c=np.repeat([0.0, 1.0], share.size),  # what stays is free, what moves is not
        A_ub=scipy.sparse.hstack([columns, columns], format="csr"),
        b_ub=np.minimum(room * SLACK, experts),
        A_eq=scipy.sparse.hstack([rows, rows], format="csr"),
        b_eq=np.ones(experts),
        bounds=np.stack([np.zeros(2 * share.size), np.append(share.ravel(), np.ones(share.size))], axis=1),
        method="highs",
    )
    if solution.x is None:
        raise PlanError(f"{experts} experts do not fit the nodes' memory ({solution.message})")
    kept = solution.x.reshape(2, *share.shape).sum(axis=0)
    kept = np.where(kept < SMALLEST_SHARE, 0, kept)
    return kept / kept.sum(axis=1, keepdims=True)


def fit_slots(
    share: Float[np.ndarray, "expert node"], room: Float[np.ndarray, " node"]
) -> Float[np.ndarray, "expert node"]:
    """Removes replicas until every node holds at most `room` experts, rounded down.

    The largest shares keep their hosts, and every expert keeps at least one. Raises `PlanError` where
    there are fewer slots than experts.
    """
    left, kept = np.minimum(np.floor(room), len(share)), np.zeros_like(share)
    if left.sum() < len(share):
        raise PlanError(f"{len(share)} experts do not fit {left.sum():g} slots; raise the memory capacity")
    for expert in np.argsort(-share.max(axis=1), kind="stable"):
        host = np.where(left > 0, share[expert], -1).argmax()
        kept[expert, host], left[host] = max(share[expert, host], SMALLEST_SHARE), left[host] - 1
    expert, node = np.unravel_index(np.argsort(-share, axis=None, kind="stable"), share.shape)
    for e, n in zip(expert, node, strict=True):
        if share[e, n] > SMALLEST_SHARE and kept[e, n] == 0 and left[n] > 0:
            kept[e, n], left[n] = share[e, n], left[n] - 1
    return kept / kept.sum(axis=1, keepdims=True)
