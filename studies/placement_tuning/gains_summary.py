"""What `gains.csv` and `variations.csv` say, as Markdown."""

import numpy as np
from markdown_tables import Row, column, group, markdown

LEFT_OUT = {
    "shipped": "descent and moves: best shipped plan",
    "without_descent": "descent",
    "without_moves": "moves",
    "without_exchange": "exchange",
    "shipped_without_exchange": "all three",
}
LARGE = 1.05


def gains(rows: list[Row]) -> str:
    """Every cell: the tuned time, its bound, and the times with a part left out over it, geometric means of layers."""
    lines = []
    for (cell, copies), of in group(rows, "cell", "copies").items():
        by = {name: some for (name,), some in group(of, "strategy").items()}
        tuned = column(by["tuned"], "total_us")
        over = [_mean(by.get(name, [])) for name in LEFT_OUT]
        bound = f"{_geometric(tuned / column(by['tuned'], 'bound_us')):.2f}"
        held = by["tuned"][0]["experts_per_node"]
        lines.append([cell, copies, held, len(tuned), f"{tuned.mean():.2f}", *over, bound])
    head = [
        "cell",
        "copies",
        "experts a node",
        "layers",
        "tuned, us",
        *(f"without {each}" for each in LEFT_OUT.values()),
    ]
    return markdown([*head, "tuned / bound"], lines)


def ratios_left_out(rows: list[Row]) -> str:
    """Over all layers with so many copies: geometric mean, least and largest ratio, and how many layers gain."""
    lines = []
    for (copies, name), of in group(rows, "copies", "strategy").items():
        if name == "tuned":
            continue
        ratio, interval = column(of, "over_tuned"), column(of, "interval")
        counts = [int((ratio > LARGE).sum()), int((ratio - 1 > interval).sum()), int((ratio - 1 < -interval).sum())]
        mean = _geometric(ratio)
        away = mean * np.sqrt((interval**2).sum()) / len(ratio)
        least, most = ratio.min(), ratio.max()
        lines.append(
            [copies, LEFT_OUT[name], len(ratio), f"{mean:.3f} +- {away:.3f}", f"{least:.3f}", f"{most:.3f}", *counts]
        )
    head = ["copies", "left out", "layers", "geometric mean", "least", "largest", "above 1.05"]
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
    return f"{_geometric(column(rows, 'over_tuned')):.3f}" if rows else "-"


def _geometric(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()))
