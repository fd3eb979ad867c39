"""Balancers of experts under load: who wins where, over rate, skew and drift, and whether to move experts at all.

    python studies/serving/balancers.py --shared ../shared
    python studies/serving/balancers.py --quick

The engine and the drifting subjects of rebalancing.py, for four minutes. Writes balancers.csv, a row for each skew of
subjects, drift, seed, balancer and rate: waits, what moved, and the highest rate that keeps the limits. About ten
minutes on one core; --quick, one skew, drift and seed, takes a minute. See README.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from drift import Subjects, read_subjects
from rebalancing import COPIES, DEVICES, HISTORY, LENGTHS, LIMITS, SLOWER, WINDOW, Server, the_server, waits_under
from scipy.special import stdtrit

from jaxmoe.experiment.rate_trials import over_limits
from jaxmoe.experiment.table import Row, Table, add_shared, make_tables, study_options
from jaxmoe.methods.moentwine.balancing import AbstractRule, Eplb, ShadowSlots
from jaxmoe.placement.slots import EMPTY
from jaxmoe.serving.online.arrivals import drawn
from jaxmoe.serving.online.capacity import drained_rate, highest_rate
from jaxmoe.serving.online.changes import Change
from jaxmoe.serving.online.rebalancing import Rebalancing, Slots, experts_moved, imbalance
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.topics import drawn_topics, loads, popularity, tokens_of, windows_of
from jaxmoe.units import GIGA

HERE = Path(__file__).resolve().parent
SERVED = 240.0  # s
MOST, RATES = 150.0, (60.0, 90.0)  # requests/s that are drawn, and of these served
SKEWS, DRIFTS, SEEDS = (0.75, 1.5), (120, 1200), (0, 1, 2, 3, 4)  # of the logarithm of a subject's popularity; s
TOLERANCE = 0.03  # of highest rates
HOPS = jnp.ones((DEVICES, DEVICES)) - jnp.eye(DEVICES)  # all GPUs are behind one switch


@dataclass(frozen=True)
class Balancer:
    """What places experts at the start, and then every so often; without a rule they stay in turn, without copies."""

    name: str
    rule: AbstractRule | None = None
    interval_s: float = np.inf


def balancers(native: int) -> tuple[Balancer, ...]:
    """All of them, where each GPU has so many slots beside those for copies."""
    greedy, nearest = ShadowSlots(HOPS, native, "coldest"), ShadowSlots(HOPS, native, "nearest")
    return (
        Balancer("none"),
        Balancer("eplb, static", Eplb()),
        Balancer("eplb, 1 min", Eplb(), 60.0),
        Balancer("eplb renamed, 1 min", Eplb(renamed=True), 60.0),
        Balancer("greedy, 1 min", greedy, 60.0),
        Balancer("topology-aware, 1 min", nearest, 60.0),
    )


def plans(balancer: Balancer, tokens: np.ndarray, subjects: Subjects) -> Iterator[Slots]:
    """What each window has in its slots; a plan is made from the requests of the interval before it alone."""
    layers, experts = subjects.planned.shape[1:]
    in_turn = np.pad(np.arange(experts).reshape(DEVICES, -1), ((0, 0), (0, COPIES // DEVICES)), constant_values=EMPTY)
    held, first = np.tile(in_turn.ravel(), (layers, 1)), round(HISTORY / WINDOW)
    for at in range(first, len(tokens)):
        if balancer.rule and (at == first or (at - first) * WINDOW % balancer.interval_s == 0):
            seen = tokens[at - round(min(balancer.interval_s, HISTORY) / WINDOW) : at].sum(axis=0)
            own = Rebalancing(subjects.planned, held, DEVICES, WINDOW, the_server().table, balancer.rule)
            held = own.placed(loads(seen, subjects.planned), held)
        yield held


@dataclass(frozen=True)
class Users:
    """Requests drawn at the rate of `MOST`, and a number of each: those below rate / MOST come at a rate."""

    requests: Requests
    number: np.ndarray

    def at(self, rate: float) -> Requests:
        """Those that come at a rate, 1/s."""
        own, every = self.number < rate / MOST, self.requests
        return Requests(every.arrival[own], every.prompt[own], every.output[own])


def users(subjects: Subjects, skew: float, drift: int, seed: int) -> tuple[Users, np.ndarray]:
    """Who comes from 0 s on, and tokens of each window by subject, from `HISTORY` before."""
    span, windows = HISTORY + SERVED, round((HISTORY + SERVED) / WINDOW)
    every = drawn(MOST, 1.0, round(1.05 * MOST * span), LENGTHS, seed)
    kept = every.arrival < span
    every = Requests(every.arrival[kept] - HISTORY, every.prompt[kept], every.output[kept])
    parts = popularity(len(subjects.served), windows, WINDOW, drift, skew, np.random.default_rng([seed, 5]))
    window = windows_of(every, WINDOW, -HISTORY)
    every = replace(every, topic=drawn_topics(window, parts, np.random.default_rng([seed, 6])))
    now, number = every.arrival >= 0, np.random.default_rng([seed, 7]).random(len(every))
    come = Requests(every.arrival[now], every.prompt[now], every.output[now])
    return Users(come, number[now]), tokens_of(every, window, len(subjects.served), windows)


def rows(shared: Path, skew: float, drift: int, seed: int) -> Iterator[Row]:
    """Rows of every balancer for the same requests of the same subjects."""
    folder, server = shared / "traces" / "gpt-oss-20b", the_server()
    subjects = read_subjects(folder / "load_mmlu_validation.npz", folder / "load_mmlu_test.npz")
    come, tokens = users(subjects, skew, drift, seed)
    judged = [loads(each, subjects.served) for each in tokens[round(HISTORY / WINDOW) :]]
    highest = RATES[-1]
    for balancer in balancers(subjects.planned.shape[2] // DEVICES):
        held = list(plans(balancer, tokens, subjects))
        tables = [server.table(*each, at) for at, each in enumerate(zip(judged, held, strict=True))]
        moved = np.array([[0.0, 0.0], *(experts_moved(*pair, DEVICES) for pair in pairwise(held))])
        uneven = float(np.mean([imbalance(*each, DEVICES) for each in zip(judged, held, strict=True)]))
        for slower in SLOWER if moved.any() else SLOWER[:1]:
            pauses = slower * moved[:, 1] * server.expert_bytes / server.bytes_per_s
            changes = [Change(at * WINDOW, table, pauses[at]) for at, table in enumerate(tables)]
            highest = highest_rate(partial(meets, server, come, changes), highest, TOLERANCE, stride=1.1)
            told = {
                "skew": skew,
                "drift_s": drift,
                "seed": seed,
                "balancer": balancer.name,
                "slower": slower,
                "imbalance": uneven,
                "moved_GB": float(moved[:, 0].sum()) * server.expert_bytes / GIGA,
                "pause_s": float(pauses.sum()),
                "highest_per_s": highest,
            }
            yield from ({**told, "rate_per_s": rate, **waits_under(server, come.at(rate), changes)} for rate in RATES)


def meets(server: Server, come: Users, changes: Sequence[Change], rate: float) -> bool:
    """Whether so many requests a second keep the limits and drain; over `MOST` nobody is there to ask."""
    requests = come.at(rate)
    most = (1 - LIMITS.part) * len(requests)

    def goes_on(served: Served) -> bool:
        return over_limits(requests, served, LIMITS) <= most

    table, later = changes[0].table, changes[1:]
    served = serve(requests, server.serving.fleet, table, changes=later, goes_on=goes_on)
    return rate <= MOST and bool((served.finish >= 0).all()) and goes_on(served) and drained_rate(served) is None


def tell(rows: list[dict[str, str]]) -> None:
    """Print means over seeds, and by how much each is over `eplb, static` of its own requests, with its interval."""
    names = ("highest_per_s", "ttft_p99_ms", "tpot_mean_ms", "tpot_p99_ms")
    base = {_case(row): row for row in rows if row["balancer"] == "eplb, static"}
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("skew", "drift_s", "rate_per_s", "balancer", "slower"))
        groups.setdefault(key, []).append(row)
    for (skew, drift, rate, balancer, slower), own in groups.items():
        said = [f"imbalance {np.mean([float(row['imbalance']) for row in own]):.3f}"]
        said += [f"{np.mean([float(row['moved_GB']) for row in own]):.0f} GB moved"]
        for name in names:
            values = [float(row[name]) for row in own]
            more = np.array([100 * (float(row[name]) / float(base[_case(row)][name]) - 1) for row in own])
            said.append(f"{name} {np.mean(values):.4g} ({more.mean():+.1f} ± {half_interval(more):.1f} %)")
        print(f"skew {skew}, drift {drift} s, {rate}/s, {balancer}, moves x{slower}: {', '.join(said)}")


def half_interval(values: np.ndarray) -> float:
    """Half of the 95 % interval of a mean, by Student's t; infinite for a single value."""
    count = len(values)
    return float(stdtrit(count - 1, 0.975) * values.std(ddof=1) / np.sqrt(count)) if count > 1 else np.inf


def _case(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("skew", "drift_s", "seed", "rate_per_s"))


if __name__ == "__main__":
    parser = study_options(__doc__, resume=True)
    add_shared(parser, HERE.parents[1].parent / "shared", "traces")
    given = parser.parse_args()
    cases = [(skew, drift, seed) for seed, skew, drift in product(SEEDS, SKEWS, DRIFTS)]
    columns = ("skew", "drift_s", "seed", "balancer", "slower", "rate_per_s", "imbalance", "moved_GB", "pause_s")
    columns += ("highest_per_s", "ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "tpot_p99_ms", "goodput_per_s")
    columns += ("within_limits",)
    made = Table("balancers", partial(rows, given.shared), cases, columns[:3], columns, digits=4)
    tell(make_tables(HERE, [made], given).get("balancers", []))
