"""How far a drawn trace has the figures of the recorded one."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxmoe.traces.statistics import (
    Summary,
    batch_node_ratio,
    count_pairs,
    count_shuffled,
    expert_runs,
    kl,
    node_load_ratio,
    summarise,
)
from jaxmoe.traces.trace import GatingTrace

BATCH_TOKENS = 128
NODES = 8


@dataclass(frozen=True)
class Aim:
    """How near a drawn figure should be: within a part of the recorded one, or within an absolute distance."""

    within: float
    relative: bool

    def met(self, recorded: float, drawn: float) -> bool:
        return abs(drawn - recorded) <= self.within * (abs(recorded) if self.relative else 1)

    def __str__(self) -> str:
        return f"{self.within:.0%}" if self.relative else f"{self.within:g}"


AIMS = {
    "load_kl": Aim(0.01, relative=False),
    "load_max_over_mean": Aim(0.10, relative=True),
    "token_reuse": Aim(0.03, relative=False),
    "token_pair_coverage_top20": Aim(0.05, relative=False),
    "layer_pair_coverage_top20": Aim(0.05, relative=False),
    "coactivation_coverage_top10": Aim(0.05, relative=False),
    "node_max_over_mean": Aim(0.10, relative=True),
    "node_max_over_mean_p95": Aim(0.10, relative=True),
    "node_max_over_mean_consecutive": Aim(0.10, relative=True),
    "node_max_over_mean_consecutive_p95": Aim(0.10, relative=True),
}


@dataclass(frozen=True)
class Likeness:
    """The figures of a trace by layer, and on average those of `AIMS`.

    `load_kl` is the divergence of its loads from the recorded ones, nats. `node_max_over_mean` is the load of the
    busiest node over the mean under expert parallelism, mean and 95th percentile over layers and batches of 128
    tokens, drawn at random or consecutive.
    """

    summary: Summary
    figures: dict[str, float]


def likeness(traces: dict[str, GatingTrace], seed: int, report: Callable[[int, int], None]) -> dict[str, Likeness]:
    """The figures of several traces, the first of which is the recorded one that loads are compared with."""
    found: dict[str, Likeness] = {}
    recorded: np.ndarray | None = None
    for done, (name, trace) in enumerate(traces.items()):
        report(done, len(traces))
        counts = count_pairs(trace)
        recorded = counts.load if recorded is None else recorded
        summary = summarise(trace.layer_ids, trace.top_k, counts, count_shuffled(trace, seed), seed)
        figures = {figure: value for figure, value in summary.mean().items() if figure in AIMS and value is not None}
        figures["load_kl"] = float(np.mean(kl(recorded, counts.load)))
        found[name] = Likeness(summary, figures | _node_figures(trace, seed))
    report(len(traces), len(traces))
    return found


def _node_figures(trace: GatingTrace, seed: int) -> dict[str, float]:
    share = expert_runs(len(trace.layer_ids), trace.num_experts, min(NODES, trace.num_experts))
    tokens = min(BATCH_TOKENS, trace.num_tokens)
    figures = {}
    for kind, ratio in (
        ("", batch_node_ratio(trace, share, tokens, seed=seed)),
        ("_consecutive", node_load_ratio(trace, share, tokens)),
    ):
        busiest = ratio.max(axis=2)
        figures[f"node_max_over_mean{kind}"] = float(np.nanmean(busiest))
        figures[f"node_max_over_mean{kind}_p95"] = float(np.nanpercentile(busiest, 95))
    return figures
