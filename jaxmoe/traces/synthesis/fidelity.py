"""The fidelity of a synthetic trace to a recorded one, with one by Zipf alone to compare."""

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
from jaxmoe.traces.statistics.concentration import cv
from jaxmoe.traces.synthetic import synthetic_trace
from jaxmoe.traces.trace import GatingTrace, tally

# What a generator without any structure but skew makes of a trace: the baseline that a fit has to beat.

HALVINGS = 12
MOST_SKEW = 4.0
TRIED_TOKENS = 8192


def zipf_trace(trace: GatingTrace, seed: int) -> GatingTrace:
    """A trace of as many tokens whose experts have Zipf popularity; its skew gives the same mean cv of loads."""
    wanted = float(cv(tally(trace.experts, trace.num_experts)).mean())
    few, low, high = min(trace.num_tokens, TRIED_TOKENS), 0.0, MOST_SKEW
    for _ in range(HALVINGS):
        skew = (low + high) / 2
        found = float(cv(tally(_drawn(trace, few, skew, seed).experts, trace.num_experts)).mean())
        low, high = (skew, high) if found < wanted else (low, skew)
    return _drawn(trace, trace.num_tokens, (low + high) / 2, seed)


def _drawn(trace: GatingTrace, tokens: int, skew: float, seed: int) -> GatingTrace:
    return synthetic_trace(
        tokens=tokens,
        layer_ids=trace.layer_ids.tolist(),
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        skew=skew,
        coactivation=0.0,
        reuse=0.0,
        seed=seed,
    )


# How far a drawn trace has the figures of the recorded one.

BATCH_TOKENS = 128
NODES = 8


@dataclass(frozen=True)
class Tolerance:
    """How near a drawn figure should be: within a part of the recorded one, or within an absolute distance."""

    within: float
    relative: bool

    def met(self, recorded: float, drawn: float) -> bool:
        return abs(drawn - recorded) <= self.within * (abs(recorded) if self.relative else 1)

    def __str__(self) -> str:
        return f"{self.within:.0%}" if self.relative else f"{self.within:g}"


TOLERANCES = {
    "load_kl": Tolerance(0.01, relative=False),
    "load_max_over_mean": Tolerance(0.10, relative=True),
    "token_reuse": Tolerance(0.03, relative=False),
    "token_pair_coverage_top20": Tolerance(0.05, relative=False),
    "layer_pair_coverage_top20": Tolerance(0.05, relative=False),
    "coactivation_coverage_top10": Tolerance(0.05, relative=False),
    "node_max_over_mean": Tolerance(0.10, relative=True),
    "node_max_over_mean_p95": Tolerance(0.10, relative=True),
    "node_max_over_mean_consecutive": Tolerance(0.10, relative=True),
    "node_max_over_mean_consecutive_p95": Tolerance(0.10, relative=True),
}


@dataclass(frozen=True)
class Fidelity:
    """The figures of a trace by layer, and on average those of `TOLERANCES`.

    `load_kl` is the divergence of its loads from the recorded ones, nats. `node_max_over_mean` is the load of the
    busiest node over the mean under expert parallelism, mean and 95th percentile over layers and batches of 128
    tokens, drawn at random or consecutive.
    """

    summary: Summary
    figures: dict[str, float]


def fidelity_of(traces: dict[str, GatingTrace], seed: int, report: Callable[[int, int], None]) -> dict[str, Fidelity]:
    """The figures of several traces, the first of which is the recorded one that loads are compared with."""
    found: dict[str, Fidelity] = {}
    recorded: np.ndarray | None = None
    for done, (name, trace) in enumerate(traces.items()):
        report(done, len(traces))
        counts = count_pairs(trace)
        recorded = counts.load if recorded is None else recorded
        summary = summarise(trace.layer_ids, trace.top_k, counts, count_shuffled(trace, seed), seed)
        figures = {
            figure: value for figure, value in summary.mean().items() if figure in TOLERANCES and value is not None
        }
        figures["load_kl"] = float(np.mean(kl(recorded, counts.load)))
        found[name] = Fidelity(summary, figures | _node_figures(trace, seed))
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
