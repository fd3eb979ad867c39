"""Requests and engines by hand and at random, which do all they can; and both simulators of them beside each other."""

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
from oracles.serving import serve_plainly

from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.changes import Change
from jaxmoe.serving.online.engine import DecodePool, Engine, Fleet, Reserve
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable, Term

MOST_PROMPT, MOST_OUTPUT, PREFIX_TOKENS = 60, 80, 8


class Scenario(NamedTuple):
    requests: Requests
    fleet: Fleet
    table: StepTable
    decode_table: StepTable


def constant(seconds: float) -> StepTable:
    return StepTable((Term("step", ("tokens",), (np.zeros(1),), np.array([seconds])),))


def drawn_scenario(seed: int) -> Scenario:
    rng = np.random.default_rng(seed)
    users = int(rng.integers(1, 20)) if rng.integers(2) else None
    decode, routers = None, ("round_robin", "least_loaded")
    if rng.integers(2):
        bytes_of_token, latency = float(rng.choice([0, 1e6])), float(rng.choice([0, 1e-3]))
        own = int(rng.integers(1, 4)), rng.choice(routers).item()
        decode = DecodePool(_engine(rng), bytes_of_token, 1e9, latency, *own)
    fleet = Fleet(_engine(rng), int(rng.integers(1, 4)), rng.choice(routers).item(), users, decode)
    return Scenario(drawn_requests(rng), fleet, drawn_table(rng), drawn_table(rng))


def drawn_requests(rng: np.random.Generator) -> Requests:
    count, texts = int(rng.integers(1, 60)), int(rng.integers(1, 6))
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 6, count))])
    digits = int(rng.integers(1, 6))  # few: many come at one moment
    return Requests(
        arrival=np.sort(np.round(rng.uniform(0, rng.choice([0.01, 2, 10]), count), digits)),
        prompt=rng.integers(1, MOST_PROMPT + 1, count),
        output=rng.integers(1, rng.choice([20, MOST_OUTPUT]) + 1, count),
        prefix_starts=starts,
        prefix_blocks=rng.integers(0, texts, starts[-1]),
        prefix_tokens=PREFIX_TOKENS,
    )


def drawn_table(rng: np.random.Generator) -> StepTable:
    tokens, contexts = np.array([0.0, 10, 40, 100]), np.array([0.0, 30, 90])

    def rising(*shape: int) -> np.ndarray:
        values = rng.uniform(0, 0.02, shape)
        for axis in range(len(shape)):  # sorted along each: beyond the grid, where the last slope goes on, steps last
            values = np.sort(values, axis=axis)
        return values

    return StepTable(
        (
            Term("tokens", ("tokens",), (tokens,), 0.002 + rising(4)),
            Term("exchange", ("all_tokens", "most_tokens"), (tokens, np.zeros(1)), rising(4, 1), "group", 0.5),
            Term("decode", ("decoding", "context", "longest"), (tokens, contexts, contexts), rising(4, 3, 3)),
            Term("prefill", ("prefill", "prefill_context"), (tokens, contexts), rising(4, 3), weight=2.0),
            Term("head", ("sequences",), (tokens,), rising(4)),
            Term("experts", ("routed", "loaded"), (tokens, np.array([0.0, 3, 12])), rising(4, 3)),
        )
    )


def drawn_changes(seed: int, fleet: Fleet) -> list[Change]:
    """Changes of all engines between three tables, some long after a scenario ends, some at one moment."""
    rng = np.random.default_rng([seed, 1])
    count = int(rng.integers(1, 30))
    tables = [drawn_table(rng) for _ in range(3)]
    times = np.sort(np.round(rng.uniform(0, rng.choice([0.05, 1, 20]), count), int(rng.integers(1, 6))))
    pauses = rng.choice([0.0, 0.03, 0.7], count)
    engines = rng.integers(0, fleet.all_engines, count)
    rows = zip(times.tolist(), rng.integers(0, 3, count).tolist(), pauses.tolist(), engines.tolist(), strict=True)
    return [Change(at, tables[table], pause, engine) for at, table, pause, engine in rows]


def drawn_buffering(seed: int, requests: Requests) -> RequestBuffering:
    """Experts of a short trace that all requests go through again and again, some choices of none."""
    rng = np.random.default_rng([seed, 2])
    experts = int(rng.integers(2, 12))
    shape = (int(rng.integers(5, 200)), int(rng.integers(1, 5)), int(rng.integers(1, 4)))
    chosen = np.minimum(rng.geometric(rng.uniform(0.1, 0.6), shape) - 1, experts - 1)
    return RequestBuffering(
        np.where(rng.random(shape) < 0.05, -1, chosen),
        rng.integers(0, shape[0], len(requests)),
        experts,
        float(rng.choice([0.0, 0.1, 0.3, 1.0])),
        int(rng.choice([1, 2, 4, 40])),
    )


def _engine(rng: np.random.Generator) -> Engine:
    block = int(rng.choice([1, 2, 4, 8]))
    least = (MOST_PROMPT + MOST_OUTPUT) // block + 2  # SGLang's; vLLM needs fewer
    limited = bool(rng.integers(4))
    return Engine(
        batching=rng.choice(["vllm", "sglang"]).item(),
        token_budget=int(rng.choice([1, 3, 16, 40, 200])),
        seats=int(rng.choice([1, 2, 8, 40])),
        ranks=int(rng.integers(1, 4)),
        kv_blocks=int(least * rng.choice([1, 1.3, 2, 5])) if limited else None,
        block_tokens=block,
        prefix_cache=limited and bool(rng.integers(3)),
        lookahead=bool(rng.integers(2)),
        reserve=_reserve(rng.spawn(1)[0]),
    )


def _reserve(rng: np.random.Generator) -> Reserve:
    first = float(rng.uniform(0.1, 1))
    least, steps = first * float(rng.uniform(0, 1)), int(rng.choice([1, 5, 50]))
    return Reserve(first, least, (first - least) / steps, int(rng.choice([0, 2, 20])), int(rng.choice([10, 4096])))


def with_one_rank(scenario: Scenario) -> Scenario:
    fleet, decode = scenario.fleet, scenario.fleet.decode
    decode = decode and replace(decode, engine=replace(decode.engine, ranks=1))
    return scenario._replace(fleet=replace(fleet, engine=replace(fleet.engine, ranks=1), decode=decode))


SECOND = constant(1.0)


def requests_of(
    *rows: tuple[float, int, int], names: list[list[int]] | None = None, prefix_tokens: int = 4
) -> Requests:
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    starts = np.cumsum([0, *map(len, names or [[]] * len(rows))])
    blocks = np.array([name for own in names or [] for name in own], int)
    return Requests(arrival.astype(float), prompt, output, starts, blocks, prefix_tokens)


def times_of(served: Served) -> list[list[float]]:
    return [list(each) for each in np.split(served.token_times, served.token_starts[1:-1])]


def both(
    requests: Requests,
    fleet: Fleet,
    table: StepTable = SECOND,
    *changes: Change,
    buffering: RequestBuffering | None = None,
) -> Served:
    """Results of the plain simulator, once the compiled one has the same."""
    plain = serve_plainly(requests, fleet, table, changes=changes, buffering=buffering)
    compiled = serve(requests, fleet, table, token_times=True, steps=True, changes=changes, buffering=buffering)
    assert_same(plain, compiled)
    return plain


def assert_same(plain: Served, compiled: Served) -> None:
    for field in fields(Served):
        if field.name != "steps":
            np.testing.assert_allclose(
                getattr(compiled, field.name), getattr(plain, field.name), 0, 1e-9, err_msg=field.name
            )
    assert (plain.steps is None) == (compiled.steps is None)
    for field in fields(plain.steps) if plain.steps else ():
        found, expected = getattr(compiled.steps, field.name), getattr(plain.steps, field.name)
        np.testing.assert_allclose(found, expected, 0, 1e-9, err_msg=field.name)
