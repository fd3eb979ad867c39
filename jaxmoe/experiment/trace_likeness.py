"""How alike two traces of one model are, in figures by layer."""

from functools import partial

import numpy as np

from jaxmoe.experiment.clock import Report
from jaxmoe.experiment.inputs import Source
from jaxmoe.experiment.trace_statistics import top_count
from jaxmoe.placement import expert_parallel_balanced
from jaxmoe.traces import LoadCounts
from jaxmoe.traces import statistics as st
from jaxmoe.traces.statistics import PairCounts


def count(name: str, source: Source, report: Report) -> tuple[np.ndarray, PairCounts | None]:
    """Loads [layer, expert], and counts of pairs where there are any to count."""
    if isinstance(source, LoadCounts):
        return source.counts.sum(axis=0), None
    counts = st.count_pairs(source, partial(report, f"{name}: count"))
    return counts.load, counts


def likeness_of_loads(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    count = top_count(a.shape[1])
    hot = st.hottest(a, count), st.hottest(b, count)
    return {
        "kl_a_b": st.kl(a, b),
        "kl_b_a": st.kl(b, a),
        "load_spearman": st.spearman(a, b),
        "hot_experts_common": st.common_fraction(*hot),
        "hot_experts_jaccard": st.jaccard(*hot),
    }


def likeness_of_pairs(a: PairCounts, b: PairCounts) -> dict[str, np.ndarray]:
    """Heatmaps, and what B's events put on the pairs that are the most frequent in A, and on its own."""
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
