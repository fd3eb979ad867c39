"""Figures of the study `dse`, drawn from its tables alone: who wins where, what speed costs, and the cross table.

python figures/fig_dse.py
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator
from tables import STUDIES, Rows, column, distinct, read_table, select

from jaxmoe.report import style

HERE = Path(__file__).resolve().parent
LABELS = {
    "hardware.link.bandwidth_GB_per_s": "link bandwidth [GB/s]",
    "hardware.link.latency_ns": "hop latency [ns]",
    "hardware.die.compute_TFLOPs_per_s": "compute of a die [TFLOP/s]",
    "hardware.die.memory_bandwidth_GB_per_s": "memory bandwidth [GB/s]",
}
NAMES = {
    "tp": "TP, ring one way",
    "tp_both_ways": "TP, ring both ways",
    "ep_random": "EP at random",
    "ep_balanced": "EP balanced",
    "hybrid": "hybrid, trees",
    "hybrid_complete": "complete hybrid, rings",
}
FAINTEST = 0.25  # of a colour, where the winner of a cell wins least often
MODELS = {"mixtral-8x7b": "Mixtral-8x7B", "deepseek-v3": "DeepSeek-V3", "qwen3-235b-a22b": "Qwen3-235B"}


def draw_map(rows: Rows, path: Path) -> None:
    """Who wins most often, over two numbers of the machine at a time, for every size of batch."""
    sizes, pairs = distinct(rows, "tokens"), list(dict.fromkeys((row["across"], row["up"]) for row in rows))
    colours = style.strategy_colours(NAMES)
    machines = column(select(rows, tokens=sizes[0], across=pairs[0][0], up=pairs[0][1]), "machines").sum()
    title = f"DeepSeek-V3 on {machines:,.0f} mesh machines: the strategy that is fastest most often"
    figure = style.new_figure(4.1 * len(pairs), 3.5 * len(sizes), title)
    panels = figure.subplots(len(sizes), len(pairs), squeeze=False)
    for tokens, line in zip(sizes, panels, strict=True):
        for (across, up), axes in zip(pairs, line, strict=True):
            _draw_cells(axes, select(rows, tokens=tokens, across=across, up=up), colours)
            style.dress(axes, LABELS[across], LABELS[up], grid="both")
            axes.grid(visible=False)
            axes.set_title(f"{int(tokens):,} tokens", fontsize=style.PANEL_SIZE)
    shown = [name for name in NAMES if any(row["most_often"] == name for row in rows)]
    figure.legend(
        handles=[Patch(color=colours[name], label=NAMES[name]) for name in shown],
        title="full colour: always the fastest there; pale: on a third of the machines",
        loc="outside lower center",
        ncols=len(shown),
        frameon=False,
        fontsize=style.TICK_SIZE,
    )
    style.save(figure, path)


def _draw_cells(axes: Axes, rows: Rows, colours: dict[str, str]) -> None:
    x, y = (np.unique(column(rows, key)) for key in ("x", "y"))
    image = np.ones((len(y), len(x), 3))
    for row in rows:
        if row["most_often"]:
            part = float(row[row["most_often"]])
            strength = FAINTEST + (1 - FAINTEST) * np.clip((part - 1 / 3) / (2 / 3), 0, 1)
            at = np.searchsorted(y, float(row["y"])), np.searchsorted(x, float(row["x"]))
            image[at] = 1 - strength * (1 - np.array(to_rgb(colours[row["most_often"]])))
    _plain_log(axes)
    axes.pcolormesh(_edges(x), _edges(y), image)


def _plain_log(axes: Axes) -> None:
    """Logarithmic axes whose ticks are plain numbers: 1, 2, 5, 10, ..."""
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(lambda value, _: f"{value:g}" if value < 10_000 else f"{value:,.0f}")
        axis.set_minor_locator(NullLocator())


def _edges(centres: np.ndarray) -> np.ndarray:
    """Borders of cells of equal ratios."""
    half = np.sqrt(centres[1] / centres[0])
    return np.append(centres / half, centres[-1] * half)


def draw_front(rows: Rows, path: Path) -> None:
    """What no machine beats in price and time, for every size of batch."""
    figure = style.new_figure(8.6, 5.6, "DeepSeek-V3 on mesh machines: the fastest layer for the price")
    axes = figure.subplots()
    colours, markers = style.strategy_colours(NAMES), style.strategy_markers(distinct(rows, "tokens"))
    for tokens, marker in markers.items():
        of_size = select(rows, tokens=tokens)
        price, time = column(of_size, "price"), column(of_size, "total_us")
        axes.step(price, time, where="post", color=style.GUIDE, linewidth=0.8, zorder=1)
        axes.plot([], [], linestyle="", marker=marker, color=style.INK, label=f"{int(tokens):,} tokens")
        for name in distinct(of_size, "strategy"):
            there = np.array([row["strategy"] == name for row in of_size])
            axes.scatter(price[there], time[there], marker=marker, color=colours[name], s=26, zorder=2, linewidths=0)
    for name in (name for name in NAMES if select(rows, strategy=name)):
        axes.plot([], [], linestyle="", marker="s", color=colours[name], label=NAMES[name])
    _plain_log(axes)
    style.dress(axes, "price of the machine [bare dies]", "time of a layer [µs]", grid="both")
    style.legend_below(figure, [axes], columns=4)
    style.save(figure, path)


def draw_cross(rows: Rows, path: Path) -> None:
    """The cross table of decode at 128 tokens: time over the best of its column, and grey where there is a reason."""
    rows = select(rows, phase="decode_128")  # the one phase with every exchange
    models = distinct(rows, "model")
    machines = [key for key in rows[0] if key not in ("phase", "model", "kind", "name")]
    ways = list(dict.fromkeys((row["kind"], row["name"]) for row in rows))
    title = (
        "Every strategy, exchange and system on every machine, 128 tokens: time of a layer over the best of its column"
    )
    figure = style.new_figure(1.5 + 0.34 * len(machines) * len(models), 2.6 + 0.21 * len(ways), title)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for model, axes in zip(models, panels, strict=True):
        times = np.array([[_number(row[machine]) for machine in machines] for row in select(rows, model=model)])
        best = np.nanmin(np.where(np.isnan(times), np.inf, times), axis=0)
        shown = axes.imshow(np.log10(times / best), cmap="viridis_r", vmin=0, vmax=1, aspect="auto")
        axes.set_facecolor("#d5d5d5")
        axes.set_xticks(range(len(machines)), machines, rotation=90, fontsize=style.TICK_SIZE - 2)
        axes.set_yticks(range(len(ways)), [f"{name} ({kind})" for kind, name in ways], fontsize=style.TICK_SIZE - 2)
        axes.set_title(MODELS.get(model, model), fontsize=style.PANEL_SIZE)
    ticks = [1, 1.5, 2, 3, 5, 10]
    bar = figure.colorbar(shown, ax=list(panels), ticks=np.log10(ticks), fraction=0.03, pad=0.02)
    bar.ax.set_yticklabels([*map(str, ticks[:-1]), "10 or more"], fontsize=style.TICK_SIZE)
    bar.set_label("times as long as the best of the column; grey: no time, for a stated reason")
    style.save(figure, path)


def _number(cell: str) -> float:
    """A time, NaN for a reason."""
    return np.nan if cell.startswith("R") else float(cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=STUDIES / "dse", help="folder of the tables")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for draw, table, picture in (
        (draw_map, "space_regions", "dse_map"),
        (draw_front, "space_fronts", "dse_front"),
        (draw_cross, "cross", "dse_cross"),
    ):
        rows = read_table(options.tables / f"{table}.csv", missing_ok=True)
        if rows:
            draw(rows, options.out / f"{picture}.png")


if __name__ == "__main__":
    main()
