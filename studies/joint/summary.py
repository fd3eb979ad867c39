"""The table of README.md from `joint.csv`: `python studies/joint/summary.py`."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path

from jaxmoe.files import read_table

HERE = Path(__file__).resolve().parent


def ways(rows: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    """The best design of each way of tuning, on the batches of tuning."""

    def best(*beginnings: str) -> dict[str, str]:
        return min(
            (row for row in rows if row["design"].startswith(beginnings)), key=lambda row: float(row["tuning_s"])
        )

    joint = ("tuned", "shipped")
    usual = best(*{row["design"] for row in rows if not row["design"].startswith((*joint, "in_turn"))})
    turn = min(usual, best("in_turn"), key=lambda row: float(row["tuning_s"]))
    return {"usual": usual, "in turn": turn, "at once": best(*joint)}


def main() -> None:
    rows = read_table(HERE / "joint.csv")
    print("| case | beside | seed | usual, us | in turn | at once | gain | gain unseen | lost unseen | at once is |")
    print("|" + " --- |" * 10)
    for (case, loss, copies, seed), some in groupby(rows, itemgetter("case", "gate_loss", "copies", "seed")):
        parts = [name for name, free in (("gate", float(loss)), ("copies", int(copies))) if free]
        found = ways(list(some))
        times = [f"{1e6 * float(each['unseen_s']):.2f}" for each in found.values()]
        turn, once = found["in turn"], found["at once"]
        gains = [f"{100 * (float(turn[key]) / float(once[key]) - 1):.1f} %" for key in ("tuning_s", "unseen_s")]
        is_ = f"{once['design']}, {once['exchange']}; in turn {turn['design']}, {turn['exchange']}"
        print(f"| {' | '.join([case, ', '.join(parts) or '-', seed, *times, *gains, once['lost'], is_])} |")


if __name__ == "__main__":
    main()
