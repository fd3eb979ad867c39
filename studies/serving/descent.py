"""Descent for the best deployment: gradients of lateness choose the layout, coordinates the batching; after best.py.

    python studies/serving/descent.py --shared ../shared
    python studies/serving/descent.py --quick

The scan over steps tells by one backward pass how late users are if a step of each size took longer, and so, to first
order, what every other layout of as many streams would change. Budget and seats are whole numbers of the scan, without
gradients: neighbours of them are tried. Whatever is chosen is simulated by the exact engine. Writes descent.csv, a row
for each setting and seed of best.csv whose engines the scan has; about five minutes on one core. See README.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from best import COUNT, SEEDS, SETTINGS, print_means, servings
from jaxtyping import Float

from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.experiment.table import Row, Table, add_shared, earlier_table, make_tables, study_options
from jaxmoe.files import read_table
from jaxmoe.serving.online.arrivals import at_rate
from jaxmoe.serving.online.scan import ScanRequests, seconds_of, serve_by_scan
from jaxmoe.serving.online.step_table import FEATURES, StepTable, Term
from jaxmoe.sweep.best_deployment import AHEAD, TOLERANCE, Contender, candidate, start_of, told

HERE = Path(__file__).resolve().parent
READ, STEPS = 96, 3072  # requests of a stream that the scan serves, and its steps
SHARP = 8.0  # of the rise of lateness at a limit
SIZES, DECODING = 2.0 ** np.arange(14), np.array([0.0, *2.0 ** np.arange(10)])  # tokens, and sequences that decode
GRID = Term("longer", ("tokens", "decoding"), (SIZES, DECODING), np.zeros((len(SIZES), len(DECODING))))
BUDGET, SEATS = "serving.engine.token_budget", "serving.engine.seats"


class Search(NamedTuple):
    """A candidate, its trials, and what others are tried with."""

    each: Contender
    trials: RateTrials


def descent(candidates: Sequence[Contender]) -> tuple[Search, int]:
    """The best that descents reach, one from the best estimate of each number of streams; requests simulated."""
    simulated, best = 0, None
    for streams in sorted({streams_of(each) for each in candidates}):
        own = [each for each in candidates if streams_of(each) == streams]
        trials = {each: RateTrials(each.serving) for each in own}
        found: Contender | None = max(own, key=lambda each: each.estimate / each.devices)
        trials[found].highest(start_of(found), TOLERANCE)
        while found is not None:
            now, found = found, _better(found, trials)
            simulated += READ
        simulated += sum(each.simulated for each in trials.values())
        if best is None or rate_of(Search(now, trials[now])) > rate_of(best):
            best = Search(now, trials[now])
    assert best is not None
    return best, simulated


def _better(now: Contender, trials: dict[Contender, RateTrials]) -> Contender | None:
    """A candidate that serves more than this one by its own trials: down the gradient first, then a neighbour."""
    rate = trials[now].best
    alike = [each for each in trials if each is not now and batching(each) == batching(now)]
    down = [each for change, each in sorted(_changes(now, alike, rate), key=lambda pair: pair[0]) if change < 0]
    beside = [each for each in trials if _are_neighbours(each, now, list(trials))]
    return next((each for each in (*down, *beside) if _leads(each, trials, rate)), None)


def _leads(each: Contender, trials: dict[Contender, RateTrials], rate: float) -> bool:
    target = rate * (1 + AHEAD)
    if not trials[each].meets(target):
        return False
    trials[each].highest(target, TOLERANCE, 1.08)
    return True


def _changes(now: Contender, others: Sequence[Contender], rate: float) -> list[tuple[float, Contender]]:
    """What lateness changes by, to first order, where steps take what those of each other one do."""
    slope, own = lateness_slope(now, rate), _on_grid(now)
    return [(float((slope * (_on_grid(each) - own)).sum()), each) for each in others]


def lateness_slope(now: Contender, rate: float) -> Float[np.ndarray, "size decoding"]:
    """What a second more of steps of each size adds to the lateness of the requests of one stream."""
    serving, engine = now.serving, now.serving.fleet.engine
    come = at_rate(serving.requests, rate)
    rows = slice(0, READ * streams_of(now), streams_of(now))
    lists = come.arrival[rows], come.prompt[rows], come.output[rows], np.zeros_like(come.prompt[rows])
    terms, limits = (*serving.table.terms, GRID), serving.limits
    all_tokens = jnp.asarray([engine.ranks if name == "all_tokens" else 1 for name in FEATURES])

    def lateness(longer: jax.Array) -> jax.Array:
        requests = ScanRequests(*map(jnp.asarray, lists))
        priced = seconds_of(StepTable(terms), [*(jnp.asarray(term.values) for term in terms[:-1]), longer])
        served = serve_by_scan(
            requests, lambda features: priced(features * all_tokens), engine.token_budget, engine.seats, STEPS
        )
        first = (served.first_token - requests.arrival) / limits.first_token
        further = (served.finish - served.first_token) / jnp.maximum(requests.output - 1, 1) / limits.per_token
        late = jax.nn.softplus(SHARP * (first - 1)) + jax.nn.softplus(SHARP * (further - 1))
        return jnp.where(served.finish > 0, late, 0.0).mean()

    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.grad(lateness))(jnp.asarray(GRID.values)))


def _on_grid(each: Contender) -> Float[np.ndarray, "size decoding"]:
    """Seconds of its steps of these sizes on all ranks, whose sequences have 1024 tokens before."""
    tokens, decoding = np.meshgrid(SIZES, DECODING, indexing="ij")
    decoding = np.minimum(decoding, tokens)
    values = {"tokens": tokens, "routed": tokens, "loaded": 0 * tokens}
    values |= {"most_tokens": tokens, "all_tokens": each.serving.fleet.engine.ranks * tokens}
    values |= {"prefill": tokens - decoding, "decoding": decoding, "sequences": np.maximum(decoding, 1.0)}
    values |= {name: np.full_like(tokens, 1024.0) for name in ("prefill_context", "context", "longest")}
    return each.serving.table.seconds(np.stack([values[name] for name in FEATURES], axis=-1)[..., None, :])


def streams_of(each: Contender) -> int:
    """Ranks of all engines, over which requests are spread."""
    return each.serving.fleet.engines * each.serving.fleet.engine.ranks


def batching(each: Contender) -> tuple[int, int]:
    """Its token budget and seats."""
    return each.values[BUDGET], each.values[SEATS]


def _are_neighbours(each: Contender, other: Contender, among: Sequence[Contender]) -> bool:
    """Whether two differ in one step of the budget or of the seats alone."""
    apart = [key for key in each.values if each.values[key] != other.values[key]]
    if len(apart) != 1 or apart[0] not in (BUDGET, SEATS):
        return False
    steps = sorted({one.values[apart[0]] for one in among})
    return abs(steps.index(each.values[apart[0]]) - steps.index(other.values[apart[0]])) == 1


def rate_of(found: Search) -> float:
    """Its highest rate, requests/s of a GPU."""
    return found.trials.best / found.each.devices


def rows(shared: Path, grid: Path, name: str, seed: int) -> Iterator[Row]:
    """What descent takes, beside the grid of the same case."""
    first = 2 * COUNT * seed
    candidates = [
        candidate(values, replace(own, requests=own.requests.window(first, first + COUNT)))
        for values, own in servings(name, shared)
    ]
    known = [row for row in read_table(grid) if (row["setting"], row["seed"]) == (name, str(seed))]
    best = max(float(row["known_per_s_gpu"]) for row in known)
    whole = next(int(row["simulated"]) for row in known if row["method"] == "grid")
    found, simulated = descent(candidates)
    yield {
        "setting": name,
        "seed": seed,
        "known_per_s_gpu": rate_of(found),
        "regret": 1 - rate_of(found) / max(best, rate_of(found)),
        "simulated": simulated,
        "share": simulated / whole,
        "deployment": told(found.each.values),
    }


def tell(rows: list[dict[str, str]]) -> None:
    """Print regrets and shares: means of each setting and of all, and the largest."""
    for name in (*SETTINGS, ""):
        some = [row for row in rows if name in ("", row["setting"])]
        if some:
            print_means("descent", name, some)


if __name__ == "__main__":
    parser = study_options(__doc__, resume=True)
    add_shared(parser, HERE.parents[1].parent / "shared", "traces")
    given = parser.parse_args()
    cases = [(name, seed) for seed, name in product(SEEDS, SETTINGS) if not SETTINGS[name].splits]
    grid = earlier_table(HERE, given, "best")
    columns = ("setting", "seed", "known_per_s_gpu", "regret", "simulated", "share", "deployment")
    made = Table("descent", partial(rows, given.shared, grid), cases, columns[:2], columns, digits=4)
    tell(make_tables(HERE, [made], given).get("descent", []))
