"""Statistics of gating traces and load counts, and the similarity of two of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxmoe.experiment.inputs import OptionError, Source
from jaxmoe.experiment.stage_timer import Report
from jaxmoe.placement import Placement, expert_parallel_balanced
from jaxmoe.traces import GatingTrace, LoadCounts, load_counts
from jaxmoe.traces import statistics as st
from jaxmoe.traces.statistics import (
    BATCH_TOKENS,
    TOP_EXPERTS,
    Imbalance,
    PairCounts,
    PhaseAgreement,
    Summary,
    Topics,
    batch_node_ratio,
    count_pairs,
    count_shuffled,
    expert_runs,
    imbalance,
    long_tail,
    node_load_ratio,
    phase_agreement,
    shuffled_phases,
    summarise,
    summarise_loads,
    topics_of_files,
    topics_of_sequences,
    topics_of_windows,
)

MOST_TOPICS = 256
USUAL_NODES = 8  # as in moentwine Fig. 12


@dataclass(frozen=True)
class NodePlan:
    """Which node has what share of each expert's work, [layer, expert, node], for these layers of a trace."""

    name: str
    layer_ids: list[int]
    share: np.ndarray


@dataclass(frozen=True)
class NodeLoads:
    """Loads of the nodes of a placement, over their mean."""

    plan: NodePlan
    window_tokens: int
    ratio: np.ndarray  # [window, layer, node]
    windows: Imbalance
    batches: Imbalance


@dataclass(frozen=True)
class LongTail:
    """Tokens of the busiest expert, the next, and so on, [size, batch, layer, rank], for batches of these sizes."""

    batch_tokens: list[int]
    tokens: np.ndarray


@dataclass(frozen=True)
class TraceFindings:
    """Statistics of one trace file. Load counts have a load and a summary alone."""

    source: Source
    load: np.ndarray  # [layer, expert]
    summary: Summary
    counts: PairCounts | None = None
    shuffled: PairCounts | None = None
    phases: PhaseAgreement | None = None
    phases_baseline: PhaseAgreement | None = None
    nodes: NodeLoads | None = None
    long_tail: LongTail | None = None


def find(
    name: str, source: Source, plan: NodePlan | None, window_tokens: int, seed: int, report: Report
) -> TraceFindings:
    """Compute the statistics of one file, `name` for progress; `plan` gives the loads of nodes."""
    if isinstance(source, LoadCounts):
        return TraceFindings(source, source.counts.sum(axis=0), summarise_loads(source, seed))
    counts = count_pairs(source, partial(report, f"{name}: count"))
    shuffled = count_shuffled(source, seed, partial(report, f"{name}: shuffle"))
    phase = source.phase
    dealt = None if phase is None else shuffled_phases(phase, seed)
    sizes = [size for size in BATCH_TOKENS if size <= source.num_tokens]
    return TraceFindings(
        source,
        counts.load,
        summarise(source.layer_ids, source.top_k, counts, shuffled, seed),
        counts,
        shuffled,
        phases=_phases(source, phase, partial(report, f"{name}: phases")),
        phases_baseline=_phases(source, dealt, partial(report, f"{name}: phases at random")),
        nodes=None if plan is None else _node_loads(source, plan, window_tokens, seed),
        long_tail=LongTail(sizes, long_tail(source, sizes, seed=seed)) if sizes else None,
    )


def find_topics(sources: dict[str, Source]) -> Topics | None:
    """Topics as files, or within one file as its sequences or windows are named; `None` where there is but one."""
    if len(sources) > 1:
        return topics_of_files({name: _loads(source) for name, source in sources.items()})
    (source,) = sources.values()
    names = source.window_name if isinstance(source, LoadCounts) else source.seq_name or ()
    if not 1 < len(set(names)) <= MOST_TOPICS:
        return None
    return topics_of_windows(source) if isinstance(source, LoadCounts) else topics_of_sequences(source)


def expert_nodes(num_experts: int, nodes: int | None) -> int:
    """How many nodes share the experts. Raises `OptionError` when some would have none."""
    if nodes is None:
        return max(1, min(USUAL_NODES, num_experts // 2))
    if nodes > num_experts:
        raise OptionError(f"--nodes is {nodes}, but there are {num_experts} experts; give at most one node to each")
    return nodes


def top_count(num_experts: int) -> int:
    """How many experts are called the most popular: ten, or a quarter of few."""
    return max(1, min(TOP_EXPERTS, num_experts // 4))


def node_plan(name: str, source: Source, plan: Placement | None, nodes: int | None) -> NodePlan | None:
    """Shares of a trace's experts on nodes: those of a plan, or without one whole experts in contiguous equal runs.

    `None` for load counts. Raises `OptionError` when the plan does not fit the trace.
    """
    if isinstance(source, LoadCounts):
        return None
    layers, experts = source.layer_ids.tolist(), source.num_experts
    if plan is None:
        nodes = expert_nodes(experts, nodes)
        return NodePlan(f"experts in runs over {nodes} nodes", layers, expert_runs(len(layers), experts, nodes))
    common = [layer for layer in layers if layer in plan.layer_ids]
    if not common or plan.share.shape[1] != experts:
        raise OptionError(
            f"--placement is of {plan.share.shape[1]} experts in layers {list(plan.layer_ids)}, but {name} has "
            f"{experts} experts in layers {layers}; take a plan and a trace of the same model"
        )
    return NodePlan("plan", common, plan.share[[plan.layer_ids.index(layer) for layer in common]])


def _node_loads(trace: GatingTrace, plan: NodePlan, window_tokens: int, seed: int) -> NodeLoads:
    if plan.layer_ids != trace.layer_ids.tolist():
        trace = trace.select_layers(plan.layer_ids)
    tokens = min(window_tokens, trace.num_tokens)
    ratio = node_load_ratio(trace, plan.share, tokens)
    drawn = batch_node_ratio(trace, plan.share, tokens, seed=seed)
    return NodeLoads(plan, tokens, ratio, imbalance(ratio), imbalance(drawn))


def _phases(trace: GatingTrace, phase: np.ndarray | None, report: Callable[[int, int], None]) -> PhaseAgreement | None:
    """Agreement of prefill and decode; `None` for a trace that does not have both phases."""
    if phase is None or phase.min() == phase.max():
        return None
    return phase_agreement(trace, phase, report)


def _loads(source: Source) -> LoadCounts:
    return source if isinstance(source, LoadCounts) else load_counts(source)


# How alike two traces of one model are, in figures by layer.


def count(name: str, source: Source, report: Report) -> tuple[np.ndarray, PairCounts | None]:
    """Loads [layer, expert], and counts of pairs where there are any to count."""
    if isinstance(source, LoadCounts):
        return source.counts.sum(axis=0), None
    counts = st.count_pairs(source, partial(report, f"{name}: count"))
    return counts.load, counts


def similarity_of_loads(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    count = top_count(a.shape[1])
    hot = st.hottest(a, count), st.hottest(b, count)
    return {
        "kl_a_b": st.kl(a, b),
        "kl_b_a": st.kl(b, a),
        "load_spearman": st.spearman(a, b),
        "hot_experts_common": st.common_fraction(*hot),
        "hot_experts_jaccard": st.jaccard(*hot),
    }


def similarity_of_pairs(a: PairCounts, b: PairCounts) -> dict[str, np.ndarray]:
    """Rank correlations of heatmaps, and the part of B's events on the most frequent pairs of A, and of B itself."""
    figures = {
        "token_heatmap_spearman": _heatmaps(a.token_pairs, b.token_pairs),
        "layer_heatmap_spearman": _heatmaps(a.layer_pairs, b.layer_pairs),
    }
    for name, share, of_a, of_b in (
        ("token_pair_coverage_top20", st.TOP_PAIRS, st.every_pair(a.token_pairs), st.every_pair(b.token_pairs)),
        ("layer_pair_coverage_top20", st.TOP_PAIRS, st.every_pair(a.layer_pairs), st.every_pair(b.layer_pairs)),
        ("coactivation_coverage_top10", st.TOP_TOGETHER, st.pairs_above(a.together), st.pairs_above(b.together)),
    ):
        figures[f"{name}_of_a_in_b"] = st.coverage_of(of_a, of_b, share)
        figures[f"{name}_of_b_in_b"] = st.coverage(of_b, share)
    return figures


def _heatmaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return st.spearman_of_heatmaps(st.conditional(a), st.conditional(b))


def service(a: np.ndarray, b: np.ndarray, nodes: int) -> dict[str, np.ndarray]:
    """Load of the busiest node over the mean when B is served, by what its expert-parallel plan was balanced on."""
    layers, experts = b.shape
    plans = {
        "balanced_on_a": expert_parallel_balanced(a, nodes),
        "balanced_on_b": expert_parallel_balanced(b, nodes),
        "in_runs": st.expert_runs(layers, experts, nodes),
    }
    return {
        f"node_max_over_mean_{name}": st.max_over_mean(np.einsum("le,len->ln", b, share))
        for name, share in plans.items()
    }


def global_figures(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """The metrics of camoe (A.4) that are of a whole model; its avg_layer_kl are the means over layers."""
    return {
        "cv_a": st.global_cv(a),
        "cv_b": st.global_cv(b),
        "avg_layer_cv_a": st.avg_layer_cv(a),
        "avg_layer_cv_b": st.avg_layer_cv(b),
        "kl_a_b": st.global_kl(a, b),
        "kl_b_a": st.global_kl(b, a),
    }


def own_means(load: np.ndarray, pairs: PairCounts | None) -> dict[str, float | None]:
    """The figures of one trace alone, mean over layers."""
    figures = st.load_figures(load) | ({} if pairs is None else st.pair_figures(pairs))
    return st.by_layer(np.arange(len(load)), figures)["mean"]
