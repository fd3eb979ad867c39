"""Optimisers of placements in the study `hd_moe`: quality, wall time and gaps, drawn from its tables alone.

python figures/fig_hd_moe_optimisers.py
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fig_hd_moe import MACHINES, MICRO, MODELS, OPTIMISERS, machine_title, on, table
from panels import GroupPanel, plot_bar_panels, plot_dot_panels
from tables import Rows, column, distinct, images_folder, select

SHORT = {"mixtral-8x7b": "Mixtral", "deepseek-v2-lite": "DeepSeek", "qwen2-57b-a14b": "Qwen2's\nshape"}


def tuned() -> Rows:
    """What HD-MoE's stages and the gradient tuner found, seed by seed."""
    return [*table("two_stages"), *table("gradient")]


def draw_tuners(out: Path) -> None:
    """HD-MoE's optimiser against the gradient's, case by case and seed by seed: quality and wall time."""
    rows = tuned()
    groups, ratio = [], []
    walls: dict[str, list[np.ndarray]] = {name: [] for name in OPTIMISERS.values()}
    for model in MODELS:
        for machine in MACHINES:
            of = {name: select(rows, model=model, optimiser=name, **on(machine)) for name in OPTIMISERS}
            if of["gradient"]:
                groups.append("{}\n{}\n{} TFLOP/s\n{} GB/s".format(SHORT[model], *machine))
                ratio.append(column(of["milp-bayes"], "gathered_s") / column(of["gradient"], "gathered_s"))
                for name, shown in OPTIMISERS.items():
                    walls[shown].append(column(of[name], "wall_s"))
    ours = {"HD-MoE / gradient": np.array(ratio)}
    panels = [
        GroupPanel("time of a layer", groups, ours, "HD-MoE's over gradient's", reference=(1.0, "equal")),
        GroupPanel(
            "wall time (the first seed compiles)",
            groups,
            {name: np.array(s) for name, s in walls.items()},
            "wall time [s]",
            scale="log",
        ),
    ]
    title = "HD-MoE's node and link balance against gradient descent, every seed (above 1: gradient's plan is faster)"
    plot_dot_panels(out / "hd_moe_tuners.png", panels, title, columns=1)


def draw_gaps(out: Path) -> None:
    """How far above the optimum every optimiser is: all layers and seeds on small meshes."""
    panels = []
    for mesh in distinct(table("optimum"), "mesh"):
        rows = select(table("optimum"), mesh=mesh)
        names = distinct(rows, "optimiser")
        gaps = np.array([100 * column(select(rows, optimiser=name), "gap") for name in names])
        summed = select(table("gaps"), mesh=mesh)[0]
        title = f"{mesh} mesh, {summed['proven']} of {summed['layers']} optima proven"
        panels.append(
            GroupPanel(
                title,
                [
                    f"{OPTIMISERS.get(name, name)}\nmedian {np.median(gap):.2g} %"
                    for name, gap in zip(names, gaps, strict=True)
                ],
                {"a layer and seed": gaps},
                "above the optimum [%]",
                scale="symlog",
            )
        )
    plot_dot_panels(out / "hd_moe_gaps.png", panels, "Mixtral-8x7B: gap to the optimum on small meshes", columns=2)


def draw_others(out: Path) -> None:
    """The other optimisers and the other ways to map, beside the two compared: time of a layer and wall time."""
    keys = ("model", "mesh", "TFLOPs_per_s", "GB_per_s")
    cases = {tuple(row[key] for key in keys): {key: row[key] for key in keys} for row in table("others")}
    times, walls = [], []
    for (model, mesh, tflops, gbps), where in cases.items():
        compared = [row for name in OPTIMISERS for row in select(tuned(), optimiser=name, seed="0", **where)]
        rows = [*compared, *select(table("others"), **where)]
        groups = [
            OPTIMISERS.get(row["optimiser"], row["optimiser"]).replace(": ", ":\n").replace(", ", ",\n") for row in rows
        ]
        title = f"{MODELS[model]}, {machine_title((mesh, tflops, gbps))}"
        times.append(bars_of(rows, "gathered_s", MICRO, title, groups, "time of a layer [µs]"))
        walls.append(bars_of(rows, "wall_s", 1.0, "", groups, "wall time [s]"))
    title = "Optimisers with one seed, and other ways to map HD-MoE's balanced nodes"
    plot_bar_panels(out / "hd_moe_others.png", [*times, *walls], title, columns=len(cases))


def draw_equal_time(out: Path) -> None:
    """What every optimiser has found after the same wall time, case by case."""
    rows, panels = table("equal_time"), []
    for model in distinct(rows, "model"):
        chosen = select(rows, model=model)
        budgets = distinct(chosen, "budget_s")
        best = column(chosen, "gathered_s").min()
        series = {
            OPTIMISERS.get(name, name): column(select(chosen, optimiser=name), "gathered_s") / best
            for name in distinct(chosen, "optimiser")
        }
        groups = [f"{budget} s" for budget in budgets]
        panel = f"{MODELS[model]}: best {MICRO * best:.1f} µs"
        panels.append(GroupPanel(panel, groups, series, "time of a layer over the best", "wall time of the search"))
    title = "Optimisers given equal wall time"
    plot_bar_panels(out / "hd_moe_equal_time.png", panels, title, columns=2)


def bars_of(rows: Rows, key: str, unit: float, title: str, groups: Sequence[str], ylabel: str) -> GroupPanel:
    """One bar for each row, with its number."""
    values = unit * column(rows, key)
    return GroupPanel(title, groups, {"seed 0": values}, ylabel, notes={"seed 0": [f"{value:.3g}" for value in values]})


def main() -> None:
    """Draw everything."""
    out = images_folder(__doc__)
    draw_tuners(out)
    draw_gaps(out)
    draw_others(out)
    draw_equal_time(out)


if __name__ == "__main__":
    main()
