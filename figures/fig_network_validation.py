"""Figures of the study `network_validation`, drawn from its tables alone.

python figures/fig_network_validation.py
"""

from pathlib import Path

import numpy as np
from tables import STUDIES, Rows, column, images_folder, read_table

from jaxmoe.report import plot_model_vs_simulation, style

STUDY = STUDIES / "network_validation"
WAYS = {
    "congestion": "load and longest path alone",
    "model": "model with order and contention",
    "unbounded": "event simulator, unbounded buffers",
    "des": "event simulator, finite buffers",
}
PANELS = {
    "vc4s2_shuffle": "crossbar speed-up 2, shuffled",
    "vc4_shuffle": "base router, shuffled",
    "vc4_by_dest": "base router, by destination",
    "vc2b8_shuffle": "2 channels of 8 flits, shuffled",
}
MOST_PERCENT = 40.0


def table(name: str) -> Rows:
    """A table of the study."""
    return read_table(STUDY / f"{name}.csv")


def draw_scatter(
    out: Path, name: str, rows: Rows, side: str, title: str, reference: str, unit: str, group: str = "class"
) -> None:
    """Every record: the reference's completion, and ours."""
    measured, told = (column(rows, key) for key in ("measured", side))
    error = 100 * np.abs(told / measured - 1)
    r2 = 1 - ((told - measured) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
    plot_model_vs_simulation(
        out / f"{name}.png",
        measured,
        told,
        [row[group].replace("_", " ") for row in rows],
        title,
        f"{len(rows)} records\nR2 = {r2:.4f}\nmean absolute error {error.mean():.2f} %",
        labels=(f"completion by {reference}", f"completion, {WAYS[side]}"),
        unit=unit,
    )


def draw_errors(out: Path) -> None:
    """Mean absolute error by class of traffic, for four set-ups of BookSim's router."""
    rows = [row for row in table("by_class") if row["reference"] == "booksim2"]
    figure = style.new_figure(15.0, 5.0, "Completion time against BookSim2, by class of traffic (mesh, 404 matrices)")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (variant, title) in zip(panels, PANELS.items(), strict=True):
        members = [row for row in rows if row["variant"] == variant and row["class"] != "moe (both)"]
        place = np.arange(len(members))
        for shift, (side, label), colour in zip((-0.3, -0.1, 0.1, 0.3), WAYS.items(), style.PALETTE, strict=False):
            height = [float(row[f"{side}_mean_error_percent"]) for row in members]
            axes.bar(place + shift, height, width=0.2, color=colour, label=label)
        axes.set_xticks(place, [row["class"].replace("_", " ") for row in members], rotation=60, ha="right")
        axes.set_ylim(0, MOST_PERCENT)
        axes.set_title(title, fontsize=style.PANEL_SIZE, color=style.INK)
        style.dress(axes, "", "mean absolute error [%]" if axes is panels[0] else "")
    style.legend_below(figure, list(panels))
    style.save(figure, out / "network_errors.png")


def draw_worst_case(out: Path) -> None:
    """Who has the busiest port, and when, with finite and with unbounded buffers."""
    rows = table("worst_case")
    first = rows[0]
    title = (
        f"The busiest port of {first['record'].replace('_', ' ')}, node {first['node']}, base router: "
        f"{float(first['load_cycles']):.0f} flits, {float(first['booksim2_cycles']):.0f} cycles in BookSim2"
    )
    figure = style.new_figure(11.0, 4.6, title)
    panels = figure.subplots(1, 2, sharey=True)
    links = sorted({row["from_node"] for row in rows}, key=int)
    for axes, buffers in zip(panels, ("finite", "unbounded"), strict=True):
        members = [row for row in rows if row["buffers"] == buffers]
        parts = {link: [row for row in members if row["from_node"] == link] for link in links}
        when = column(parts[links[0]], "cycle")
        rates = [column(part, "flits_per_cycle") for part in parts.values()]
        labels = [f"from node {link}" for link in links]
        axes.stackplot(when, rates, labels=labels, colors=style.PALETTE[: len(links)], linewidth=0)
        axes.axhline(1, color=style.INK, linewidth=0.8, linestyle="--")
        axes.set_title(f"{buffers} buffers", fontsize=style.PANEL_SIZE, color=style.INK)
        style.dress(axes, "cycle", "flits in a cycle" if axes is panels[0] else "")
    style.legend_below(figure, list(panels))
    style.save(figure, out / "network_worst_case.png")


def main() -> None:
    """Draw everything."""
    out = images_folder(__doc__)
    rows = table("records")
    base = [row for row in rows if row["variant"] == "vc4_shuffle"]
    for side, way in WAYS.items():
        draw_scatter(
            out, f"network_booksim2_{side}", base, side, f"BookSim2's base router: {way}", "BookSim2", "cycles"
        )
    astra = [row for row in rows if row["reference"] == "astra"]
    for side, way in (("model", "model in order"), ("des", "event simulator")):
        title = f"The {way} against ASTRA-sim, store-and-forward"
        draw_scatter(out, f"network_astra_{side}", astra, side, title, "ASTRA-sim", "ns", group="variant")
    draw_errors(out)
    draw_worst_case(out)


if __name__ == "__main__":
    main()
