"""Pictures of the replica study: layer times of EPLB's and tuned slots, and what policies move and gain over time."""

from pathlib import Path

import numpy as np
from panels import GroupPanel, plot_bar_panels
from tables import STUDIES, images_folder, read_table

from jaxmoe.report import style

TABLES = STUDIES / "replicas"
CHOICES = ("even", "nearest", "fixed")
MACHINES = {
    "dgx_b200_8x8": "8 nodes of 8 GPUs",
    "moentwine_8x8": "wafer of 8x8",
    "moentwine_4x8x8": "4 wafers of 8x8",
}


def mean(rows: list[dict], key: str, **values: str) -> float:
    """Mean of a column over the rows that have these values."""
    found = [float(row[key]) for row in rows if all(row[name] == value for name, value in values.items())]
    return float(np.mean(found)) if found else np.nan


def draw_topology(path: Path) -> None:
    """Time of a layer by the way copies are picked, on tokens of the later half."""
    panels = []
    for machine, label in MACHINES.items():
        tables = sorted(TABLES.glob(f"topology_{machine}_*_0.csv"))
        rows = [row for table in tables for row in read_table(table)]
        for model in dict.fromkeys(row["model"] for row in rows):
            own = [row for row in rows if row["model"] == model]
            series = {
                f"{name}{how}": np.array([mean(own, key, plan=plan, choice=choice) for choice in CHOICES])
                for plan, name in (("eplb", "EPLB"), ("tuned", "tuned"))
                for key, how in (("later_us", ""), ("simulated_us", ", simulated"))
            }
            panels.append(GroupPanel(f"{label}: {model}", CHOICES, series, "time of a layer [µs]", "copies are picked"))
    plot_bar_panels(path, panels, "Tokens of the later half, slots made for the first", columns=2)


def draw_time(path: Path) -> None:
    """What every policy moves, and the time of a layer that it leads to."""
    tables = sorted(TABLES.glob("time_*_0.csv"))
    figure = style.new_figure(5.5 * len(tables), 4.6, "An hour of two services in windows of 2 minutes: DGX 8x8")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, table in zip(panels, tables, strict=True):
        rows = read_table(table)
        kinds = {"never": 0, "eplb": 1, "eplb_matched": 2, "tuned": 3, "oracle": 4}
        for row in rows:
            name = row["policy"].split()[0].rstrip(",")
            marker = "osD^v"[kinds[name]]
            colour = style.PALETTE[kinds[name]]
            axes.scatter(float(row["moved_GB_a_window"]), float(row["layer_us"]), c=colour, marker=marker, label=name)
        style.dress(axes, "weights moved in a window [GB]", "mean time of a layer [µs]")
        axes.set_title(f"copies picked {table.stem.split('_')[1]}", fontsize=style.LABEL_SIZE)
    style.legend_below(figure, [*panels])
    style.save(figure, path)


def main() -> None:
    out = images_folder(__doc__)
    draw_topology(out / "replicas_topology.png")
    draw_time(out / "replicas_time.png")


if __name__ == "__main__":
    main()
