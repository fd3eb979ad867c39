"""Topics of a recorded trace: stretches of tokens with similar loads, found by clustering."""

import numpy as np
import scipy  # imports its submodules when they are first used

from jaxmoe.traces.loads import tally
from jaxmoe.traces.trace import GatingTrace

WINDOW = 64  # tokens: long enough for loads to show, short enough for a topic to change inside a request
MOST_TOPICS = 16
STRETCHES_PER_TOPIC = 8
DIMENSIONS = 32  # of the space to cluster in
RESTARTS = 8


def find_topics(trace: GatingTrace, seed: int) -> np.ndarray:
    """The topic of every token, int [token], alike for stretches of about `WINDOW` tokens of one request.

    Stretches are clustered by their loads in all layers: k-means on the main directions. Loads enter as square
    roots of shares, whose noise is even. Few stretches make few topics.
    """
    length = np.diff(trace.seq_start, append=trace.num_tokens)
    # What is left at the end of a request is too short to tell its topic and goes with the stretch before.
    number = np.maximum(1, np.round(length / WINDOW).astype(int))
    request = np.repeat(np.arange(len(length)), length)
    position = np.arange(trace.num_tokens) - trace.seq_start[request]
    stretch = (np.cumsum(number) - number)[request] + np.minimum(position // WINDOW, number[request] - 1)
    stretches = int(number.sum())
    ends = np.searchsorted(stretch, np.arange(1, stretches))
    loads = np.stack([tally(rows, trace.num_experts) for rows in np.split(trace.experts, ends)])
    different = len(np.unique(loads, axis=0))
    topics = min(MOST_TOPICS, max(1, stretches // STRETCHES_PER_TOPIC), different)
    if topics == 1:
        return np.zeros(trace.num_tokens, int)
    share = np.sqrt(loads / np.maximum(loads.sum(axis=2, keepdims=True), 1)).reshape(stretches, -1)
    left, strength, _ = np.linalg.svd(share - share.mean(axis=0), full_matrices=False)
    points = (left * strength)[:, :DIMENSIONS]
    return _clustered(points, topics, seed)[stretch]


def _clustered(points: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """The best of several k-means runs, int [point]."""
    best, labels = np.inf, np.zeros(len(points), int)
    for restart in range(RESTARTS):
        rng = np.random.default_rng((seed, restart))
        try:
            centres, found = scipy.cluster.vq.kmeans2(points, clusters, minit="++", missing="raise", rng=rng)
        except scipy.cluster.vq.ClusterError:  # a cluster has lost all its points
            continue
        spread = float(((points - centres[found]) ** 2).sum())
        if spread < best:
            best, labels = spread, found
    return labels
