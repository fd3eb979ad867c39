"""Tables, curves and the timeline of requests over time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxmoe.files import write_table
from jaxmoe.report import Over
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.metrics import Limits, waits_of
from jaxmoe.serving.online.rebalancing import Move
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served, StepLog
from jaxmoe.units import MICRO

POINTS = 400  # of a curve over time
ROWS = 1 << 14
MOST_STEPS = 20_000  # of a timeline, which viewers can show


def write_requests(path: Path, requests: Requests, served: Served, limits: Limits) -> None:
    """Write a row of each request: when and where it was served, and what it waited for, s."""
    waits = waits_of(requests, served)
    columns: dict[str, np.ndarray] = {
        "sent_s": served.sent,
        "prompt_tokens": requests.prompt,
        "output_tokens": requests.output,
        "engine": served.engine,
        "rank": served.rank,
        "decode_engine": served.decode_engine,
        "scheduled_s": served.scheduled,
        "first_token_s": served.first_token,
        "finish_s": served.finish,
        "time_to_first_token_s": waits.first_token,
        "time_per_token_s": waits.per_token,
        "cached_tokens": served.cached,
        "preemptions": served.preemptions,
        "within_limits": waits.within(limits).astype(int),
    }
    write_table(path, _rows(columns), [*columns], digits=9)


def step_rows(steps: StepLog) -> Iterator[dict[str, Any]]:
    """A row of each step."""
    return _rows(
        {
            "engine": steps.engine,
            "start_s": steps.start,
            "seconds": steps.seconds,
            "tokens": steps.tokens,
            "running": steps.running,
            "waiting": steps.waiting,
            "kv_blocks": steps.kv_blocks,
        }
    )


def engine_names(fleet: Fleet) -> list[str]:
    """Names of all engines in their order."""
    own = [f"engine {number}" for number in range(fleet.engines)]
    return own + [f"decode engine {number}" for number in range(fleet.decode.engines if fleet.decode else 0)]


def over_time(
    requests: Requests, served: Served, steps: StepLog, fleet: Fleet
) -> tuple[Float[np.ndarray, " time"], list[str], list[Over]]:
    """Moments, names of engines, and their queue, batch, cache and hits at these moments."""
    names = engine_names(fleet)
    time = np.linspace(served.sent.min(), served.finish.max(), POINTS)
    numbers = [*enumerate(names)]
    panels = [
        Over("waiting\nrequests", np.stack([_at(steps, each, steps.waiting, time) for each, _ in numbers])),
        Over("running\nrequests", np.stack([_at(steps, each, steps.running, time) for each, _ in numbers])),
    ]
    if fleet.engine.kv_blocks is not None:
        used = [_at(steps, each, steps.kv_blocks, time) / _blocks(_engine(fleet, each)) for each, _ in numbers]
        panels.append(Over("KV blocks\nin use", np.stack(used), part=True))
    if served.cached.any():
        hits = [_hits(requests, served, each, time) for each, _ in numbers[: fleet.engines]]
        none = [np.full(len(time), np.nan)] * (len(names) - fleet.engines)
        panels.append(Over("prompts from\nthe cache so far", np.stack(hits + none), part=True))
    return time, names, panels


def timeline(served: Served, steps: StepLog, fleet: Fleet, moves: Sequence[Move] = ()) -> dict[str, Any]:
    """A trace in Chrome's format: a process for each engine with its steps and counters, and one of all requests.

    Experts that move are events beside the step that waits for them, which is longer by so much. The trace ends with
    the step of number `MOST_STEPS`.
    """
    names = engine_names(fleet)
    end = steps.start[MOST_STEPS] if len(steps.start) > MOST_STEPS else np.inf
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": name}}
        for number, name in enumerate([*names, "requests"])
    ]
    for row in step_rows(steps):
        if row["start_s"] >= end:
            break
        at = {"pid": row["engine"], "tid": 0, "ts": row["start_s"] / MICRO}
        events.append(at | {"ph": "X", "name": "step", "dur": row["seconds"] / MICRO, "args": row})
        counts = {name: row[name] for name in ("running", "waiting")}
        events.append(at | {"ph": "C", "name": "requests", "args": counts})
        events.append(at | {"ph": "C", "name": "KV blocks", "args": {"in use": row["kv_blocks"]}})
    for number in range(len(names)):
        events += [event for event in _waiting_for_moves(steps, number, moves) if event["ts"] < end / MICRO]
    for number in np.flatnonzero(served.sent < end).tolist():
        phases = (
            ("waits", served.sent, served.scheduled),
            ("prompt", served.scheduled, served.first_token),
            ("output", served.first_token, served.finish),
        )
        for name, begin, finish in phases:
            at = {"pid": len(names), "tid": 0, "cat": "request", "id": number, "name": name}
            events.append(at | {"ph": "b", "ts": float(begin[number]) / MICRO})
            events.append(at | {"ph": "e", "ts": float(finish[number]) / MICRO})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _waiting_for_moves(steps: StepLog, engine: int, moves: Sequence[Move]) -> Iterator[dict[str, Any]]:
    """Events of the moves of an engine, where its next step begins; of those after its last step none."""
    start = steps.start[steps.engine == engine]
    for move in moves:
        at = int(np.searchsorted(start, move.at_s))
        if at < len(start):
            shown = {"pid": engine, "tid": 1, "ph": "X", "name": "experts move", "args": move._asdict()}
            yield shown | {"ts": float(start[at]) / MICRO, "dur": move.pause_s / MICRO}


def _rows(columns: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Rows of a table, so many at a time as Python's numbers, which take more memory than arrays."""
    for start in range(0, len(next(iter(columns.values()))), ROWS):
        lists = [values[start : start + ROWS].tolist() for values in columns.values()]
        for row in zip(*lists, strict=True):
            yield {name: None if value != value else value for name, value in zip(columns, row, strict=True)}


def _engine(fleet: Fleet, number: int) -> Engine:
    return fleet.engine if number < fleet.engines or fleet.decode is None else fleet.decode.engine


def _blocks(engine: Engine) -> int:
    return (engine.kv_blocks or 1) * engine.ranks


def _at(
    steps: StepLog, engine: int, values: np.ndarray, time: Float[np.ndarray, " time"]
) -> Float[np.ndarray, " time"]:
    """Values of an engine's steps at these moments, nothing where it has no step then."""
    own = steps.engine == engine
    start = steps.start[own]
    if not len(start):
        return np.zeros(len(time))
    last = np.maximum(np.searchsorted(start, time, side="right") - 1, 0)
    busy = (time >= start[last]) & (time < start[last] + steps.seconds[own][last])
    return np.where(busy, values[own][last], 0.0)


def _hits(
    requests: Requests, served: Served, engine: int, time: Float[np.ndarray, " time"]
) -> Float[np.ndarray, " time"]:
    """The part of prompt tokens that an engine's cache had, of all requests up to these moments."""
    rows = np.flatnonzero(served.engine == engine)
    rows = rows[np.argsort(served.scheduled[rows], kind="stable")]
    count = np.searchsorted(served.scheduled[rows], time, side="right")
    cached, read = (np.concatenate([[0], np.cumsum(each[rows])]) for each in (served.cached, requests.prompt))
    return np.where(count > 0, cached[count] / np.maximum(read[count], 1), np.nan)
