"""What imbalance costs under real gating and under power laws, drawn from the table of the study `measured` alone.

python figures/fig_price_of_imbalance.py
"""

from pathlib import Path

import numpy as np
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

HERE = Path(__file__).resolve().parent
MARKS = {
    "price": ("real gating, the mean of layers, each dataset", "#1b9e77", "o"),
    "price_of_worst_layer": ("real gating, the worst layer, each dataset", "#8da0cb", "|"),
    "power_law_1.01": ("power law of 1.01", "#e6ab02", "s"),
    "power_law_1.2": ("power law of 1.2", "#d95f02", "D"),
}


def draw(rows: Rows, path: Path) -> None:
    """Seconds of the fullest rank over those of a balanced one, by model, a panel for each number of tokens."""
    models, sizes = distinct(rows, "model"), distinct(rows, "tokens")
    title = "Price of imbalance: the fullest of eight ranks over a balanced one"
    figure = style.new_figure(5.2 * len(sizes) + 1.0, 3.9, title)
    for axes, tokens in zip(np.ravel(figure.subplots(1, len(sizes), sharey=True)), sizes, strict=True):
        some = select(rows, tokens=tokens)
        at = [models.index(row["model"]) for row in some]
        for key, (label, colour, marker) in MARKS.items():
            axes.scatter(column(some, key), at, label=label, color=colour, marker=marker, s=40, zorder=3)
        axes.axvline(1, color="#b0b0b0", linewidth=1)
        axes.set(xscale="log", xlim=(0.85, 4.5))
        axes.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
        axes.minorticks_off()
        axes.set_yticks(range(len(models)), models, fontsize=8)
        axes.grid(axis="both", color="#eeeeee", zorder=0)
        axes.set_xlabel("time of a layer's experts [times a balanced rank's]")
        axes.set_title(f"{int(float(tokens)):,} tokens", fontsize=style.PANEL_SIZE)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    style.save(figure, path)


def main() -> None:
    """Draw it."""
    out = images_folder(__doc__)
    draw(read_table(STUDIES / "measured" / "price_of_traces.csv"), out / "price_of_imbalance.png")


if __name__ == "__main__":
    main()
