"""The tables of README.md from `joint.csv`: `python studies/joint/summary.py`.

Takes a second.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from jaxmoe.experiment.table import script_options
from jaxmoe.files import read_table

HERE = Path(__file__).resolve().parent
TIMES = ("tuning_s", "unseen_s")
Found = dict[str, dict[str, str]]


def ways(rows: list[dict[str, str]]) -> Found:
    """The best design of each way of tuning, and of all, on the batches of tuning."""

    def best(*beginnings: str) -> dict[str, str]:
        return min(
            (row for row in rows if row["design"].startswith(beginnings)), key=lambda row: float(row["tuning_s"])
        )

    joint = ("tuned", "shipped")
    usual = best(*{row["design"] for row in rows if not row["design"].startswith((*joint, "in_turn"))})
    turn = min(usual, best("in_turn"), key=lambda row: float(row["tuning_s"]))
    return {"usual": usual, "in turn": turn, "at once": best(*joint), "best of all": best("")}


def gains(found: Found, way: str) -> list[float]:
    """By how many per cent in turn is slower, on the batches of tuning and unseen, rounded."""
    of, turn = found[way], found["in turn"]
    return [round(100 * (float(turn[key]) / float(of[key]) - 1), 1) + 0.0 for key in TIMES]


def line(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def head(*names: str) -> None:
    line(*names)
    print("|" + " --- |" * len(names))


def percent(values: Iterable[float]) -> list[str]:
    return [f"{value:.1f} %" for value in values]


def main() -> None:
    script_options(__doc__).parse_args()
    made: dict[tuple[str, str], list[Found]] = {}
    head("case", "beside", "seed", "usual, µs", "in turn", "at once", "gain", "unseen", "gate lost", "at once is")
    keys = itemgetter("case", "gate_loss", "copies", "seed")
    for (case, loss, copies, seed), some in groupby(read_table(HERE / "joint.csv"), keys):
        parts = ", ".join(name for name, free in (("gate", float(loss)), ("copies", int(copies))) if free) or "-"
        found = ways(list(some))
        made.setdefault((case, parts), []).append(found)
        turn, once = found["in turn"], found["at once"]
        times = [f"{1e6 * float(found[way]['unseen_s']):.2f}" for way in ("usual", "in turn", "at once")]
        is_ = f"{once['design']}, {once['exchange']}; in turn {turn['design']}, {turn['exchange']}"
        line(case, parts, seed, *times, *percent(gains(found, "at once")), once["lost"], is_)
    print()
    head("case", "beside", "seeds", "at once: gain", "unseen", "least", "best of all: gain", "unseen", "least")
    for (case, parts), seeds in made.items():
        told: list[str] = []
        for way in ("at once", "best of all"):
            each = np.array([gains(found, way) for found in seeds])
            told += percent([*each.mean(axis=0), each.min()])
        line(case, parts, str(len(seeds)), *told)


if __name__ == "__main__":
    main()
