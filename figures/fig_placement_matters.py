"""What tuned placement wins on measured GPUs, drawn from the table of the study `measured` alone.

python figures/fig_placement_matters.py
"""

from pathlib import Path

import numpy as np
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

HERE = Path(__file__).resolve().parent
RIVALS = {"ep": ("over experts in their order", "#8da0cb"), "eplb": ("over EPLB", "#d95f02")}
MACHINES = {"h200_sxm_8x4": "4 nodes of 8 H200", "gb200_nvl72": "64 GPUs of a GB200 NVL72"}


def draw(rows: Rows, path: Path) -> None:
    """Time that tuned slots save in each case, with intervals, and as the simulator has it; a panel a machine."""
    machines = distinct(rows, "machine")
    title = "What tuned copies save of the time of a layer"
    figure = style.new_figure(5.4 * len(machines), 4.4, title)
    for axes, machine in zip(np.ravel(figure.subplots(1, len(machines), sharex=True)), machines, strict=True):
        some = select(rows, machine=machine)
        names = [f"{row['model']}, {row['judged_on'].removeprefix('load_')}, {int(row['tokens']):,}" for row in some]
        at = np.arange(len(some))
        for (rival, (label, colour)), shift in zip(RIVALS.items(), (-0.15, 0.15), strict=True):
            gain = column(some, f"less_than_{rival}_%")
            ends = np.abs(np.stack([column(some, f"{end}_{rival}") - gain for end in ("from", "to")]))
            axes.errorbar(gain, at + shift, xerr=ends, fmt="o", ms=5, color=colour, label=label, zorder=3)
            seen = column(some, f"simulated_less_than_{rival}_%")
            axes.scatter(seen, at + shift, marker="|", s=90, color="#333333", label="the simulator" * (rival == "ep"))
        axes.axvline(0, color="#b0b0b0", linewidth=1)
        axes.set_yticks(at, names, fontsize=7)
        axes.grid(axis="x", color="#eeeeee", zorder=0)
        axes.set_xlabel("time saved [%]")
        axes.set_title(MACHINES.get(machine, machine), fontsize=style.PANEL_SIZE)
        axes.invert_yaxis()
    handles, labels = axes.get_legend_handles_labels()
    kept = [pair for pair in zip(handles, labels, strict=True) if pair[1]]
    figure.legend(*zip(*kept, strict=True), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    style.save(figure, path)


def main() -> None:
    """Draw it."""
    out = images_folder(__doc__)
    draw(read_table(STUDIES / "measured" / "placement.csv"), out / "placement_matters.png")


if __name__ == "__main__":
    main()
