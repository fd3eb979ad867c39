"""EPLB's interval under load: what users wait if experts are rebalanced never, now and then, or all the time.

    python studies/serving/rebalancing.py --shared ../shared
    python studies/serving/rebalancing.py --quick

gpt-oss-20b on eight H200, experts in parallel, serves half an hour of questions whose subjects drift. Writes
rebalancing.csv, a row for each drift, rate, seed and policy. About ten minutes on one core; --quick, one drift, rate
and seed, takes a minute. See README.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from drift import Subjects, read_subjects

from jaxmoe.config.loader import load_scenario
from jaxmoe.experiment.deployment import deployed
from jaxmoe.experiment.serving import Serving
from jaxmoe.experiment.serving_inputs import serving_of
from jaxmoe.experiment.table import Row, Table, add_shared, make_tables, study_options
from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES
from jaxmoe.placement.eplb import eplb
from jaxmoe.serving.gating import expert_loads, loads_of_layers
from jaxmoe.serving.online.arrivals import Lengths, drawn
from jaxmoe.serving.online.changes import Change
from jaxmoe.serving.online.from_step import with_gating
from jaxmoe.serving.online.metrics import Limits, goodput, waits_of
from jaxmoe.serving.online.rebalancing import Slots, experts_moved, imbalance
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable
from jaxmoe.serving.online.topics import Shares, drawn_topics, loads, popularity, tokens_of, windows_of
from jaxmoe.serving.step import ModelStep
from jaxmoe.units import GIGA

HERE = Path(__file__).resolve().parent
DEVICES, COPIES = 8, 8
SCENARIO = (
    "served/qwen3-30b-a3b_h200_pools",
    (
        "name=gpt-oss-20b_h200_8",
        "model=gpt-oss-20b",
        f"deployment={{backend: sglang, data: {DEVICES}, expert_ranks: {DEVICES}, redundant_experts: {COPIES}}}",
        "serving={arrivals: {kind: random, rate_per_s: 1}, engine: {prefix_cache: false}}",
    ),
)
WINDOW, HISTORY, SERVED = 10.0, 600.0, 1800.0  # s: of equal loads, before the first request, of requests
SPREAD = 1.5  # standard deviation of the logarithm of a subject's popularity
LENGTHS = Lengths(1024, 512, 1.0, 0.7)
LIMITS = Limits(first_token=0.5, per_token=0.03)
CASES, SEEDS = ((120, 60), (1200, 60), (1200, 90)), (0, 1, 2)  # drift in s, and rate in 1/s


@dataclass(frozen=True)
class Policy:
    """When experts are copied and placed anew: at the start, and then every so often."""

    name: str
    interval_s: float = np.inf
    copies: bool = True


POLICIES = (
    Policy("no copies", copies=False),
    Policy("never"),
    Policy("10 min", 600.0),
    Policy("1 min", 60.0),
    Policy("10 s", 10.0),
)
WAITS = ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "tpot_p99_ms")
SLOWER = (1.0, 100.0)  # times that moves take what idle links would


class Server:
    """Steps of the deployment by the loads of its experts, and what moving an expert takes."""

    def __init__(self) -> None:
        scenario = load_scenario(*SCENARIO)
        own, serving = deployed(scenario), serving_of(scenario)
        self.step: ModelStep = own.step
        self.serving: Serving = serving
        model, link = own.step.model, scenario.hardware.link
        self.expert_bytes = model.expert_parameters * WEIGHT_BYTES[own.deployment.experts]
        self.bytes_per_s = link.bandwidth_GB_per_s * GIGA

    def even(self) -> StepTable:
        """Steps where all devices have equally much to do."""
        model = self.step.model
        return with_gating(self.serving.table, self.step, expert_loads(model.num_experts, model.top_k, DEVICES, 0.0))

    def table(self, shares: Shares, held: Slots, seed: int) -> StepTable:
        """Steps where experts have such shares of choices, in such slots."""
        gating = loads_of_layers(shares, held, self.step.model.top_k, DEVICES, seed)
        return with_gating(self.serving.table, self.step, gating)


@cache
def the_server() -> Server:
    """The one of all cases, so that its steps are priced once."""
    return Server()


def plans(policy: Policy, tokens: np.ndarray, subjects: Subjects) -> Iterator[Slots]:
    """What each window has in its slots; a plan is made from the requests of the interval before it alone."""
    layers, experts = subjects.planned.shape[1:]
    held, first = np.tile(np.arange(experts), (layers, 1)), round(HISTORY / WINDOW)
    for at in range(first, len(tokens)):
        if policy.copies and (at == first or (at - first) * WINDOW % policy.interval_s == 0):
            seen = tokens[at - round(min(policy.interval_s, HISTORY) / WINDOW) : at].sum(axis=0)
            held = eplb(loads(seen, subjects.planned), experts + COPIES, DEVICES)
        yield held


def rows(shared: Path, drift: int, rate: int, seed: int) -> Iterator[Row]:
    """Rows of every policy for the same requests of the same subjects."""
    folder = shared / "traces" / "gpt-oss-20b"
    subjects = read_subjects(folder / "load_mmlu_validation.npz", folder / "load_mmlu_test.npz")
    server = the_server()
    every, tokens = _asked(subjects, drift, rate, seed)
    now = every.arrival >= 0
    requests = Requests(every.arrival[now], every.prompt[now], every.output[now])
    judged = [loads(each, subjects.served) for each in tokens[round(HISTORY / WINDOW) :]]
    case: Row = {"drift_s": drift, "rate_per_s": rate, "seed": seed}
    yield {
        **case,
        "policy": "balanced",
        "imbalance": 1.0,
        **waits_under(server, requests, [Change(0.0, server.even())]),
    }
    for policy in POLICIES:
        for row in _rows_of(server, requests, judged, list(plans(policy, tokens, subjects))):
            yield {**case, "policy": policy.name, **row}


def _asked(subjects: Subjects, drift: int, rate: int, seed: int) -> tuple[Requests, np.ndarray]:
    """Requests, of which those before 0 are history, and tokens of each window by subject."""
    span, windows = HISTORY + SERVED, round((HISTORY + SERVED) / WINDOW)
    every = drawn(rate, 1.0, round(1.1 * rate * span), LENGTHS, seed)
    kept = every.arrival < span
    every = Requests(every.arrival[kept] - HISTORY, every.prompt[kept], every.output[kept])
    parts = popularity(len(subjects.served), windows, WINDOW, drift, SPREAD, np.random.default_rng([seed, 5]))
    window = windows_of(every, WINDOW, -HISTORY)
    every = replace(every, topic=drawn_topics(window, parts, np.random.default_rng(seed)))
    return every, tokens_of(every, window, len(subjects.served), windows)


def _rows_of(server: Server, requests: Requests, judged: list[Shares], held: list[Slots]) -> Iterator[Row]:
    """Rows of what each window has in its slots, for moves as quick as links and slower ones if there are any."""
    tables = [server.table(shares, slots, at) for at, (shares, slots) in enumerate(zip(judged, held, strict=True))]
    moves = [experts_moved(before, after, DEVICES) for before, after in pairwise(held)]
    moved = np.array([[0.0, 0.0], *moves]) * server.expert_bytes
    seconds, times = moved[:, 1] / server.bytes_per_s, moved[:, 0] > 0
    for slower in SLOWER if times.any() else SLOWER[:1]:
        pauses = slower * seconds
        changes = [Change(at * WINDOW, table, pauses[at]) for at, table in enumerate(tables)]
        yield {
            "slower": slower,
            "imbalance": float(np.mean([imbalance(*each, DEVICES) for each in zip(judged, held, strict=True)])),
            "moves": int(times.sum()),
            "moved_GB": float(moved[times, 0].mean()) / GIGA if times.any() else 0.0,
            "pause_ms": 1e3 * float(pauses[times].mean()) if times.any() else 0.0,
            **waits_under(server, requests, changes),
        }


def waits_under(server: Server, requests: Requests, changes: list[Change]) -> Row:
    served = serve(requests, server.serving.fleet, changes[0].table, changes=changes[1:])
    waits = waits_of(requests, served)
    found: dict[str, float] = {}
    for name, seconds in (("ttft", waits.first_token), ("tpot", waits.per_token)):
        known = 1e3 * seconds[np.isfinite(seconds)]
        found |= {f"{name}_mean_ms": float(known.mean()), f"{name}_p99_ms": float(np.percentile(known, 99))}
    within = float(waits.within(LIMITS).mean())
    return {**found, "goodput_per_s": goodput(requests, served, LIMITS), "within_limits": within}


def tell(rows: list[dict[str, str]]) -> None:
    """Print what each policy is worth: means over seeds, and its waits over those of `never`, lowest to highest."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in ("drift_s", "rate_per_s", "policy", "slower")), []).append(row)
    for (drift, rate, policy, slower), own in found.items():
        base = {row["seed"]: row for row in found.get((drift, rate, "never", "1"), [])}
        told = [f"imbalance {np.mean([float(row['imbalance']) for row in own]):.3f}"]
        for name in (*WAITS, "goodput_per_s"):
            values = [float(row[name]) for row in own]
            more = [100 * (float(row[name]) / float(base[row["seed"]][name]) - 1) for row in own if row["seed"] in base]
            told.append(
                f"{name} {np.mean(values):.4g}" + (f" ({min(more):+.1f} to {max(more):+.1f} %)" if more else "")
            )
        moves = f", moves {slower} times slower" if slower == "100" else ""
        print(f"drift {drift} s, {rate} requests/s, {policy}{moves}: {', '.join(told)}")


if __name__ == "__main__":
    parser = study_options(__doc__, resume=True)
    add_shared(parser, HERE.parents[1].parent / "shared", "traces")
    given = parser.parse_args()
    cases = [(*case, seed) for case, seed in product(CASES, SEEDS)]
    columns = ("drift_s", "rate_per_s", "seed", "policy", "slower", "imbalance", "moves", "moved_GB", "pause_ms")
    columns += (*WAITS, "goodput_per_s", "within_limits")
    made = Table("rebalancing", partial(rows, given.shared), cases, columns[:3], columns, digits=4)
    tell(make_tables(HERE, [made], given).get("rebalancing", []))
