"""Figures of the study `network_validation`, drawn from its tables alone.

python figures/fig_network_validation.py
"""

from pathlib import Path

import numpy as np
from tables import STUDIES, Rows, column, read_table

from jaxmoe.plotting import plot_model_vs_simulation, style

HERE = Path(__file__).resolve().parent
STUDY = STUDIES / "network_validation"
WAYS = {"model": "analytic model", "des": "event simulator"}
PANELS = {
    "vc4s2_shuffle": "router with crossbar speedup 2",
    "vc4s2_wide_ni": "the same, links alone limit",
    "vc4_shuffle": "base router, efficiency 1",
}


def table(name: str) -> Rows:
    """A table of the study."""
    return read_table(STUDY / f"{name}.csv")


def draw_scatter(name: str, rows: Rows, side: str, title: str, reference: str, unit: str, group: str = "class") -> None:
    """Every record: the reference's completion, and ours."""
    measured, told = (column(rows, key) for key in ("measured", side))
    error = 100 * np.abs(told / measured - 1)
    r2 = 1 - ((told - measured) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
    plot_model_vs_simulation(
        HERE / f"{name}.png",
        measured,
        told,
        [row[group].replace("_", " ") for row in rows],
        title,
        f"{len(rows)} records\nR2 = {r2:.4f}\nmean absolute error {error.mean():.2f} %",
        labels=(f"completion by {reference}", f"completion by the {WAYS[side]}"),
        unit=unit,
    )


def draw_errors() -> None:
    """Mean absolute error by class of traffic, for three set-ups of BookSim's router."""
    rows = [row for row in table("by_class") if row["reference"] == "booksim2"]
    figure = style.new_figure(12.5, 4.6, "Completion time against BookSim2, by class of traffic (mesh, 404 matrices)")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (variant, title) in zip(panels, PANELS.items(), strict=True):
        members = [row for row in rows if row["variant"] == variant and row["class"] != "moe (both)"]
        place = np.arange(len(members))
        for shift, (side, label), colour in zip((-0.2, 0.2), WAYS.items(), style.PALETTE, strict=False):
            height = [float(row[f"{side}_mean_error_percent"]) for row in members]
            axes.bar(place + shift, height, width=0.4, color=colour, label=label)
        axes.set_xticks(place, [row["class"].replace("_", " ") for row in members], rotation=60, ha="right")
        axes.set_title(title, fontsize=style.PANEL_SIZE, color=style.INK)
        style.dress(axes, "", "mean absolute error [%]" if axes is panels[0] else "")
    style.legend_below(figure, list(panels))
    style.save(figure, HERE / "network_errors.png")


def main() -> None:
    """Draw everything beside this file."""
    rows = table("records")
    booksim = [row for row in rows if row["variant"] == "vc4s2_shuffle"]
    for side, way in WAYS.items():
        title = f"The {way} against BookSim2, crossbar speedup 2"
        draw_scatter(f"network_booksim2_{side}", booksim, side, title, "BookSim2", "cycles")
    astra = [row for row in rows if row["reference"] == "astra"]
    title = "The event simulator against ASTRA-sim, store-and-forward"
    draw_scatter("network_astra_des", astra, "des", title, "ASTRA-sim", "ns", group="variant")
    draw_errors()


if __name__ == "__main__":
    main()
