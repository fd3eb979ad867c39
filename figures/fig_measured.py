"""Figures of the study `measured`, drawn from its table alone.

python figures/fig_measured.py
"""

from pathlib import Path

import numpy as np
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

HERE = Path(__file__).resolve().parent
MARKS = {
    "roofline": ("data sheet's roofline", "#b0b0b0", "s"),
    "floor": ("between neighbours of a series", "#8da0cb", "|"),
    "base": ("numbers with a meaning alone", "#e6ab02", "o"),
    "error": ("with the residual", "#1b9e77", "D"),
}


def draw(rows: Rows, path: Path) -> None:
    """Mean error of held-out rows by kind and backend, a panel for each GPU with more than one."""
    rows = [row for row in rows if len(select(rows, system=row["system"])) > 1]
    systems = distinct(rows, "system")
    figure = style.new_figure(5.0 * len(systems) + 1.5, 6.6, "Measured kernels: mean error on shapes not fitted, %")
    names = list(dict.fromkeys(f"{row['kind']} {row['backend']}".strip().replace("_", " ") for row in rows))
    for axes, system in zip(np.ravel(figure.subplots(1, len(systems), sharey=True)), systems, strict=True):
        some = select(rows, system=system)
        at = [names.index(f"{row['kind']} {row['backend']}".strip().replace("_", " ")) for row in some]
        for key, (label, colour, marker) in MARKS.items():
            axes.scatter(column(some, key), at, label=label, color=colour, marker=marker, s=36, zorder=3)
        axes.set(xscale="log", xlim=(0.8, 130))
        axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.grid(axis="both", color="#eeeeee", zorder=0)
        axes.set_title(system.replace("_", " ").upper(), fontsize=style.PANEL_SIZE)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    style.save(figure, path)


def main() -> None:
    """Draw it."""
    out = images_folder(__doc__)
    draw(read_table(STUDIES / "measured" / "by_kind.csv"), out / "measured_errors.png")


if __name__ == "__main__":
    main()
