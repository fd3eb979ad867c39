"""The best deployment under limits: a race, halving, a model that is guided and closed forms against a whole grid.

    python studies/serving/best.py --shared ../shared
    python studies/serving/best.py --quick

Writes best.csv, a row for each setting, seed and method: the deployment it takes, what that serves, and how many
requests it simulated to know. Further requests of the same kind, which no method saw, judge. About a quarter of an hour
on one core; --quick, one setting and seed, takes a minute. See README.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from best_methods import METHODS, grid_of

from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.experiment.serving import Serving
from jaxmoe.experiment.table import Row, Table, add_shared, make_tables, study_options
from jaxmoe.sweep.best_deployment import candidate, servings_of, start_of, told
from jaxmoe.sweep.point import Values
from jaxmoe.sweep.study import Study, StudyConfig

HERE = Path(__file__).resolve().parent
SEEDS, COUNT = (3, 4, 5), 600  # requests of a trace; the race was made with seeds 0 to 2 in sight
PART = 0.95  # of requests, which keep both limits
JUDGED = 0.002  # tolerance of judged rates
CONV, CODE = "traces/arrivals/azure_llm_2023_conv.npz", "traces/arrivals/azure_llm_2023_code.npz"
COLUMNS = ("setting", "seed", "method", "candidates", "rate_per_s_gpu", "known_per_s_gpu", "regret", "grid_regret")
COLUMNS += ("judged_per_s_gpu", "simulated", "share", "deployment")
BATCHING: dict[str, list[int]] = {
    "serving.engine.token_budget": [1024, 2048, 4096, 8192],
    "serving.engine.seats": [32, 64, 128, 256],
}
ALL_GPUS = "deployment.tensor * deployment.data"
EXPERTS = {"deployment.expert_ranks": f"1 + parallel_experts * ({ALL_GPUS} - 1)"}


@dataclass(frozen=True)
class Setting:
    """A machine of `gpus`, a model, requests and limits; `axes` are what may be chosen.

    `trace` is a file of the shared data, or the arrivals and lengths of drawn requests.
    """

    scenario: str
    given: Mapping[str, Any]
    trace: str | Mapping[str, Any]
    first_token_s: float
    per_token_ms: float
    gpus: int
    axes: Mapping[str, list[int]]

    @property
    def splits(self) -> bool:
        """Whether some engines read and others decode."""
        return "serving.engines" in self.axes


def drawn(prompt: int, output: int, variation: float) -> dict[str, Any]:
    """Requests at random, in bursts where gaps vary by more than 1."""
    lengths = {"prompt_tokens": prompt, "output_tokens": output}
    return {"arrivals": {"kind": "random", "rate_per_s": 1, "variation": variation}, "lengths": lengths}


LARGE = {"deployment.tensor": [1, 2, 4, 8], "deployment.data": [1, 2], "parallel_experts": [0, 1]}
SMALL = {"deployment.tensor": [1, 2], "deployment.data": [1, 2], "parallel_experts": [0, 1]}
RTX, H200 = "served/qwen3-30b-a3b_rtxpro6000_2", "served/qwen3-30b-a3b_h200_prefixes"
FEWER = {"serving.engine.token_budget": [1024, 4096, 8192], "serving.engine.seats": [32, 128, 512]}
MIXTRAL = {"hardware": "h100_sxm_8", "model": "mixtral-8x7b"}
SETTINGS = {
    "chat, 2 RTX": Setting(RTX, {}, CONV, 2, 50, 2, SMALL | BATCHING),
    "chat in haste, 2 RTX": Setting(RTX, {}, CONV, 0.5, 25, 2, SMALL | BATCHING),
    "code, 8 H100": Setting(H200, MIXTRAL, CODE, 2, 50, 8, LARGE | FEWER),
    "bursts, 2 H200": Setting(H200, {}, drawn(8192, 512, 2), 5, 50, 2, SMALL | BATCHING),
    "pools, 4 H200": Setting(
        H200, {}, drawn(4096, 512, 1), 2, 25, 4, {"deployment.tensor": [1, 2], "serving.engines": [1, 2, 3]} | BATCHING
    ),
}


def study_of(setting: Setting, shared: Path) -> Study:
    """What may be chosen, as `jaxmoe serve best` reads it, with requests for all seeds."""
    limits = {"first_token_s": setting.first_token_s, "per_token_ms": setting.per_token_ms, "part": PART}
    count, trace = 2 * COUNT * (max(SEEDS) + 1), setting.trace
    asked = {"arrivals": {"kind": "file", "path": str(shared / trace)}} if isinstance(trace, str) else dict(trace)
    serving = asked | {"arrivals": asked["arrivals"] | {"requests": count}, "limits": limits}
    engines = f"{setting.gpus} / ({ALL_GPUS})"
    if setting.splits:
        serving["decode"] = {"router": "least_loaded", "bandwidth_GB_per_s": 50, "latency_us": 30}
    derived = (
        {"serving.decode.engines": f"{engines} - serving.engines"} if setting.splits else {"serving.engines": engines}
    )
    alike = [f"parallel_experts == 0 or {ALL_GPUS} > 1"] if "parallel_experts" in setting.axes else []
    content = {
        "scenario": setting.scenario,
        "set": {**setting.given, "serving": serving},
        "axes": dict(setting.axes),
        "where": [f"{name} >= 1" for name in derived] + alike,
        "derived": derived | (EXPERTS if "parallel_experts" in setting.axes else {}),
    }
    return Study(HERE / "best.py", StudyConfig.model_validate(content))


@cache
def servings(name: str, shared: Path) -> list[tuple[Values, Serving]]:
    """Deployments of a setting, for all seeds."""
    return servings_of(study_of(SETTINGS[name], shared))[0]


def rows(shared: Path, name: str, seed: int) -> Iterator[Row]:
    """What each method takes."""
    first = 2 * COUNT * seed
    candidates = [
        candidate(values, replace(own, requests=own.requests.window(first, first + COUNT)))
        for values, own in servings(name, shared)
    ]
    grid = grid_of(candidates)
    found_by = {method: search(candidates, grid, seed) for method, search in METHODS.items()}
    known = dict(grid.rates)
    for found in found_by.values():
        known[found.chosen] = max(known[found.chosen], found.rate)
    best, judged = max(grid.rates.values()), cache(partial(judge, first + COUNT, shared, name))
    for method, found in found_by.items():
        rate, later = grid.rates[found.chosen], judged(candidates.index(found.chosen))
        yield {
            "setting": name,
            "seed": seed,
            "method": method,
            "candidates": len(candidates),
            "rate_per_s_gpu": rate,
            "known_per_s_gpu": known[found.chosen],
            "regret": 1 - known[found.chosen] / max(known.values()),
            "grid_regret": 1 - rate / best,
            "judged_per_s_gpu": later,
            "simulated": found.simulated,
            "share": found.simulated / grid.simulated,
            "deployment": told(found.chosen.values),
        }


def judge(first: int, shared: Path, name: str, place: int) -> float:
    """The highest rate of a deployment over requests that no method saw, requests/s of a GPU."""
    values, own = servings(name, shared)[place]
    unseen = candidate(values, replace(own, requests=own.requests.window(first, first + COUNT)))
    return RateTrials(unseen.serving).highest(start_of(unseen), JUDGED) / unseen.devices


def tell(rows: list[dict[str, str]]) -> None:
    """Print regrets and shares of each method: over all settings and seeds, and means of each setting."""
    judged = {(row["setting"], row["seed"]): float(row["judged_per_s_gpu"]) for row in rows if row["method"] == "grid"}
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        for name in (*SETTINGS, ""):
            some = [row for row in own if name in ("", row["setting"])]
            if not some:
                continue
            by_grid = np.array([100 * float(row["grid_regret"]) for row in some])
            later = [100 * (1 - float(row["judged_per_s_gpu"]) / judged[row["setting"], row["seed"]]) for row in some]
            own_rates = f", by the grid's own rates {by_grid.mean():.2f} % ({by_grid.max():.2f})"
            print_means(method, name, some, f"{own_rates}, judged {np.mean(later):.2f} % ({max(later):.2f})")


def print_means(method: str, name: str, rows: Sequence[Mapping[str, str]], more: str = "") -> None:
    """Print a method's regret and part of the grid's requests: means and largest of rows of a setting, or of all."""
    regret, share = (np.array([100 * float(row[key]) for row in rows]) for key in ("regret", "share"))
    print(
        f"{method}, {name or 'all'}: regret {regret.mean():.2f} % (at most {regret.max():.2f}){more}, "
        f"{share.mean():.1f} % of requests ({share.max():.1f}), as asked in "
        f"{((regret <= 2) & (share <= 10)).sum()} of {len(rows)}"
    )


if __name__ == "__main__":
    parser = study_options(__doc__, resume=True)
    add_shared(parser, HERE.parents[1].parent / "shared", "traces")
    given = parser.parse_args()
    cases = [(name, seed) for seed, name in product(SEEDS, SETTINGS)]
    made = Table("best", partial(rows, given.shared), cases, COLUMNS[:2], COLUMNS, digits=4)
    tell(make_tables(HERE, [made], given).get("best", []))
