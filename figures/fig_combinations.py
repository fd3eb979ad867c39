"""Figures of the study `combinations`, drawn from its table alone.

python figures/fig_combinations.py
"""

from pathlib import Path

from tables import STUDIES, Rows, distinct, images_folder, read_table, select

from jaxmoe.report import style

TREE = "token_home_tree"
WHO = ("hd_moe", "camoe", "moentwine", "wafer_gpu")  # expert_streaming takes many times as long, and is left out
STAGES = {
    "all-reduce": ("all_reduce_us",),
    "dispatch and combine": ("dispatch_us", "combine_us", "metadata_us"),
    "experts": ("compute_us", "fetch_us"),
}
COLOURS = style.stage_colours(STAGES)


def best(rows: Rows) -> dict[str, dict[str, float]]:
    """Times by stage of the fastest ways, over that of the best paper: without trees, then with trees as well."""
    timed = sorted((row for row in rows if row["total_us"]), key=lambda row: float(row["total_us"]))
    plain = [row for row in timed if TREE not in row["way"]]
    found = {paper: row for paper in WHO for row in [row for row in plain if row["papers"] == paper][:1]}
    unit = min(float(row["total_us"]) for row in found.values())
    found["two papers"] = next(row for row in plain if "+" in row["papers"])
    found["one, trees"] = next(row for row in timed if row["papers"] in WHO)
    found["two, trees"] = next(row for row in timed if "+" in row["papers"])
    return {name: parts_of(row, unit) for name, row in found.items()}


def parts_of(row: dict[str, str], unit: float) -> dict[str, float]:
    """Stages of a row; of wafer_gpu computing is inside the time of fetching."""
    left_out = ("compute_us",) if row["papers"] == "wafer_gpu" else ()
    return {
        stage: sum(float(row[key] or 0) for key in keys if key in row and key not in left_out) / unit
        for stage, keys in STAGES.items()
    }


def draw(rows: Rows, path: Path) -> None:
    """Bars of stages, one for each paper and one for the combination, machine by machine."""
    machines = distinct(rows, "machine")
    figure = style.new_figure(
        13.0, 9.2, "A layer's experts by the best system of each paper, and by the best combination of two"
    )
    panels = figure.subplots(3, (len(machines) + 2) // 3, squeeze=False)
    for axes, machine in zip(panels.flat, machines, strict=False):
        found = best(select(rows, machine=machine, seed="0"))
        for place, parts in enumerate(found.values()):
            bottom = 0.0
            for stage, colour in COLOURS.items():
                axes.bar(
                    place, parts[stage], bottom=bottom, color=colour, width=0.7, label=stage if place == 0 else None
                )
                bottom += parts[stage]
            axes.text(place, bottom + 0.02, f"{bottom:.2f}", ha="center", fontsize=8, color=style.INK)
        axes.axhline(1, color=style.GUIDE, linewidth=0.8)
        axes.set_xticks(range(len(found)), [*found], rotation=40, ha="right", fontsize=8)
        style.dress(axes, "", "time over best paper, no trees" if axes in panels[:, 0] else "")
        axes.set_title(machine, fontsize=9)
        axes.set_ylim(0, 1.15 * max(sum(parts.values()) for parts in found.values()))
    for axes in panels.flat[len(machines) :]:
        axes.set_axis_off()
    style.legend_below(figure, [panels.flat[0]], columns=3)
    style.save(figure, path)


def main() -> None:
    draw(read_table(STUDIES / "combinations" / "ways.csv"), images_folder(__doc__) / "combinations.png")


if __name__ == "__main__":
    main()
