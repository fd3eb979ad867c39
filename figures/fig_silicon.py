"""Figures of the study `silicon`, drawn from its tables alone.

python figures/fig_silicon.py
"""

from pathlib import Path

import numpy as np
from tables import STUDIES, Rows, column, images_folder, read_table

from jaxmoe.report import style

HERE = Path(__file__).resolve().parent
MARKS = {
    "kernels_alone_": ("kernels alone", "#8da0cb", "s"),
    "": ("with constants, the pair left out", "#1b9e77", "D"),
    "aiconfigurator_": ("AIConfigurator 0.12, rows that it covers", "#d95f02", "o"),
}
PANELS = {
    "per_token": ("time per output token", 16),
    "first_token": ("time to first token", 30),
}


def draw(rows: Rows, path: Path) -> None:
    """Median error of every pair of model and system, a panel for each time; the line is asked over all rows."""
    figure = style.new_figure(13.0, 6.4, "Measured systems: median error of each model on each GPU, %")
    names = [
        f"{row['model'].split('/')[1]}, {row['system'].split('_')[0].upper()}, {row['backend']} ({row['rows']})"
        for row in rows
    ]
    places = np.arange(len(names))
    for axes, (key, (title, asked)) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        for prefix, (label, colour, marker) in MARKS.items():
            errors = 100 * column(rows, f"{prefix}{key}_error")
            axes.scatter(errors, places, label=label, color=colour, marker=marker, s=40, zorder=3)
        axes.axvline(asked, color="#444444", linewidth=1.2, linestyle=":", label="asked, all rows")
        axes.set(xscale="log", xlim=(3, 600))
        axes.set_xticks([5, 10, 20, 50, 100, 200, 500], ["5", "10", "20", "50", "100", "200", "500"])
        axes.set_yticks(places, names, fontsize=8.5)
        axes.set_xlabel("median of absolute errors, %")
        axes.grid(axis="both", color="#eeeeee", zorder=0)
        axes.set_title(title, fontsize=style.PANEL_SIZE)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    style.save(figure, path)


def main() -> None:
    """Draw it."""
    out = images_folder(__doc__)
    draw(read_table(STUDIES / "silicon" / "pairs.csv"), out / "silicon_errors.png")


if __name__ == "__main__":
    main()
