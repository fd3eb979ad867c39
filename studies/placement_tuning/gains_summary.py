"""What `gains.csv`, `uneven.csv` and `variations.csv` say, as Markdown."""

import numpy as np
from markdown_tables import Row, column, group, markdown

SHOWN = {
    "shipped": "best shipped plan",
    "shipped_even": "best that deals evenly",
    "without_descent": "without descent",
    "without_moves": "without moves",
    "without_exchange": "without least_congested",
    "shipped_without_exchange": "best shipped plan without it",
    "published": "published plan",
    "published_rebalanced": "published, divided anew",
    "eplb": "EPLB's copies",
    "eplb_by_draw": "EPLB's copies by draw",
    "balanced_slots": "balanced_slots",
}
LARGE = 1.05


def gains(rows: list[Row]) -> str:
    """Every cell: the tuned time, its bound, and the times of others over it, geometric means of layers."""
    there = [name for name in SHOWN if any(row["strategy"] == name for row in rows)]
    lines = []
    for (cell, copies), of in group(rows, "cell", "copies").items():
        by = {name: some for (name,), some in group(of, "strategy").items()}
        tuned = column(by["tuned"], "total_us")
        over = [_mean(by[name]) if name in by else "-" for name in there]
        bound = f"{_geometric(tuned / column(by['tuned'], 'bound_us')):.2f}"
        held = by["tuned"][0]["experts_per_node"]
        lines.append([cell, copies, held, len(tuned), f"{tuned.mean():.2f}", *over, bound])
    head = ["cell", "copies", "experts a node", "layers", "tuned, µs", *(SHOWN[name] for name in there)]
    return markdown([*head, "tuned / bound"], lines)


def over_layers(rows: list[Row]) -> str:
    """Over all layers with so many copies: geometric mean, least and largest ratio, and how many layers gain."""
    lines = []
    for (copies, name), of in group(rows, "copies", "strategy").items():
        if name == "tuned":
            continue
        ratio, interval = column(of, "over_tuned"), column(of, "interval")
        counts = [int((ratio > LARGE).sum()), int((ratio - 1 > interval).sum()), int((ratio - 1 < -interval).sum())]
        least, most = ratio.min(), ratio.max()
        lines.append([copies, SHOWN[name], len(ratio), _mean(of), f"{least:.3f}", f"{most:.3f}", *counts])
    head = ["copies", "in place of the tuned plan", "layers", "geometric mean", "least", "largest", "above 1.05"]
    return markdown([*head, "tuned is faster by more than the interval", "slower by more"], lines)


def variations(rows: list[Row]) -> str:
    """The best shipped plan over the tuned one in every variation, with its interval."""
    shipped = [row for row in rows if row["strategy"] == "shipped"]
    cells = list(group(shipped, "cell", "copies"))
    lines = []
    for (variation,), of in group(shipped, "variation").items():
        found = {
            (row["cell"], row["copies"]): f"{float(row['over_tuned']):.3f} +- {float(row['interval']):.3f}"
            for row in of
        }
        lines.append([variation, *(found.get(cell, "-") for cell in cells)])
    return markdown(["variation", *(f"{cell}, copies: {copies}" for cell, copies in cells)], lines)


def _mean(rows: list[Row]) -> str:
    """The geometric mean of the ratios to the tuned plan, and its interval from those of layers."""
    ratio, interval = column(rows, "over_tuned"), column(rows, "interval")
    mean = _geometric(ratio)
    return f"{mean:.3f} +- {mean * np.sqrt(((interval / ratio) ** 2).sum()) / len(ratio):.3f}"


def _geometric(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()))
