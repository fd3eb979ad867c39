"""Figures of the study `placement_tuning`, drawn from its tables alone.

python figures/fig_placement_tuning.py
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from jaxmoe.plotting import (
    MeshPanel,
    plot_breakdown,
    plot_layer_latency,
    plot_mesh_loads,
    plot_model_vs_simulation,
    plot_speedups,
)

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "studies" / "placement_tuning"
TITLES = {
    "mixtral_4x8": ("Mixtral-8x7B, 4x8 mesh, 5 TFLOP/s, 50 GB/s", (4, 8), "reasoning"),
    "mixtral_4x4": ("Mixtral-8x7B, 4x4 mesh, 5 TFLOP/s, 50 GB/s", (4, 4), "reasoning"),
    "deepseek_4x8": ("DeepSeek-V2-Lite, 4x8 mesh, 5 TFLOP/s, 50 GB/s", (4, 8), "summary"),
}
OVER = ("published", "tp", "tp_both_ways", "ep_balanced", "hybrid", "hybrid_ring")
# Plain EP and gathered hybrids would hide the others.
SHOWN = ("tp", "tp_both_ways", "hybrid_ring", "published", "tuned_gathered", "tuned")


def table(name: str) -> list[dict[str, str]]:
    """A table of the study."""
    with (STUDY / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def by_strategy(case: str, trace: str, column: str) -> dict[str, np.ndarray]:
    """A column of the layer table, [layer], for every strategy."""
    values = defaultdict(list)
    for row in table("layers"):
        if (row["case"], row["trace"]) == (case, trace):
            values[row["strategy"]].append(float(row[column]))
    return {strategy: np.array(seconds) for strategy, seconds in values.items()}


def draw_case(case: str) -> None:
    """Speed-ups, latencies, breakdown and link loads of one case."""
    title, shape, trace = TITLES[case]
    totals = by_strategy(case, trace, "total_s")
    rows = [r for r in table("layers") if (r["case"], r["trace"], r["strategy"]) == (case, trace, "tuned")]
    layers = np.array([int(row["layer"]) for row in rows])
    ratios = {name: totals[name] / totals["tuned"] for name in OVER}
    plot_speedups(HERE / f"{case}_speedups.png", layers, ratios, f"Speed-up of the tuned placement: {title}")
    shown = {name: totals[name] for name in SHOWN if name in totals}
    plot_layer_latency(HERE / f"{case}_layers.png", layers, shown, f"Time per MoE layer: {title}")
    stages = {name: by_strategy(case, trace, f"{name}_s") for name in ("dispatch", "compute", "combine")}
    parts = {name: tuple(stages[stage][name] for stage in stages) for name in shown}
    plot_breakdown(HERE / f"{case}_breakdown.png", parts, f"Where the time goes: {title}")
    draw_loads(case, shape, title)


def draw_loads(case: str, shape: tuple[int, int], title: str) -> None:
    """Node and link loads of the published and the tuned plan, side by side."""
    busy = defaultdict(list)
    rows = [row for row in table("loads") if row["case"] == case]
    for row in rows:
        busy[row["strategy"], row["kind"]].append(float(row["seconds"]))
    panels = [
        MeshPanel(name, np.array(busy[name, "node"]), np.array(busy[name, "link"]))
        for name in dict.fromkeys(row["strategy"] for row in rows)
    ]
    plot_mesh_loads(HERE / f"{case}_loads.png", shape, panels, f"Layer {rows[0]['layer']}: {title}")


def draw_agreement() -> None:
    """Communication time predicted against simulated, all strategies, layers and batch sizes."""
    rows = table("agreement")
    model, simulated = (np.array([float(row[key]) for row in rows]) for key in ("model_s", "simulated_s"))
    r2 = 1 - ((model - simulated) ** 2).sum() / ((simulated - simulated.mean()) ** 2).sum()
    error = 100 * np.abs(model / simulated - 1).mean()
    plot_model_vs_simulation(
        HERE / "model_vs_simulation.png",
        simulated,
        model,
        [row["strategy"] for row in rows],
        "Dispatch and combine of one layer: model against event simulation",
        f"{len(rows)} points\nR2 = {r2:.6f}\nmean absolute error {error:.2f} %",
    )


def main() -> None:
    """Draw everything beside this file."""
    for case in TITLES:
        draw_case(case)
    draw_agreement()


if __name__ == "__main__":
    main()
