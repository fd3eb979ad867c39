"""Figures of the study `placement_tuning`, drawn from its tables alone.

python figures/fig_placement_tuning.py
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.patches import Patch
from panels import GroupPanel, plot_bar_panels, plot_dot_panels
from tables import STUDIES, Rows, column, distinct, read_table, select

from jaxmoe.report import style

HERE = Path(__file__).resolve().parent
STUDY = STUDIES / "placement_tuning"
MODELS = {
    "mixtral-8x7b": "Mixtral",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "deepseek-v3": "DeepSeek-V3",
    "qwen3-235b-a22b": "Qwen3-235B",
}
STRATEGIES = {
    "published": "published plan",
    "tp_both_ways": "TP, ring both ways",
    "tp": "TP, best exchange",
    "hybrid_complete": "complete hybrid",
    "ep": "EP on the whole machine",
    "tuned": "tuned",
}
LEFT_OUT = {
    "without_moves": "without moves",
    "without_descent": "without descent",
    "without_exchange": "without least_congested",
    "shipped": "best shipped plan",
    "shipped_without_exchange": "best shipped plan without it",
}
HEADLINE = {
    "tuned": "tuned",
    "without_descent": "moves in place of the descent",
    "shipped": "best usual plan",
    "shipped_without_exchange": "best usual plan, older exchanges",
}
UNEVEN = {name: LEFT_OUT[name] for name in ("without_moves", "without_descent", "shipped")}
SHORT = {
    "tp_both_ways": "TP ring",
    "tp_trees": "TP tree",
    "hybrid_complete": "hybrid",
    "ep": "EP",
    "ep_balanced": "EP bal.",
    "published": "publ.",
    "tuned": "tuned",
}
TREES = {"yes": "all exchanges", "no": "no trees in the network"}
FAR_MACHINE = "nmp_8x8_10TFLOPs_25GBps"  # with the most cells that are far from the bound


def mean(rows: Rows, key: str, **values: str) -> float:
    """Mean of a column over the rows that have these values; NaN without any."""
    chosen = column(select(rows, **values), key)
    return float(chosen.mean()) if len(chosen) else float("nan")


def case_title(case: str) -> str:
    """A case over three lines."""
    model, mesh, tflops, gbps, *latency = case.split("_")
    hop = f", {int(latency[0][:-2]) / 1e3:g} µs/hop" if latency else ""
    return f"{MODELS[model]}\n{mesh}{hop}\n{tflops[:-6]} TFLOP/s\n{gbps[:-4]} GB/s"


def draw_main(rows: Rows, out: Path) -> None:
    """Time over that of the tuned plan by case: every strategy under its own best exchange, with trees and without."""
    rows = [row for row in rows if row["trees"] in TREES]
    cases = sorted(distinct(rows, "case"), key=lambda case: (len(case.split("_")), case))
    panels = [
        GroupPanel(
            title,
            [case_title(case) for case in cases],
            {
                shown: np.array([mean(rows, "over_tuned", case=case, trees=trees, strategy=name) for case in cases])
                for name, shown in STRATEGIES.items()
            },
            "time over that of the tuned plan",
        )
        for trees, title in TREES.items()
    ]
    title = "Every plan under its own best exchange, on unseen batches: mean over layers"
    plot_bar_panels(out / "placement_tuning_main.png", panels, title, columns=1)


def draw_sensitivity(rows: Rows, out: Path) -> None:
    """Who wins in each cell: rows are hop latency and ports, columns FLOP-to-bandwidth ratio and batch size."""
    down = [(hop, ports) for hop in sorted(distinct(rows, "latency_ns"), key=int) for ports in distinct(rows, "ports")]
    ratios = sorted({(row["TFLOPs_per_s"], row["GB_per_s"]) for row in rows}, key=lambda pair: float(pair[0]))
    across = [(*ratio, tokens) for ratio in ratios for tokens in sorted(distinct(rows, "batch_tokens"), key=int)]
    ranked = defaultdict(list)
    for row in rows:
        cell = (row["latency_ns"], row["ports"]), (row["TFLOPs_per_s"], row["GB_per_s"], row["batch_tokens"])
        ranked[cell].append((float(row["total_us"]), row["strategy"]))
    names = [name for name in SHORT if any(name == min(found)[1] for found in ranked.values())]
    image = np.full((len(down), len(across)), np.nan)
    figure = style.new_figure(2.6 + 1.05 * len(across), 2.2 + 0.48 * len(down), "Who wins a layer of Mixtral, 4x8 mesh")
    axes = figure.subplots()
    for (latency, columns), found in ranked.items():
        y, x = down.index(latency), across.index(columns)
        (best, name), (second, _), *_ = sorted(found)
        image[y, x] = names.index(name)
        label = f"{SHORT[name]}\n{best:.0f} µs, {100 * (second / best - 1):.0f} %"
        axes.text(x, y, label, ha="center", va="center", fontsize=7.5, color=style.INK)
    colours = list(style.strategy_colours(names).values())
    axes.imshow(image, ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5, aspect="auto", alpha=0.45)
    labels(axes, [f"{tokens} tokens\n{f}/{b}" for f, b, tokens in across], hop_labels(down))
    axes.set_xlabel("batch; TFLOP/s of a die / GB/s of a link", fontsize=style.LABEL_SIZE)
    axes.set_ylabel("latency of a hop; limit of a node's port", fontsize=style.LABEL_SIZE)
    patches = [Patch(color=colour, alpha=0.45, label=SHORT[name]) for name, colour in zip(names, colours, strict=True)]
    note = (
        "cells: the fastest strategy, its time, and how much longer the next one takes; "
        "tuned: without latency and port limits, 128 tokens"
    )
    figure.legend(handles=patches, loc="outside lower center", ncols=len(names), frameon=False, title=note)
    style.save(figure, out / "placement_tuning_sensitivity.png")


def hop_labels(down: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of the map."""
    return [f"{int(latency) / 1e3:g} µs; {ports}" for latency, ports in down]


def labels(axes: Axes, across: Sequence[str], down: Sequence[str]) -> None:
    """Ticks of a map of cells."""
    axes.set_xticks(range(len(across)), across, fontsize=style.TICK_SIZE - 1)
    axes.set_yticks(range(len(down)), down, fontsize=style.TICK_SIZE - 1)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_machines(rows: Rows, out: Path) -> None:
    """The tuned plan over its bound by machine, model and batch size; in cells also the gain over the best shipped."""
    down = distinct(rows, "machine")
    models = [model for model in MODELS if model in distinct(rows, "model")]
    tokens = sorted(distinct(rows, "batch_tokens"), key=int)
    across = [(model, batch) for model in models for batch in tokens]
    image = np.full((len(down), len(across)), np.nan)
    title = "Tuned plan over a bound on all plans, by machine, model and batch size"
    figure = style.new_figure(3.6 + 0.95 * len(across), 2.2 + 0.55 * len(down), title)
    axes = figure.subplots()
    for row in rows:
        y, x = down.index(row["machine"]), across.index((row["model"], row["batch_tokens"]))
        image[y, x] = float(row["tuned_over_bound"])
        gain = 100 * (float(row["shipped_over_tuned"]) - 1)
        label = f"{image[y, x]:.2f}\n{gain:+.1f} %\n{row['limit']}"
        dark = image[y, x] > 1.7
        axes.text(x, y, label, ha="center", va="center", fontsize=7, color="white" if dark else style.INK)
    shown = axes.imshow(image, "cividis_r", norm=LogNorm(1.0, 4.0), aspect="auto")
    labels(axes, [f"{batch}\n{MODELS[model].replace('-', chr(10), 1)}" for model, batch in across], down)
    axes.set_xlabel("tokens of a batch; model", fontsize=style.LABEL_SIZE)
    bar = figure.colorbar(shown, ax=axes, label="time over the bound", ticks=[1, 1.5, 2, 3, 4])
    bar.ax.set_yticklabels(["1", "1.5", "2", "3", "4"])
    note = "cells: time over the bound, gain over the best shipped strategy, what limits the tuned plan"
    figure.supxlabel(note, fontsize=style.TICK_SIZE)
    style.save(figure, out / "placement_tuning_machines.png")


def draw_gaps(rows: Rows, machines: Rows, out: Path) -> None:
    """Compute and communication by the number of groups that experts are dealt to, on one machine."""
    chosen = [row for row in rows if row["machine"] == FAR_MACHINE]
    if not chosen:
        return
    sizes, models = (
        sorted(distinct(chosen, "batch_tokens"), key=int),
        [model for model in MODELS if model in distinct(chosen, "model")],
    )
    title = f"Shipped deals of experts on {FAR_MACHINE}: even work or few visits, not both"
    figure = style.new_figure(1.5 + 3.1 * len(models), 1.6 + 2.6 * len(sizes), title)
    panels = figure.subplots(len(sizes), len(models), squeeze=False)
    for axes, (tokens, model) in zip(panels.flat, itertools.product(sizes, models), strict=True):
        cell = {"machine": FAR_MACHINE, "model": model, "batch_tokens": tokens}
        draw_gap(axes, *([row for row in of if cell.items() <= row.items()] for of in (chosen, machines)))
        axes.set_title(f"{MODELS[model]}, {tokens} tokens", fontsize=style.LABEL_SIZE)
    for axes in panels[-1]:
        axes.set_xlabel("groups that experts are dealt to", fontsize=style.LABEL_SIZE)
    for axes in panels[:, 0]:
        axes.set_ylabel("time of a layer, µs", fontsize=style.LABEL_SIZE)
    handles, names = max((axes.get_legend_handles_labels() for axes in panels.flat), key=lambda each: len(each[0]))
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=style.TICK_SIZE)
    style.save(figure, out / "placement_tuning_gaps.png")


def draw_gap(axes: Axes, rows: Rows, machines: Rows) -> None:
    """One cell; nothing where it is not far from its bound."""
    if not rows:
        axes.text(0.5, 0.5, "within 10 %\nof the bound", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    at = np.arange(len(rows))
    compute, comm, least = (column(rows, key) for key in ("compute_us", "communication_us", "least_total_us"))
    colours = style.stage_colours(("compute", "communication"))
    axes.bar(at, compute, color=colours["compute"], label="compute")
    axes.bar(at, comm, bottom=compute, color=colours["communication"], label="communication, best exchange")
    axes.scatter(
        at, least, marker="_", s=120, color=style.INK, label="least of all such deals under any exchange", zorder=3
    )
    (machine,) = machines
    axes.axhline(float(machine["tuned_us"]), color=style.INK, linewidth=1, label="tuned plan")
    axes.axhline(float(machine["bound_us"]), color=style.INK, linewidth=1, linestyle=":", label="bound on all plans")
    axes.set_xticks(at, [row["groups"] for row in rows], fontsize=style.TICK_SIZE - 1)
    axes.tick_params(labelsize=style.TICK_SIZE - 1)


def draw_gains(rows: Rows, out: Path) -> None:
    """Time with a part of tuning left out over the tuned time, layer by layer, where all parts were left out."""
    copies = select(rows, copies="1")
    cells = {cell: gain_title(cell) for cell in distinct(select(copies, strategy="without_exchange"), "cell")}
    panel = gain_panel("one copy of every expert; dots are layers, lines their medians", copies, cells, LEFT_OUT)
    title = "What each part of tuning gives, on unseen requests"
    plot_dot_panels(out / "placement_tuning_gains.png", [panel], title, columns=1)


def draw_headline(rows: Rows, out: Path) -> None:
    """Time of a layer by plan, each under its best exchange, and the bound, where all parts of tuning were left out."""
    copies = select(rows, copies="1")
    whole = distinct(select(copies, strategy="without_exchange"), "cell")
    cells = [cell for cell in whole if cell.startswith("deepseek-v2-lite_4x8")]
    title = "A layer of DeepSeek-V2-Lite on 4x8 dies, each plan under its best exchange"
    figure = style.new_figure(10.4, 3.9, title)
    panels = figure.subplots(1, len(cells), sharey=True)
    for axes, cell in zip(panels, cells, strict=True):
        draw_plans(axes, select(copies, cell=cell))
        tflops, gbps = cell.split("_")[2:]
        axes.set_title(f"{tflops[:-6]} TFLOP/s a die, {gbps[:-4]} GB/s a link", fontsize=style.PANEL_SIZE)
    panels[0].invert_yaxis()
    style.legend_below(figure, panels)
    style.save(figure, out / "placement_tuning_headline.png")


def draw_plans(axes: Axes, rows: Rows) -> None:
    """Compute and communication of every plan, mean of its layers, with the ratio to the tuned plan's time.

    Ratios are geometric means of layers, as in the study's table, with twice the standard error of their mean.
    """
    colours = style.stage_colours(("compute", "communication"))
    longest = max(mean(rows, "total_us", strategy=name) for name in HEADLINE)
    for place, name in enumerate(HEADLINE):
        left = 0.0
        for stage, colour in colours.items():
            width = mean(rows, f"{stage}_us", strategy=name)
            axes.barh(place, width, left=left, color=colour, height=0.62, label=stage, edgecolor="white")
            left += width
        own = select(rows, strategy=name)
        ratio = float(np.exp(np.log(column(own, "over_tuned")).mean()))
        interval = ratio * float(np.sqrt(((column(own, "interval") / column(own, "over_tuned")) ** 2).sum())) / len(own)
        tuned = mean(rows, "total_us", strategy="tuned")
        told = f"{left:.1f} µs" + (f", {ratio:.2f} ± {interval:.2f} times" if name != "tuned" else "")
        axes.errorbar(left, place, xerr=interval * tuned, color=style.INK, capsize=3, linewidth=1.2)
        axes.annotate(told, (left, place), (9, 0), textcoords="offset points", va="center", fontsize=style.TICK_SIZE)
    bound = mean(rows, "bound_us", strategy="tuned")
    axes.axvline(bound, color=style.INK, linestyle=":", linewidth=1.3, label="no plan is faster: lower bound")
    style.dress(axes, f"time of a layer, mean of {len(own)} layers [µs]", "", grid="x")
    axes.set_yticks(range(len(HEADLINE)), [*HEADLINE.values()])
    axes.set_xlim(0, 1.62 * longest)


def draw_uneven(rows: Rows, out: Path) -> None:
    """The same where dies and links are not alike, a layer of each model."""
    cells = {cell: cell.partition(", ") for cell in distinct(rows, "cell")}
    panels = []
    for model in dict.fromkeys(model for model, _, _ in cells.values()):
        own = {cell: fill(machine, 16) for cell, (of, _, machine) in cells.items() if of == model}
        panels.append(gain_panel(MODELS[model], rows, own, UNEVEN))
    title = "What each part of tuning gives on uneven machines, on unseen requests"
    plot_dot_panels(out / "placement_tuning_uneven.png", panels, title, columns=1)


def gain_panel(title: str, rows: Rows, cells: dict[str, str], strategies: dict[str, str]) -> GroupPanel:
    """Times of strategies over the tuned ones, a dot for every layer of the cells; both with what is shown of them."""
    most = max(len(select(rows, cell=cell, strategy="tuned")) for cell in cells)

    def ratios(strategy: str) -> np.ndarray:
        """By cell and layer; NaN fills up."""
        found = [column(select(rows, cell=cell, strategy=strategy), "over_tuned") for cell in cells]
        return np.stack([np.append(of, np.full(most - len(of), np.nan)) for of in found])

    series = {shown: ratios(name) for name, shown in strategies.items()}
    return GroupPanel(title, [*cells.values()], series, "time over that of the tuned plan", reference=(1.0, "tuned"))


def gain_title(cell: str) -> str:
    """A cell of the main table, or a machine with a model and batch size, over several lines."""
    if not cell.startswith("nmp_"):
        return case_title(cell)
    machine, model, _ = cell.removeprefix("nmp_").rsplit("_", 2)
    mesh, power, link = machine.split("_")
    return f"{MODELS[model]}\n{mesh}, 6hi FLOPs\n{power[:-6]} TFLOP/s\n{link[:-4]} GB/s"


def main() -> None:
    """Draw what there are tables for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=STUDY, help="folder of the tables")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the images")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, draw in (
        ("main", draw_main),
        ("sensitivity", draw_sensitivity),
        ("machines", draw_machines),
        ("gains", draw_gains),
        ("gains", draw_headline),
        ("uneven", draw_uneven),
    ):
        if rows := read_table(given.tables / f"{name}.csv", missing_ok=True):
            draw(rows, given.out)
    if rows := read_table(given.tables / "gaps.csv", missing_ok=True):
        draw_gaps(rows, read_table(given.tables / "machines.csv"), given.out)


if __name__ == "__main__":
    main()
