"""Figures of the study `joint`, drawn from its table alone.

python figures/fig_joint.py
"""

from pathlib import Path

import numpy as np
from panels import GroupPanel, plot_bar_panels
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

TITLES = {
    "mesh": "4x4 mesh that adds up in routers",
    "mesh_dear_links": "4x4 mesh with dear links",
    "cluster": "four nodes of four devices",
}
PARTS = {
    (False, False): "no gate, no copies",
    (True, False): "gate",
    (False, True): "copies",
    (True, True): "gate, copies",
}
WAYS = {"usual": "best usual strategy", "turn": "in turn", "once": "at once"}


def way(design: str) -> str:
    """How a design was tuned."""
    if design.startswith("in_turn"):
        return "turn"
    return "once" if design.startswith(("tuned", "shipped")) else "usual"


def unseen(rows: Rows, names: set[str]) -> float:
    """Time on held-out text of the design that is best on the batches of tuning."""
    some = [row for row in rows if way(row["design"]) in names]
    return float(some[int(column(some, "tuning_s").argmin())]["unseen_s"])


def draw(rows: Rows, path: Path) -> None:
    """One panel for each case: time over that of the best usual strategy, mean over seeds."""
    panels = []
    for case in distinct(rows, "case"):
        values: dict[str, list[float]] = {label: [] for label in WAYS.values()}
        groups = list(dict.fromkeys((row["gate_loss"], row["copies"]) for row in select(rows, case=case)))
        for loss, copies in groups:
            alike = select(rows, case=case, gate_loss=loss, copies=copies)
            runs = [select(alike, seed=seed) for seed in distinct(alike, "seed")]
            for name, label in WAYS.items():
                # In turn begins with the best usual strategy, and keeps it where nothing is faster.
                names = {"usual", "turn"} if name == "turn" else {name}
                values[label].append(float(np.mean([unseen(run, names) / unseen(run, {"usual"}) for run in runs])))
        titles = [PARTS[bool(float(loss)), copies == "1"] for loss, copies in groups]
        series = {label: np.array(each) for label, each in values.items()}
        panels.append(GroupPanel(TITLES[case], titles, series, "time on unseen text, relative"))
    plot_bar_panels(path, panels, "Joint tuning: in turn and at once")


def main() -> None:
    """Draw it."""
    draw(read_table(STUDIES / "joint" / "joint.csv"), images_folder(__doc__) / "joint.png")


if __name__ == "__main__":
    main()
