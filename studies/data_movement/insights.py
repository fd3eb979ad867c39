"""The six insights of the wafer-scale study of data movement (III), each put as numbers on recorded traces."""

from collections.abc import Iterable

import numpy as np

from jaxmoe.placement import expert_parallel_balanced
from jaxmoe.traces import DECODE, PREFILL, GatingTrace, load_counts
from jaxmoe.traces.statistics import (
    PairCounts,
    Summary,
    batch_node_ratio,
    expert_runs,
    max_over_mean,
    phase_agreement,
    shuffled_phases,
    spearman,
    topics_of_files,
)
from jaxmoe.traces.trace import tally

BATCH_TOKENS = (16, 128)
COPIED = 0.1  # of the experts, the most popular ones, get a copy on every node
FIRST_PART = 0.25  # of a request stands in for its prompt where phases are not recorded
MIN_TOKENS = 64  # of a request whose parts are compared

Row = dict[str, object]


def row(insight: int, trace: str, figure: str, value: float, beside: str, other: float) -> Row:
    """A number, and the one that it has to be seen beside."""
    return {
        "insight": insight,
        "trace": trace,
        "figure": figure,
        "value": f"{value:.3f}",
        "beside": beside,
        "other": f"{other:.3f}",
    }


def prefill_tells_decode(name: str, trace: GatingTrace, seed: int) -> Iterable[Row]:
    """Insight 1 (Ob3): do the experts of the prompt tell those of the answer?"""
    what, phased, phase = with_phases(trace)
    found, by_chance = (phase_agreement(phased, one) for one in (phase, shuffled_phases(phase, seed)))
    for figure in ("load", "token_heatmap", "layer_heatmap"):
        rho, chance = (float(np.nanmean(getattr(one, figure))) for one in (found, by_chance))
        yield row(1, name, f"Spearman of {figure}, {what}", rho, "stretches dealt at random", chance)
    own, others = own_and_other_requests(trace.without_repeats())
    figure = f"Spearman of a request's loads, first {FIRST_PART:.0%} and rest"
    yield row(1, name, figure, own, "another request's first", others)


def with_phases(trace: GatingTrace) -> tuple[str, GatingTrace, np.ndarray]:
    """Two phases, and the tokens that have them: as recorded; else, of turns that run earlier context again, that
    context and the new tokens; else the first part of every request and the rest.
    """
    if trace.phase is not None:
        return "prefill and decode", trace, trace.phase
    length = np.diff(trace.seq_start, append=trace.num_tokens)
    if trace.is_repeat is not None:
        # Other turns are what these run again: with them, tokens would be compared with themselves.
        again = np.repeat(np.logical_or.reduceat(trace.is_repeat, trace.seq_start), length)
        turns = trace.select_tokens(np.flatnonzero(again))
        return "re-run context and new tokens of a turn", turns, np.where(turns.is_repeat, PREFILL, DECODE)
    position = np.arange(trace.num_tokens) - np.repeat(trace.seq_start, length)
    first = position < np.repeat(FIRST_PART * length, length)
    return f"first {FIRST_PART:.0%} of requests and the rest", trace, np.where(first, PREFILL, DECODE)


def own_and_other_requests(trace: GatingTrace) -> tuple[float, float]:
    """Mean over requests and layers: the first part of a request against its rest, and against another one's rest."""
    parts = []
    for experts in np.split(trace.experts, trace.seq_start[1:]):
        if len(experts) >= MIN_TOKENS:
            cut = int(FIRST_PART * len(experts))
            parts.append([tally(some, trace.num_experts) for some in (experts[:cut], experts[cut:])])
    first, rest = np.array(parts).swapaxes(0, 1)
    return float(np.nanmean(spearman(first, rest))), float(np.nanmean(spearman(np.roll(first, 1, axis=0), rest)))


def layers_and_tokens(name: str, summary: Summary) -> Iterable[Row]:
    """Insight 2 (Ob1, Ob2): is there something to fetch ahead from layer to layer, and to keep from token to token?"""
    mean = summary.mean()
    for figure in ("layer_pair_coverage_top20", "token_pair_coverage_top20", "token_reuse"):
        yield row(2, name, figure, mean[figure], "tokens shuffled", mean[f"{figure}_baseline"])
    reuse = summary.figures["token_reuse"] - summary.figures["token_reuse_baseline"]
    third = len(reuse) // 3
    yield row(
        2, name, "reuse above chance, upper third of layers", reuse[-third:].mean(), "lower third", reuse[:third].mean()
    )


def placements(name: str, trace: GatingTrace, nodes: int, seed: int) -> Iterable[Row]:
    """Insights 3 and 4 (Ob4): what placement that knows loads, and copies of popular experts, do for balance."""
    load = load_counts(trace).counts[0]
    runs, balanced = expert_runs(*load.shape, nodes), expert_parallel_balanced(load, nodes)
    copied = with_copies(load, nodes)
    for tokens in BATCH_TOKENS:
        usual, placed, spread = (busiest(trace, share, tokens, seed) for share in (runs, balanced, copied))
        figure = f"busiest of {nodes} nodes over the mean, batches of {tokens}"
        yield row(3, name, f"{figure}: placed by load", placed, "experts in runs", usual)
        yield row(4, name, f"{figure}: top {COPIED:.0%} of experts on all nodes", spread, "placed by load", placed)


def with_copies(load: np.ndarray, nodes: int) -> np.ndarray:
    """The most popular experts of every layer on all nodes, each of which serves the same part of their tokens; the
    others placed by load.
    """
    popular = np.argsort(-load, axis=1)[:, : max(1, round(COPIED * load.shape[1]))]
    layer = np.arange(len(load))[:, None]
    others = load.copy()
    others[layer, popular] = 0
    share = expert_parallel_balanced(others, nodes)
    share[layer, popular] = 1 / nodes
    return share


def pair_separation(name: str, trace: GatingTrace, counts: PairCounts, nodes: int, seed: int) -> Iterable[Row]:
    """Insight 5 (Ob5): what keeping co-activated experts apart does to balance, and to the nodes visited."""
    shares = {
        "pairs apart": paired_placement(counts, nodes, 1.0),
        "pairs together": paired_placement(counts, nodes, -1.0),
        "loads alone": paired_placement(counts, nodes, 0.0),
    }
    loads = shares.pop("loads alone")
    for how, share in shares.items():
        for tokens in BATCH_TOKENS:
            figure = f"busiest of {nodes} nodes over the mean, batches of {tokens}: {how}"
            alone = busiest(trace, loads, tokens, seed)
            yield row(5, name, figure, busiest(trace, share, tokens, seed), "placed by load alone", alone)
        figure = f"nodes that a token visits: {how}"
        yield row(5, name, figure, visited(trace, share), "placed by load alone", visited(trace, loads))


def paired_placement(counts: PairCounts, nodes: int, aversion: float) -> np.ndarray:
    """As many experts on each node. By falling load, each goes where load, and `aversion` times how often it is
    chosen together with those already there, are least; both in units of an even node's part.
    """
    share = np.zeros((*counts.load.shape, nodes), np.float32)
    room = -(-counts.load.shape[1] // nodes)
    together = counts.together + counts.together.swapaxes(1, 2)
    for layer, (load, pairs) in enumerate(zip(counts.load, together, strict=True)):
        for expert in np.argsort(-load, kind="stable"):
            work = load @ share[layer] * nodes / max(1, load.sum())
            met = pairs[expert] @ share[layer] * nodes / max(1, pairs[expert].sum())
            cost = np.where(share[layer].sum(axis=0) < room, work + aversion * met, np.inf)
            share[layer, expert, cost.argmin()] = 1
    return share


def busiest(trace: GatingTrace, share: np.ndarray, tokens: int, seed: int) -> float:
    """Load of the busiest node over the mean: mean over layers and random batches."""
    return float(np.nanmean(batch_node_ratio(trace, share, tokens, seed=seed).max(axis=2)))


def visited(trace: GatingTrace, share: np.ndarray) -> float:
    """Nodes that a token visits, mean over tokens and layers."""
    host = share.argmax(axis=2)[np.arange(share.shape[0])[:, None], trace.experts]  # [token, layer, top_k]
    return float(np.mean((np.diff(np.sort(host, axis=2), axis=2) > 0).sum(axis=2) + 1))


def workloads(model: str, traces: dict[str, GatingTrace], nodes: int) -> Iterable[Row]:
    """Insight 6 (Ob4): do popular experts change with the topic, and does a placement for one serve another?"""
    topics = topics_of_files({name: load_counts(trace) for name, trace in traces.items()})
    count = max(1, topics.counts.shape[2] // 8)
    overlap = topics.overlap(count).mean(axis=2)[~np.eye(len(traces), dtype=bool)]
    by_chance = count / topics.counts.shape[2]
    yield row(6, model, f"top {count} experts that two topics share", float(overlap.mean()), "by chance", by_chance)
    plans = [expert_parallel_balanced(load, nodes) for load in topics.counts]
    served = np.array(
        [[max_over_mean(np.einsum("le,len->ln", load, plan)).mean() for load in topics.counts] for plan in plans]
    )
    own, other = np.diag(served).mean(), served[~np.eye(len(plans), dtype=bool)].mean()
    yield row(
        6, model, f"busiest of {nodes} nodes over the mean, placed by another topic", other, "by the same topic", own
    )
