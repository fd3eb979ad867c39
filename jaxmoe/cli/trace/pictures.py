"""The figures of `jaxmoe trace`, by command."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxmoe.cli.session import OutputFolder
from jaxmoe.experiment.trace_statistics import LongTail, NodeLoads, TraceFindings, top_count
from jaxmoe.report import (
    plot_coactivation,
    plot_conditional,
    plot_coverage,
    plot_expert_load,
    plot_long_tail,
    plot_node_load,
    plot_reuse,
    plot_stage_correlation,
    plot_top_experts,
    plot_trace_comparison,
)
from jaxmoe.traces import GatingTrace
from jaxmoe.traces.statistics import (
    PairCounts,
    PhaseAgreement,
    Topics,
    coactivation,
    conditional,
    coverage_curve,
    cv,
    every_pair,
    pairs_above,
)

PANELS = 3  # layers shown of heatmaps: the first, the middle one and the last


def draw_statistics(folder: OutputFolder, findings: Mapping[str, TraceFindings], topics: Topics | None) -> None:
    """Of one file everything; of several what they have in common, and what differs by topic."""
    if len(findings) == 1:
        ((name, found),) = findings.items()
        _draw_file(folder, name, found)
    else:
        _draw_reuse(folder, findings)
    if topics is not None:
        _draw_topics(folder, topics)


def draw_comparison(
    folder: OutputFolder,
    layer_ids: Sequence[int],
    loads: Mapping[str, np.ndarray],
    figures: Mapping[str, Mapping[str, float | None]],
    row: int,
) -> None:
    """Loads of both traces in one layer, and the `figures` that both have, on average over layers."""
    title = f"the most popular experts of layer {layer_ids[row]}, where loads differ most"
    top = top_count(loads["A"].shape[1])
    plot_top_experts(folder.target("top_experts.png"), {name: load[row] for name, load in loads.items()}, title, top)
    _draw_side_by_side(folder.target("comparison.png"), figures, "A and B, mean over layers")


def _draw_side_by_side(path: Path, figures: Mapping[str, Mapping[str, float | None]], title: str) -> None:
    """The figures that all traces have."""
    first = next(iter(figures.values()))
    shared = [name for name in first if all(of.get(name) is not None for of in figures.values())]
    values = {name: np.array([of[figure] for figure in shared], float) for name, of in figures.items()}
    plot_trace_comparison(path, shared, values, title)


def _draw_file(folder: OutputFolder, name: str, found: TraceFindings) -> None:
    layer_ids = found.source.layer_ids
    plot_expert_load(folder.target("load.png"), layer_ids, found.load, f"{name}: load of experts over the mean")
    if found.counts is None or found.shuffled is None or not isinstance(found.source, GatingTrace):
        return
    _draw_reuse(folder, {name: found})
    _draw_heatmaps(folder, name, found.source, found.counts)
    _draw_coverage(folder, name, found.counts, found.shuffled)
    if found.phases is not None:
        _draw_phases(folder, name, layer_ids, found.phases, found.phases_baseline)
    if found.nodes is not None:
        _draw_nodes(folder, name, found.nodes)
    if found.long_tail is not None:
        _draw_long_tail(folder, name, layer_ids, found.long_tail)


def _draw_reuse(folder: OutputFolder, findings: Mapping[str, TraceFindings]) -> None:
    """Of those files that have steps, in the layers of the first of them."""
    known = {name: of.summary for name, of in findings.items() if of.summary.mean().get("token_reuse") is not None}
    if not known:
        return
    layer_ids = next(iter(known.values())).layer_ids
    alike = {name: of.figures for name, of in known.items() if np.array_equal(of.layer_ids, layer_ids)}
    plot_reuse(
        folder.target("reuse.png"),
        layer_ids,
        {name: figures["token_reuse"] for name, figures in alike.items()},
        {name: figures["token_reuse_baseline"] for name, figures in alike.items()},
        f"{', '.join(alike)}: experts that a token shares with the one before, and two at random",
    )


def _draw_heatmaps(folder: OutputFolder, name: str, trace: GatingTrace, counts: PairCounts) -> None:
    ids, shown = trace.layer_ids, _some(len(trace.layer_ids))
    if counts.token_pairs.any():
        panels = {f"layer {ids[row]}": _probability(counts.token_pairs[row], trace.top_k) for row in shown}
        names = ("expert of token t", "expert of token t + 1")
        plot_conditional(folder.target("token_heatmaps.png"), panels, f"{name}: from token to token", names)
    if counts.layer_pairs.any():
        steps = _some(len(ids) - 1)
        panels = {
            f"layer {ids[row]} to {ids[row + 1]}": _probability(counts.layer_pairs[row], trace.top_k) for row in steps
        }
        names = ("expert in the layer", "expert in the next")
        plot_conditional(folder.target("layer_heatmaps.png"), panels, f"{name}: from layer to layer", names)
    if counts.together.any():
        panels = {f"layer {ids[row]}": coactivation(counts.together[row : row + 1])[0] for row in shown}
        plot_coactivation(folder.target("coactivation.png"), panels, f"{name}: experts chosen together")


def _probability(pairs: np.ndarray, top_k: int) -> np.ndarray:
    """That the column's expert is among the next top_k, given the row's; NaN for rows that are never chosen."""
    chosen = pairs.any(axis=1, keepdims=True)
    return np.where(chosen, top_k * conditional(pairs[None])[0], np.nan)


def _draw_coverage(folder: OutputFolder, name: str, counts: PairCounts, shuffled: PairCounts) -> None:
    share = counts.load / np.maximum(counts.load.sum(axis=1, keepdims=True), 1)
    curves, baselines = {}, {}
    for label, events, chance in (
        ("next token", every_pair(counts.token_pairs), every_pair(shuffled.token_pairs)),
        ("next layer", every_pair(counts.layer_pairs), every_pair(shuffled.layer_pairs)),
        ("same token", pairs_above(counts.together), pairs_above(share[:, :, None] * share[:, None, :])),
    ):
        if events.any():
            curves[label], baselines[label] = _mean_curve(events), _mean_curve(chance)
    if curves:
        title = f"{name}: how much falls on the most frequent pairs of experts, mean over layers"
        plot_coverage(folder.target("coverage.png"), curves, baselines, title)


def _mean_curve(events: np.ndarray) -> np.ndarray:
    """Mean over the layers that have events, from 0 at no pair."""
    return np.append(0.0, coverage_curve(events[events.any(axis=1)]).mean(axis=0))


def _draw_phases(
    folder: OutputFolder, name: str, layer_ids: np.ndarray, phases: PhaseAgreement, dealt: PhaseAgreement | None
) -> None:
    correlations, baselines = _correlations(phases), {} if dealt is None else _correlations(dealt)
    known = {label: values for label, values in correlations.items() if np.isfinite(values).any()}
    baselines = {label: values for label, values in baselines.items() if label in known and np.isfinite(values).any()}
    if known:
        title = f"{name}: prefill and decode, and samples of the same"
        plot_stage_correlation(folder.target("phases.png"), layer_ids, known, baselines, title)


def _correlations(phases: PhaseAgreement) -> dict[str, np.ndarray]:
    return {
        "loads": phases.load,
        "from token to token": phases.token_heatmap,
        "from layer to layer": np.append(phases.layer_heatmap, np.nan),
    }


def _draw_nodes(folder: OutputFolder, name: str, nodes: NodeLoads) -> None:
    """The layer in which the busiest node has most to do."""
    row = _largest(nodes.windows.mean)
    ratio = nodes.ratio[:, row]
    known = np.isfinite(ratio).all(axis=1)
    if known.any():
        title = f"{name}: loads of the nodes in layer {nodes.plan.layer_ids[row]} ({nodes.plan.name})"
        passed = nodes.window_tokens * (1 + np.arange(len(ratio)))
        plot_node_load(folder.target("nodes.png"), passed[known], ratio[known], title)


def _draw_long_tail(folder: OutputFolder, name: str, layer_ids: np.ndarray, tail: LongTail) -> None:
    """The layer in the middle."""
    row = len(layer_ids) // 2
    batches = {size: tail.tokens[index, :, row] for index, size in enumerate(tail.batch_tokens)}
    plot_long_tail(folder.target("long_tail.png"), batches, f"{name}: tokens of experts in layer {layer_ids[row]}")


def _draw_topics(folder: OutputFolder, topics: Topics) -> None:
    """The layer in which experts are the most unequally popular."""
    row = _largest(np.nan_to_num(cv(topics.counts)).mean(axis=0))
    title = f"the most popular experts by topic, layer {topics.layer_ids[row]}"
    load = {name: topics.counts[index, row] for index, name in enumerate(topics.names)}
    plot_top_experts(folder.target("topics.png"), load, title, top_count(topics.counts.shape[2]))


def _largest(values: np.ndarray) -> int:
    return int(np.nan_to_num(values).argmax())


def _some(layers: int) -> list[int]:
    """Rows of a few layers from the first to the last."""
    return sorted({round(row) for row in np.linspace(0, layers - 1, PANELS).tolist()})
