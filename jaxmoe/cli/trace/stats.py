"""`jaxmoe trace stats`: what traces and load counts tell about their model, by layer and on average."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.comparison_output import new_table, print_table
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.cli.trace.pictures import draw_statistics
from jaxmoe.experiment.inputs import OptionError, Source, read_files
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.experiment.trace_statistics import (
    LongTail,
    NodeLoads,
    TraceFindings,
    find,
    find_topics,
    node_plan,
    top_count,
)
from jaxmoe.files import write_table
from jaxmoe.placement import Placement, read_plan
from jaxmoe.traces import LoadCounts
from jaxmoe.traces.statistics import PhaseAgreement, Summary, Topics, by_layer, global_cv

# What `jaxmoe trace stats` tells: the summary for programs, a table of every layer, and one for people.

BASELINE, INDEPENDENT = "_baseline", "_independent"
CAPTION = (
    "load: busiest expert over the mean, and coefficient of variation; token and layer pairs: the share of (expert, "
    "next expert) on the most frequent 20 % of pairs; coactivation: that of pairs of one token on 10 %; reuse: experts "
    "that a token has in common with the one before. By chance: even loads, shuffled tokens, independent choices"
)


def statistics_report(findings: Mapping[str, TraceFindings], topics: Topics | None) -> dict[str, Any]:
    """Of one file all that was found; of several that of each, by name. And their topics."""
    reports = {name: _findings(found) for name, found in findings.items()}
    files = next(iter(reports.values())) if len(reports) == 1 else {"files": reports}
    return files | {"topics": None if topics is None else _topics(topics)}


def print_statistics(findings: Mapping[str, TraceFindings]) -> None:
    """Figures and their baselines: of one file with the layers at both ends, of several on average."""
    if len(findings) == 1:
        ((name, found),) = findings.items()
        print_table(_figures_of_one(name, found.summary))
    else:
        print_table(_figures_of_many({name: found.summary for name, found in findings.items()}))


def layer_rows(findings: Mapping[str, TraceFindings]) -> list[dict[str, Any]]:
    """Every layer of every file."""
    return [{"file": name} | row for name, found in findings.items() for row in found.summary.report()["layers"]]


def source_report(source: Source) -> dict[str, Any]:
    """Kind and size of a trace or of load counts, for the summary."""
    about: dict[str, Any] = {"num_experts": source.num_experts, "top_k": source.top_k, "facts": source.facts}
    if isinstance(source, LoadCounts):
        return {"kind": "load counts", "windows": len(source.window_name), "choices": int(source.counts.sum())} | about
    return {"kind": "trace", "tokens": source.num_tokens, "sequences": len(source.seq_start)} | about


def _findings(found: TraceFindings) -> dict[str, Any]:
    return {
        "source": source_report(found.source),
        **found.summary.report(),
        # Selectivity of the whole model as camoe (Eq. 14) has it; its avg_layer_cv is the mean of load_cv.
        "global_cv": global_cv(found.load) if found.load.any() else None,
        "phases": _phases(found.source.layer_ids, found.phases, found.phases_baseline),
        "nodes": None if found.nodes is None else _nodes(found.nodes),
        "long_tail": None if found.long_tail is None else _long_tail(found.long_tail),
    }


def _phases(layer_ids: np.ndarray, phases: PhaseAgreement | None, dealt: PhaseAgreement | None) -> Any:
    if phases is None:
        return None
    figures = {f"spearman_{name}": values for name, values in asdict(phases).items()}
    if dealt is not None:
        figures |= {f"spearman_{name}{BASELINE}": values for name, values in asdict(dealt).items()}
    return by_layer(layer_ids, figures)


def _nodes(nodes: NodeLoads) -> dict[str, Any]:
    figures = {
        f"{of}_max_over_mean_{figure}": values
        for of, found in (("window", nodes.windows), ("batch", nodes.batches))
        for figure, values in asdict(found).items()
    }
    return {
        "placement": nodes.plan.name,
        "nodes": nodes.plan.share.shape[2],
        "window_tokens": nodes.window_tokens,
        "windows": len(nodes.ratio),
        **by_layer(np.array(nodes.plan.layer_ids), figures),
    }


def _long_tail(tail: LongTail) -> dict[str, Any]:
    """Mean over batches and layers of tokens by rank, and of the part of experts without any, for each size."""
    return {
        "batch_tokens": tail.batch_tokens,
        "tokens_by_rank": tail.tokens.mean(axis=(1, 2)).tolist(),
        "idle_experts": (tail.tokens == 0).mean(axis=(1, 2, 3)).tolist(),
    }


def _topics(topics: Topics) -> dict[str, Any]:
    count = top_count(topics.counts.shape[2])
    top = topics.top(count)
    return {
        "names": list(topics.names),
        "layer_ids": topics.layer_ids.tolist(),
        "top_experts": {name: top[row].tolist() for row, name in enumerate(topics.names)},
        "overlap": topics.overlap(count).mean(axis=2).tolist(),
    }


def _figures_of_one(name: str, summary: Summary) -> Table:
    table = new_table(name, "figure", ("mean", "by chance", "lowest (layer)", "highest (layer)"), caption=CAPTION)
    mean = summary.mean()
    for figure in _measured(mean):
        values, cells = summary.figures[figure], ["-", "-"]
        if np.isfinite(values).any():
            ends = (int(np.nanargmin(values)), int(np.nanargmax(values)))
            cells = [f"{values[row]:.2f} ({summary.layer_ids[row]})" for row in ends]
        table.add_row(figure, _shown(mean[figure]), _shown(_by_chance(mean, figure)), *cells)
    return table


def _figures_of_many(summaries: Mapping[str, Summary]) -> Table:
    means = {name: summary.mean() for name, summary in summaries.items()}
    table = Table(title="mean over layers / by chance", caption=CAPTION)
    table.add_column("file", overflow="fold")
    figures = list(dict.fromkeys(figure for mean in means.values() for figure in _measured(mean)))
    for figure in figures:
        table.add_column(figure.replace("_coverage", "\ncoverage").replace("_", " "), justify="right")
    for name, mean in means.items():
        cells = [f"{_shown(mean.get(f))} / {_shown(_by_chance(mean, f))}" for f in figures]
        table.add_row(escape(name), *cells)
    return table


def _by_chance(mean: Mapping[str, float | None], figure: str) -> float | None:
    """Value that a figure would have by chance; `None` where there is none.

    It is the one with independent choices where there is one, as for the coverage of pairs chosen together, else the
    baseline of the study.
    """
    return mean.get(figure + INDEPENDENT, mean.get(figure + BASELINE))


def _measured(mean: Mapping[str, float | None]) -> list[str]:
    """The figures that have a baseline."""
    return [name for name in mean if name + BASELINE in mean]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    files: list[Path],
    seed: int,
    model: str | None,
    placement: Path | None,
    nodes: int | None,
    window: int,
) -> None:
    """Tell loads, pairs of experts over tokens and layers, reuse, and what they would be by chance."""
    with StageTimer() as clock:
        with clock.stage("load"):
            sources = read_files(files, model)
            plan = _plan(placement, nodes)
            plans = {name: node_plan(name, source, plan, nodes) for name, source in sources.items()}
            topics = find_topics(sources)
        with progress_bars(interrupts.check) as report, clock.stage("count"):
            findings = {name: find(name, source, plans[name], window, seed, report) for name, source in sources.items()}
        with clock.stage("draw"):
            draw_statistics(folder, findings, topics)
        write_table(folder.target("layers.csv"), layer_rows(findings))
        paths = [str(path) for path in files]
        about = {"command": "trace stats", "seed": seed, **surroundings(), "paths": paths}
        summary = about | statistics_report(findings, topics)
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        print_statistics(findings)


def _plan(path: Path | None, nodes: int | None) -> Placement | None:
    if path is None:
        return None
    if nodes is not None:
        raise OptionError("--placement and --nodes exclude each other; the plan has its own nodes")
    return read_plan(path)
