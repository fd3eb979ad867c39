"""Profiling a network: alpha and beta of every pair of nodes, way and phase, from timings (camoe Algorithm 1, 3.3).

A time is alpha + beta x bytes. Phase one of the algorithm times every pair alone with messages of every size. Phase two
lets one node send to all others at once, and takes what that takes for the one edge that is predicted to be slowest:
one sample in place of N - 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.network.pairwise import STAGES, Profile, ProfileError

LEAST_RATIO = 1.2  # of the largest size to the smallest: of more alike ones alpha and beta cannot be told apart
FEWEST_REFINED, MOST_ERROR = 6, 0.1  # sizes and relative standard error of what phase two may change
ITERATIONS = 50  # of the robust fit
CUTOFF = 4.685  # scales beyond which a residual has no weight: 95 % efficiency on normal noise (Tukey's biweight)
LEAST_SCALE = 1e-9  # of relative residuals: what is left of exact timings is rounding

Measure = Callable[[str, Float[np.ndarray, "node node2"]], float]
"""Seconds of a phase that carries these bytes from every node (row) to every node (column)."""


@dataclass(frozen=True)
class Timings:
    """Measured messages, one each entry: `phase` is a place in `STAGES`."""

    source: Int[np.ndarray, " sample"]
    destination: Int[np.ndarray, " sample"]
    phase: Int[np.ndarray, " sample"]
    bytes: Float[np.ndarray, " sample"]
    seconds: Float[np.ndarray, " sample"]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, float, float]]) -> "Timings":
        """From source, destination, phase, bytes and seconds of each message."""
        numbers = np.array([row[:3] for row in rows], np.int64).reshape(-1, 3).T
        amounts = np.array([row[3:] for row in rows], float).reshape(-1, 2).T
        return cls(numbers[0], numbers[1], numbers[2], amounts[0], amounts[1])

    @property
    def num_nodes(self) -> int:
        """Nodes that are named: 0 up to the largest number."""
        return 1 + int(max(self.source.max(initial=-1), self.destination.max(initial=-1)))

    def __len__(self) -> int:
        return len(self.source)


# Robust lines: weighted least squares of relative residuals, weighted anew by Tukey's biweight. All groups at once.


@dataclass(frozen=True)
class Lines:
    """A line for each group of samples, with standard errors."""

    alpha: Float[np.ndarray, " group"]
    beta: Float[np.ndarray, " group"]
    alpha_error: Float[np.ndarray, " group"]
    beta_error: Float[np.ndarray, " group"]


def fit_lines(
    group: Int[np.ndarray, " sample"],
    size: Float[np.ndarray, " sample"],
    seconds: Float[np.ndarray, " sample"],
    groups: int,
) -> Lines:
    """seconds = alpha + beta x size in every group, robust to outliers.

    Noise is taken to be relative to the time, so a message counts by the inverse square of its predicted time. Every
    group needs at least two sizes. Standard errors are those of the weighted fit: 0 for two samples, and infinite
    where all but two were outliers.
    """
    count = np.bincount(group, minlength=groups)
    alpha, beta = _through_medians(group, size, seconds, groups)
    weight = np.ones_like(seconds)
    few = count / np.maximum(count - 2, 1)  # residuals of few samples are small, for the line bends to them
    for _ in range(ITERATIONS):
        expected = _expected(alpha, beta, group, size, seconds)
        residual = (alpha[group] + beta[group] * size - seconds) / expected
        scale = np.maximum(1.4826 * few * _medians(group, np.abs(residual), groups), LEAST_SCALE)
        inside = np.clip(1 - (residual / (CUTOFF * scale[group])) ** 2, 0, None)
        weight = inside**2 / expected**2
        alpha, beta, _, _ = _weighted(group, size, seconds, weight, groups)
    residual = alpha[group] + beta[group] * size - seconds
    left = np.bincount(group, weight > 0, groups) - 2
    spread = np.bincount(group, weight * residual**2, groups) / np.maximum(left, 1)
    spread = np.where((left < 1) & (count > 2), np.inf, spread * (count > 2))
    alpha, beta, of_alpha, of_beta = _weighted(group, size, seconds, weight, groups)
    return Lines(alpha, beta, np.sqrt(spread * of_alpha), np.sqrt(spread * of_beta))


def _expected(
    alpha: np.ndarray, beta: np.ndarray, group: np.ndarray, size: np.ndarray, seconds: np.ndarray
) -> np.ndarray:
    """Predicted times, never far below what was measured in the group: where a line starts below 0 it nears 0."""
    return np.maximum(alpha[group] + beta[group] * size, 0.1 * seconds)


def _through_medians(
    group: np.ndarray, size: np.ndarray, seconds: np.ndarray, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """A start that outliers hardly move: the line through the median points of the smaller and the larger half."""
    middle = _medians(group, size, groups)[group]
    smallest = np.full(groups, np.inf)
    np.minimum.at(smallest, group, size)
    large = (size > middle) | ((size == middle) & (middle > smallest[group]))
    half = 2 * group + large
    x, y = (_medians(half, values, 2 * groups).reshape(groups, 2) for values in (size, seconds))
    beta = (y[:, 1] - y[:, 0]) / (x[:, 1] - x[:, 0])
    return y[:, 0] - beta * x[:, 0], beta


def _medians(group: np.ndarray, values: np.ndarray, groups: int) -> np.ndarray:
    """The median of every group; of none, infinite."""
    order = np.lexsort((values, group))
    count = np.bincount(group, minlength=groups)
    start = np.cumsum(count) - count
    ordered = np.append(values[order], np.inf)
    low, high = start + np.maximum(count - 1, 0) // 2, start + count // 2
    return np.where(count > 0, (ordered[low] + ordered[np.minimum(high, len(values))]) / 2, np.inf)


def _weighted(
    group: np.ndarray, size: np.ndarray, seconds: np.ndarray, weight: np.ndarray, groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Weighted least squares: alpha, beta, and their variances but for that of the noise."""

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(group, values, groups)

    all_weight = total(weight)
    mean_size, mean_seconds = total(weight * size) / all_weight, total(weight * seconds) / all_weight
    away = size - mean_size[group]
    spread = total(weight * away**2)
    beta = total(weight * away * seconds) / spread
    return mean_seconds - beta * mean_size, beta, 1 / all_weight + mean_size**2 / spread, 1 / spread


# From timings to a profile.


def fit_profile(timings: Timings, num_nodes: int | None = None) -> Profile:
    """Fit every phase and pair. Raises `ProfileError` for a pair that was not timed, or not at sizes that differ.

    A phase that was not timed at all has alpha and beta of dispatch, and so no samples.
    """
    nodes = timings.num_nodes if num_nodes is None else num_nodes
    present = [row for row in range(len(STAGES)) if (timings.phase == row).any()]
    if STAGES.index("dispatch") not in present:
        raise ProfileError("the timings have no messages of phase dispatch; measure these at least")
    away = timings.source != timings.destination
    kept = Timings(*(getattr(timings, name)[away] for name in ("source", "destination", "phase", "bytes", "seconds")))
    group = (kept.phase * nodes + kept.source) * nodes + kept.destination
    expected = [
        (row * nodes + source) * nodes + destination
        for row in present
        for source in range(nodes)
        for destination in range(nodes)
        if source != destination
    ]
    _check_groups(kept, group, expected, nodes)
    place = {number: at for at, number in enumerate(expected)}
    lines = fit_lines(np.array([place[number] for number in group.tolist()]), kept.bytes, kept.seconds, len(expected))
    shape = (len(STAGES), nodes, nodes)

    def table(values: np.ndarray) -> np.ndarray:
        filled = np.zeros(shape, values.dtype)
        filled.ravel()[expected] = values
        missing = [row for row in range(len(STAGES)) if row not in present]
        if values.dtype.kind == "f":
            filled[missing] = filled[STAGES.index("dispatch")]
        return filled

    samples = np.bincount(group, minlength=np.prod(shape))[expected]
    fitted = (lines.alpha, lines.beta, lines.alpha_error, lines.beta_error, samples)
    return Profile(*(table(values) for values in fitted))


def _check_groups(timings: Timings, group: np.ndarray, expected: list[int], nodes: int) -> None:
    shape = len(STAGES) * nodes**2
    least, most = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.minimum.at(least, group, timings.bytes)
    np.maximum.at(most, group, timings.bytes)
    for number in expected:
        pair, row = number % nodes**2, number // nodes**2
        where = f"{STAGES[row]} {pair // nodes} -> {pair % nodes}"
        if most[number] < 0:
            raise ProfileError(f"the timings lack {where}; measure every pair of the {nodes} nodes both ways")
        if most[number] < LEAST_RATIO * least[number] or most[number] == 0:
            raise ProfileError(
                f"{where} was timed with sizes from {least[number]:g} to {most[number]:g} B, which cannot tell alpha "
                f"from beta; measure sizes that differ by a factor of {LEAST_RATIO:g} or more"
            )


# The algorithm: what to measure, and fits of it.


@dataclass(frozen=True)
class Profiled:
    """The two network profiles that were fitted, and the timings behind them.

    `baseline` is fitted to messages sent alone (`alone`), `refined` also to messages in contention (`contended`).
    """

    baseline: Profile
    refined: Profile
    alone: Timings
    contended: Timings


def profile_network(num_nodes: int, sizes: Sequence[float], measure: Measure) -> Profiled:
    """Both phases of the algorithm on any source of timings; `sizes` are bytes of messages.

    Phase two takes a sample for each node, size and way: N x sizes of dispatch and of combine, where refining every
    edge would take N (N - 1) x sizes of each. Edges that are the predicted bottleneck at six sizes or more are fitted
    to these samples; an alpha or beta that they tell within 10 % takes the place of that of phase one, which a few
    noisy samples must not. Metadata keeps phase one. Raises `ProfileError`.
    """
    alone = _measured_alone(num_nodes, sizes, measure)
    baseline = fit_profile(alone, num_nodes)
    contended = _measured_one_to_many(num_nodes, sizes, measure, baseline)
    return Profiled(baseline, _refined(baseline, contended), alone, contended)


def _measured_alone(nodes: int, sizes: Sequence[float], measure: Measure) -> Timings:
    """Phase one: a message of every size between every two nodes, with nothing else on the network."""
    rows = []
    for row, phase in enumerate(STAGES):
        for source, destination in np.argwhere(~np.eye(nodes, dtype=bool)).tolist():
            for size in sizes:
                traffic = np.zeros((nodes, nodes))
                traffic[source, destination] = size
                rows.append((source, destination, row, size, measure(phase, traffic)))
    return Timings.of(rows)


def _measured_one_to_many(nodes: int, sizes: Sequence[float], measure: Measure, baseline: Profile) -> Timings:
    """Phase two: a node sends to all others, and all send back; the time goes to the edge expected to be slowest."""
    rows = []
    for node in range(nodes):
        for size in sizes:
            traffic = np.zeros((nodes, nodes))
            traffic[node] = size
            traffic[node, node] = 0
            for phase, sent in (("dispatch", traffic), ("combine", traffic.T)):
                row = STAGES.index(phase)
                expected = np.where(sent > 0, baseline.alpha[row] + baseline.beta[row] * sent, -np.inf)
                source, destination = divmod(int(expected.argmax()), nodes)
                rows.append((source, destination, row, size, measure(phase, sent)))
    return Timings.of(rows)


def _refined(baseline: Profile, timings: Timings) -> Profile:
    """The baseline with what phase two tells: alphas of small messages and betas of large ones, where samples do."""
    nodes = baseline.num_nodes
    group = (timings.phase * nodes + timings.source) * nodes + timings.destination
    tables = [np.array(each) for each in vars(baseline).values()]
    for number in np.unique(group):
        chosen = group == number
        if len(np.unique(timings.bytes[chosen])) < FEWEST_REFINED:
            continue
        line = fit_lines(np.zeros(int(chosen.sum()), int), timings.bytes[chosen], timings.seconds[chosen], 1)
        for at, (value, error) in enumerate(((line.alpha, line.alpha_error), (line.beta, line.beta_error))):
            if error[0] <= MOST_ERROR * abs(value[0]):
                tables[at].ravel()[number], tables[at + 2].ravel()[number] = value[0], error[0]
                tables[4].ravel()[number] = chosen.sum()
    return Profile(*tables)
