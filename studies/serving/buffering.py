"""FSE-DP's token buffering while requests come: what waiting at layers costs a user, and whether it gives anything.

    python studies/serving/buffering.py
    python studies/serving/buffering.py --quick

Serves the scenario served/qwen3-30b-a3b_chiplets_2x2 with several slacks, beside none, and writes buffering.csv;
buffering_prices.csv has the table of steps beside the engine.
Requests come at random at several rates, or are sent by users, twice as many as a step may have tokens: "together" all
begin in one step, with prompts of a token and answers of one length, and "apart" each prompt takes 16 tokens of steps.
With "room" the same users have a step with a token for each, so that nobody waits for a place in it.
A few minutes on one core, half of them for the table of steps; --quick has the first rate and seed. See README.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from jaxmoe.config import load_scenario
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.experiment.machine_deployment import experts_timed
from jaxmoe.experiment.serving import Serving, answers
from jaxmoe.experiment.serving_inputs import ServingReader
from jaxmoe.experiment.serving_machine import expert_seconds
from jaxmoe.experiment.table import Row, Table, make_tables, study_options
from jaxmoe.serving.online.step_table import FEATURES
from jaxmoe.traces import sample_batches

HERE = Path(__file__).resolve().parent
SCENARIO = "served/qwen3-30b-a3b_chiplets_2x2"
SLACKS = (0.0, 0.1, 0.2, 0.3)
RATES, SEEDS, REQUESTS = (0.3, 0.6, 1.2), (0, 1), 300  # requests/s
PLACES = (16, 64)  # tokens of a step, of users
PROMPTS = {"together": 1, "apart": 16}  # tokens
ROOM = ", room"
TOKENS, BATCHES = (3, 4, 6, 7, 16, 64, 256), 16  # of the table beside the engine
MILLI = 1e-3


@cache
def reader() -> ServingReader:
    """Reads scenarios whose table of steps is made once."""
    return ServingReader()


def served(*given: str) -> Iterator[Row]:
    """A row for each slack of the scenario with some of its keys set."""
    base, asked = 0.0, reader()(load_scenario(SCENARIO, given))
    assert asked.buffering is not None
    for slack in SLACKS:
        row = told(replace(asked, buffering=replace(asked.buffering, slack=slack)))
        base = base or row["output_tokens_per_s"]
        yield {"slack": slack, **row, "over_none": row["output_tokens_per_s"] / base}


def told(serving: Serving) -> Row:
    """Waits and throughput of a run."""
    requests, done = serving.at(steps=True)
    found = answers(serving, requests, done)
    assert done.steps is not None
    waits = found["waits_s"]
    return {
        "waits_per_token": float(done.deferrals.sum() / requests.output.sum()),
        "tokens_of_a_step": float(done.steps.tokens.mean()),
        "step_ms": float(done.steps.seconds.mean()) / MILLI,
        "ttft_mean_s": waits["first_token"]["mean"],
        "ttft_p99_s": waits["first_token"]["p99"],
        "tpot_mean_ms": waits["per_token"]["mean"] / MILLI,
        "tpot_p99_ms": waits["per_token"]["p99"] / MILLI,
        "output_tokens_per_s": found["output_tokens_per_s"],
    }


def rows(come: str, number: float, seed: int) -> Iterator[Row]:
    """Rows of requests that come at random at a rate, or of users for so many tokens of a step."""
    if come == "at random":
        asked = [f"serving.arrivals={{kind: random, rate_per_s: {number}, requests: {REQUESTS}}}"]
    else:
        users, prompt = 2 * int(number), PROMPTS[come.removesuffix(ROOM)]
        lengths = f"{{prompt_tokens: {prompt}, output_tokens: 200, prompt_variation: 0, output_variation: 0}}"
        asked = [
            f"serving.arrivals={{kind: users, users: {users}, requests: {2 * users}}}",
            f"serving.lengths={lengths}",
            f"serving.engine.token_budget={users if come.endswith(ROOM) else int(number)}",
        ]
    for row in served(*asked, f"serving.seed={seed}"):
        yield {"come": come, "number": number, "seed": seed, **row}


def priced() -> Iterator[Row]:
    """The table of steps beside the engine: experts of batches of the trace that the table was not made of."""
    scenario = load_scenario(SCENARIO)
    table, inputs = reader()(scenario).table, inputs_of(scenario)
    experts = replace(table, terms=tuple(term for term in table.terms if term.name == "experts"))
    timed, numbers = experts_timed(inputs), np.zeros(len(FEATURES))
    for tokens in TOKENS:
        drawn = sample_batches(inputs.trace, tokens, BATCHES, 1)
        choices = np.asarray(drawn.experts).reshape(-1, tokens * inputs.moe.top_k)
        loaded = np.mean([len(np.unique(each)) for each in choices])
        numbers[FEATURES.index("routed")], numbers[FEATURES.index("loaded")] = tokens, loaded
        told, real = float(experts.seconds(numbers[None])), expert_seconds(timed(drawn), len(inputs.moe.moe_layer_ids))
        yield {
            "tokens": tokens,
            "loaded": loaded,
            "table_ms": told / MILLI,
            "engine_ms": real / MILLI,
            "over": told / real,
        }


RANDOM = [("at random", rate, seed) for rate, seed in product(RATES, SEEDS)]
USERS = [(come + room, places, 0) for places, come, room in product(PLACES, PROMPTS, ("", ROOM))]
TABLE = Table("buffering", rows, [*RANDOM, *USERS], ("come", "number", "seed"), digits=5)

if __name__ == "__main__":
    make_tables(HERE, [TABLE, Table("buffering_prices", priced, digits=5)], study_options(__doc__).parse_args())
