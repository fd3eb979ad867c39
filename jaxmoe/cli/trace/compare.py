"""`jaxmoe trace compare`: how alike two traces of a model are, and whether a plan tuned on one serves the other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from jaxmoe.cli.comparison_output import new_table, print_table
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.cli.trace.pictures import draw_comparison
from jaxmoe.cli.trace.stats import source_report
from jaxmoe.experiment.inputs import OptionError, Source, read_file
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.experiment.trace_statistics import (
    count,
    expert_nodes,
    global_figures,
    own_means,
    service,
    similarity_of_loads,
    similarity_of_pairs,
)
from jaxmoe.traces import LoadCounts
from jaxmoe.traces.statistics import by_layer

MOST_COST = 1.1  # largest ratio of busiest-node loads, under A's plan over B's own, at which A's plan serves B


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    first: Path,
    second: Path,
    model: str | None,
    nodes: int | None,
) -> None:
    """Tell how alike two traces are, and whether a plan tuned on A serves B."""
    with StageTimer() as clock:
        with clock.stage("load"):
            one, other = read_file(first, model), read_file(second, model)
            layer_ids = _common_layers(f"{first}", one, f"{second}", other)
            sources = {"A": _in_layers(one, layer_ids), "B": _in_layers(other, layer_ids)}
            nodes = expert_nodes(one.num_experts, nodes)
        with progress_bars(interrupts.check) as report, clock.stage("count"):
            (a, pairs_a), (b, pairs_b) = (count(name, source, report) for name, source in sources.items())
            figures = similarity_of_loads(a, b) | service(a, b, nodes)
            if pairs_a is not None and pairs_b is not None:
                figures |= similarity_of_pairs(pairs_a, pairs_b)
            each = {"A": own_means(a, pairs_a), "B": own_means(b, pairs_b)}
        table = by_layer(np.array(layer_ids), figures)
        verdict = _verdict(table["mean"], nodes)
        with clock.stage("draw"):
            draw_comparison(folder, layer_ids, {"A": a, "B": b}, each, int(figures["kl_a_b"].argmax()))
        about = {
            name: {"path": str(path)} | source_report(sources[name]) | {"mean": each[name]}
            for name, path in (("A", first), ("B", second))
        }
        summary = {"command": "trace compare", **surroundings(), **about, **table, "global": global_figures(a, b)}
        summary |= {"nodes": nodes, "verdict": verdict}
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        _print_means(f"A: {first}, B: {second}", table["mean"])
        typer.echo(verdict["text"])


def _common_layers(name: str, one: Source, other_name: str, other: Source) -> list[int]:
    """Numbers of the layers that both have. Raises `OptionError` where they are of two models."""
    if one.num_experts != other.num_experts:
        raise OptionError(
            f"{name} has {one.num_experts} experts, but {other_name} has {other.num_experts}; "
            "take two traces of one model"
        )
    common = [layer for layer in one.layer_ids.tolist() if layer in other.layer_ids]
    if not common:
        raise OptionError(
            f"{name} has the layers {one.layer_ids.tolist()}, but {other_name} has {other.layer_ids.tolist()}; "
            "take two traces of one model"
        )
    return common


def _in_layers(source: Source, layer_ids: list[int]) -> Source:
    have = source.layer_ids.tolist()
    if have == layer_ids:
        return source
    if isinstance(source, LoadCounts):
        rows = [have.index(layer) for layer in layer_ids]
        return replace(source, counts=source.counts[:, rows], layer_ids=np.array(layer_ids))
    return source.select_layers(layer_ids)


def _verdict(mean: dict[str, float | None], nodes: int) -> dict[str, Any]:
    """Whether a plan tuned on A serves B; neither yes nor no where B has no load."""
    on_a, on_b = mean["node_max_over_mean_balanced_on_a"], mean["node_max_over_mean_balanced_on_b"]
    if on_a is None or on_b is None:
        return {"serves": None, "cost": None, "text": "B has no load to serve."}
    cost = on_a / on_b
    serves = cost <= MOST_COST
    text = (
        f"A plan tuned on A {'serves' if serves else 'does not serve'} B: expert parallelism balanced on A gives the "
        f"busiest of {nodes} nodes {on_a:.2f} times the mean load, {100 * (cost - 1):.0f} % more than the {on_b:.2f} "
        f"of one balanced on B (up to {100 * (MOST_COST - 1):.0f} % more is called serving)."
    )
    return {"serves": serves, "cost": cost, "text": text}


def _print_means(title: str, mean: dict[str, float | None]) -> None:
    caption = (
        "kl: divergence of loads; hot experts: what the busiest of both have in common; node: the busiest node over "
        "the mean on B, with experts balanced on A, on B, or in order; heatmap: rank correlation of pairs of tokens, "
        "and of layers; of_a_in_b: the share of B's pairs on those most frequent in A"
    )
    table = new_table(title, "figure", ("mean over layers",), caption=caption)
    for name, value in mean.items():
        table.add_row(name, "-" if value is None else f"{value:.3f}")
    print_table(table)
