"""The tables of README.md from `times.csv`: `python studies/generalisation/summary.py`.

Takes a few seconds.
"""

from pathlib import Path

import numpy as np
from study import EVEN, MEAN, SYNTHETIC, WORST

from jaxmoe.experiment.table import script_options
from jaxmoe.files import read_table

HERE = Path(__file__).resolve().parent


def mean_times(rows: list[dict[str, str]], case: str, seed: str | None = None) -> dict[str, dict[str, float]]:
    """Mean time over seeds and layers by what the plan was tuned on and what it is judged on, µs."""
    times: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["case"] == case and seed in (None, row["seed"]):
            times.setdefault(row["tuned_on"], {}).setdefault(row["judged_on"], []).append(float(row["mean_s"]))
    return {on: {of: 1e6 * float(np.mean(each)) for of, each in row.items()} for on, row in times.items()}


def figures(times: dict[str, dict[str, float]]) -> dict[str, float]:
    """What the acceptance lines ask, each a ratio of times."""
    topics = [*next(iter(times.values()))]
    own = np.mean([times[topic][topic] for topic in topics])
    other = {topic: max(time for of, time in times[topic].items() if of != topic) for topic in topics}
    worst = {name: max(times[name].values()) for name in (MEAN, WORST, EVEN)}
    synthetic = [times[f"{SYNTHETIC} {topic}"][topic] / times[topic][topic] for topic in topics]
    across = [times[on][of] / times[of][of] for on in topics for of in topics if on != of]
    return {
        "another over own, mean": float(np.mean(across)),
        "another over own, worst": float(np.max(across)),
        "worst other topic of the best single plan over that of worst": min(other.values()) / worst[WORST],
        "the same, mean over single plans": float(np.mean([*other.values()])) / worst[WORST],
        "mean over topics, mean": float(np.mean([*times[MEAN].values()])) / own,
        "mean over topics, worst": float(np.mean([*times[WORST].values()])) / own,
        "mean over topics, even": float(np.mean([*times[EVEN].values()])) / own,
        "worst topic of mean over that of worst": worst[MEAN] / worst[WORST],
        "synthetic over own, mean": float(np.mean(synthetic)),
        "synthetic over own, worst": float(np.max(synthetic)),
    }


def main() -> None:
    script_options(__doc__).parse_args()
    rows = read_table(HERE / "times.csv")
    for case in dict.fromkeys(row["case"] for row in rows):
        times = mean_times(rows, case)
        topics = [*next(iter(times.values()))]
        print(f"\n{case}, µs\n\n| tuned on | {' | '.join(topics)} | mean | worst |\n|{' --- |' * (len(topics) + 3)}")
        for on, row in times.items():
            seconds = [row[topic] for topic in topics]
            print(f"| {on} | {' | '.join(f'{each:.1f}' for each in (*seconds, np.mean(seconds), max(seconds)))} |")
        print()
        seeds = sorted({row["seed"] for row in rows if row["case"] == case})
        each = [figures(mean_times(rows, case, seed)) for seed in (None, *seeds)]
        for name in each[0]:
            print(f"- {name}: {each[0][name]:.3f} (seeds {', '.join(f'{one[name]:.3f}' for one in each[1:])})")


if __name__ == "__main__":
    main()
