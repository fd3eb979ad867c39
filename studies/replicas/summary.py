"""What the tables of this study say, for README.md: python studies/replicas/summary.py

Takes a second.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np

from jaxmoe.experiment.table import script_options
from jaxmoe.files import read_table

HERE = Path(__file__).parent
CHOICES = ("even", "nearest", "fixed")
KEYS = {"model": "later_us", "simulator": "simulated_us", "simulator, rank by rank": "simulated_by_rank_us"}


def topology() -> None:
    """Mean time of a layer under every rule and the best one, and the least gain of any layer."""
    rows = [row for path in sorted(HERE.glob("topology_*.csv")) for row in read_table(path)]
    print("machine | model | slots | seed | judge | EPLB even, nearest, fixed | tuned the same | best of each |")
    gains = defaultdict(list)
    for machine, model, seed in dict.fromkeys((row["machine"], row["model"], row["seed"]) for row in rows):
        own = [row for row in rows if (row["machine"], row["model"], row["seed"]) == (machine, model, seed)]
        choices = [choice for choice in CHOICES if any(row["choice"] == choice for row in own)]
        for judge, key in KEYS.items():
            time = {
                (plan, choice): np.array([float(r[key]) for r in own if r["plan"] == plan and r["choice"] == choice])
                for plan in ("eplb", "tuned")
                for choice in choices
            }
            mean = {name: value.mean() for name, value in time.items()}
            # Each under its own best rule for all layers, as an engine has one.
            best = {plan: min(choices, key=lambda choice, plan=plan: mean[plan, choice]) for plan in ("eplb", "tuned")}
            gain = 1 - time["tuned", best["tuned"]] / time["eplb", best["eplb"]]
            same = [1 - time["tuned", choice] / time["eplb", choice] for choice in choices]
            gains[judge, seed] += gain.tolist()
            cells = [", ".join(f"{mean[plan, choice]:.2f}" for choice in choices) for plan in ("eplb", "tuned")]
            print(
                f"{machine} | {model} | {own[0]['slots']} | seed {seed} | {judge} | {cells[0]} | {cells[1]} | "
                f"{1 - mean['tuned', best['tuned']] / mean['eplb', best['eplb']]:.1%} (least {gain.min():.1%}) | "
                f"same rule: {', '.join(f'{each.mean():.1%} (least {each.min():.1%})' for each in same)}"
            )
    for (judge, seed), each in gains.items():
        print(f"{judge}, seed {seed}: {np.mean(each):.1%} less on average over layers, least {np.min(each):.1%}")


def over_time() -> None:
    for path in sorted(HERE.glob("time_*.csv")):
        rows = read_table(path)
        print(
            path.stem,
            "| policy | memory, patience, steps | layer µs | moved GB | moving ms | µs with moving, by steps",
        )
        for row in rows:
            print(" | ".join(list(row.values())[2:]))


if __name__ == "__main__":
    script_options(__doc__).parse_args()
    topology()
    over_time()
