"""Serve requests with engines over time, compiled by Numba: several calls run side by side on threads."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.changes import Change, check_changes
from jaxmoe.serving.online.compiled import Clock, run
from jaxmoe.serving.online.compiled_buffering import routing_of
from jaxmoe.serving.online.compiled_rank import (
    COUNT_COLUMNS,
    FINISH,
    FIRST_TOKEN,
    QUEUED,
    SCHEDULED,
    SENT,
    SUM_COLUMNS,
    Queues,
)
from jaxmoe.serving.online.compiled_step import LOGGED, Records
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.kv_blocks import (
    BLOCK_COLUMNS,
    CACHED,
    DECODE_ENGINE,
    DEFERRED,
    ENGINE,
    HOLDERS,
    KNOWN,
    LAST,
    NEWER,
    NONE,
    OLDER,
    OUTPUT,
    OWN,
    PAUSED,
    PREEMPTED,
    PROMPT,
    RANK,
    REQUEST_COLUMNS,
    KvMemory,
)
from jaxmoe.serving.online.packed_table import pack
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served, StepLog
from jaxmoe.serving.online.step_table import FEATURES, StepTable

LOG = 1 << 16  # steps that are logged at a time
LOOK = 128  # steps after which a run is asked whether it goes on


def serve(
    requests: Requests,
    fleet: Fleet,
    table: StepTable,
    decode_table: StepTable | None = None,
    token_times: bool = False,
    steps: bool = False,
    changes: Sequence[Change] = (),
    goes_on: Callable[[Served], bool] | None = None,
    buffering: RequestBuffering | None = None,
) -> Served:
    """Where and when each request is served by engines whose steps take what `table` says, until `changes` of it.

    Steps of a decode pool take `decode_table`, or `table` too. With `buffering`, a step takes the mean over layers of
    what one takes all of whose layers are alike. `goes_on` is asked now and then, with what was served so
    far; where it says no, the rest is not served: moments that have not come are -1. Raises `InputError` for requests
    that can never be served, and changes that cannot be.
    """
    fleet.check(requests)
    if buffering is not None:
        buffering.check(requests, fleet)
    check_changes(changes, fleet.all_engines)
    engines = [fleet.engine] * fleet.engines + ([fleet.decode.engine] * fleet.decode.engines if fleet.decode else [])
    ranks = [engine for engine in engines for _ in range(engine.ranks)]
    first_tables = [table] * fleet.engines + [decode_table or table] * (len(engines) - fleet.engines)
    numbers = {each: at for at, each in enumerate(dict.fromkeys([*first_tables, *(each.table for each in changes)]))}
    clock = _clock(requests, fleet, engines, [numbers[each] for each in first_tables], changes, numbers)
    memory = _memory(requests, fleet, ranks)
    queues = _queues(len(requests), fleet, ranks)
    token_starts = np.concatenate([[0], np.cumsum(requests.output)]) if token_times else np.zeros(0, np.int64)
    log = len(engines) + (LOG if goes_on is None else LOOK) if steps or goes_on else 0
    records = Records(
        token_starts,
        np.zeros(token_starts[-1] if token_times else 0),
        np.zeros((log, 5), np.int64),
        np.zeros((log, 2)),
    )
    most = max(engine.ranks for engine in engines)
    tables, features = pack(list(numbers), most), np.zeros((most, len(FEATURES)))
    routing = routing_of(buffering, queues.seats.shape[1])
    logged, done = [], False
    while not done:
        done = run(clock, queues, memory, tables, routing, records, features)
        count = clock.counts[LOGGED]
        logged.append((records.step_numbers[:count].copy(), records.step_times[:count].copy()))
        clock.counts[LOGGED] = 0
        if goes_on is not None and not done:
            done = not goes_on(_served(queues, memory, records))
    return _served(queues, memory, records, _steps(logged) if steps else None)


def _served(queues: Queues, memory: KvMemory, records: Records, steps: StepLog | None = None) -> Served:
    jobs, moments = memory.jobs, queues.moments
    return Served(
        sent=moments[:, SENT].copy(),
        engine=jobs[:, ENGINE].copy(),
        rank=jobs[:, RANK].copy(),
        decode_engine=jobs[:, DECODE_ENGINE].copy(),
        queued=moments[:, QUEUED].copy(),
        scheduled=moments[:, SCHEDULED].copy(),
        first_token=moments[:, FIRST_TOKEN].copy(),
        finish=moments[:, FINISH].copy(),
        cached=jobs[:, CACHED].copy(),
        preemptions=jobs[:, PREEMPTED].copy(),
        deferrals=jobs[:, DEFERRED].copy(),
        token_starts=records.token_starts,
        token_times=records.token_times,
        steps=steps,
    )


def _steps(logged: Sequence[tuple[Int[np.ndarray, "L 5"], Float[np.ndarray, "L 2"]]]) -> StepLog:
    numbers, times = (np.concatenate(each) for each in zip(*logged, strict=True))
    order = np.lexsort((numbers[:, 0], times[:, 0]))
    engine, tokens, running, waiting, kv_blocks = numbers[order].T
    start, seconds = times[order].T
    return StepLog(engine, start, seconds, tokens, running, waiting, kv_blocks)


def _clock(
    requests: Requests,
    fleet: Fleet,
    engines: Sequence[Engine],
    tables: Sequence[int],
    changes: Sequence[Change],
    numbers: Mapping[StepTable, int],
) -> Clock:
    decode, changes = fleet.decode, sorted(changes, key=lambda each: each.engine)  # times of an engine keep their order
    first_change = np.searchsorted([each.engine for each in changes], np.arange(len(engines) + 1))
    at = np.array([each.at for each in changes], float)
    on_way = len(requests) if decode else 0
    return Clock(
        arrival=np.asarray(requests.arrival, float),
        counts=np.zeros(4, np.int64),
        users=np.array([NONE if fleet.users is None else fleet.users]),
        ends=np.full(len(engines), np.inf),
        quiet=np.zeros(len(engines), bool),
        first_engine=np.array([0, fleet.engines, len(engines)]),
        first_rank=np.concatenate([[0], np.cumsum([engine.ranks for engine in engines])]),
        turn=np.zeros(2, np.int64),
        rank_turn=np.zeros(len(engines), np.int64),
        least_loaded=np.array([each is not None and each.router == "least_loaded" for each in (fleet, decode)], int),
        link=np.array([decode.latency_s, decode.seconds_per_token()] if decode else [0.0, 0.0]),
        transfer_ends=np.zeros(on_way),
        transfer_rows=np.zeros(on_way, np.int64),
        table=np.array(tables),
        pause=np.zeros(len(engines)),
        due=np.append(at, np.inf)[np.where(np.diff(first_change) > 0, first_change[:-1], len(at))],
        next_change=first_change[:-1].copy(),
        first_change=first_change,
        change_at=at,
        change_table=np.array([numbers[each.table] for each in changes], np.int64),
        change_pause=np.array([each.pause for each in changes], float),
    )


def _queues(requests: int, fleet: Fleet, ranks: Sequence[Engine]) -> Queues:
    return Queues(
        waiting=np.zeros(len(ranks), np.int64),
        head=np.zeros(len(ranks), np.int64),
        tail=np.zeros(len(ranks), np.int64),
        seen=np.zeros(len(ranks), np.int64),
        unseen=np.zeros(len(ranks), np.int64),
        running=np.zeros(len(ranks), np.int64),
        leaving=np.zeros(len(ranks), np.int64),
        seats=np.zeros((len(ranks), min(max(rank.seats for rank in ranks), requests)), np.int64),
        sums=np.zeros((len(ranks), SUM_COLUMNS), np.int64),
        rules=np.array(fleet.reserves, float),
        ratio=np.array([rank.reserve.first for rank in ranks]),
        counts=np.zeros((len(ranks), COUNT_COLUMNS), np.int64),
        moments=np.full((requests, 5), -1.0),
    )


def _memory(requests: Requests, fleet: Fleet, ranks: Sequence[Engine]) -> KvMemory:
    cached = np.array([rank.kv_blocks if rank.prefix_cache else 0 for rank in ranks])
    places = np.array([1 << int(2 * size).bit_length() if size else 0 for size in cached])
    ends, firsts = np.cumsum(cached), np.cumsum(cached) - cached
    blocks = np.full((int(cached.sum()), BLOCK_COLUMNS), NONE, np.int32)
    blocks[:, HOLDERS] = 0
    blocks[:, OLDER], blocks[:, NEWER] = np.arange(len(blocks)) - 1, np.arange(len(blocks)) + 1
    blocks[firsts[cached > 0], OLDER] = blocks[ends[cached > 0] - 1, NEWER] = NONE
    first_segment, segments = _segments(requests) if cached.any() else (np.zeros(len(requests) + 1, np.int64),) * 2
    return KvMemory(
        jobs=_jobs(requests),
        pools=np.array([_pool(engine, requests) for engine in fleet.pools], np.int64),
        pool_of=np.repeat(
            [0, 1], [fleet.engines * fleet.engine.ranks, len(ranks) - fleet.engines * fleet.engine.ranks]
        ),
        first_segment=first_segment,
        segments=segments,
        blocks=blocks,
        used=np.zeros(len(ranks), np.int64),
        oldest=np.where(cached > 0, firsts, NONE),
        newest=np.where(cached > 0, ends - 1, NONE),
        first_place=np.cumsum(places) - places,
        places=places,
        keys=np.full(places.sum(), NONE, np.int64),
        lasts=np.full(places.sum(), NONE, np.int64),
        taken=np.zeros(max(cached), np.int64),
    )


def _jobs(requests: Requests) -> Int[np.ndarray, "R columns"]:
    jobs = np.zeros((len(requests), REQUEST_COLUMNS), np.int32)
    jobs[:, PROMPT], jobs[:, OUTPUT], jobs[:, KNOWN] = requests.prompt, requests.output, requests.prompt
    jobs[:, [LAST, OWN, DECODE_ENGINE, PAUSED]] = NONE
    return jobs


def _pool(engine: Engine, requests: Requests) -> tuple[int, ...]:
    total = NONE if engine.kv_blocks is None else engine.kv_blocks
    segment = requests.prefix_tokens // engine.block_tokens if len(requests.prefix_blocks) else 0
    apart = int(engine.batching == "sglang")
    return (
        apart,
        engine.token_budget,
        engine.seats,
        total,
        engine.block_tokens,
        int(engine.prefix_cache),
        segment,
        int(engine.lookahead),
    )


def _segments(requests: Requests) -> tuple[Int[np.ndarray, " starts"], Int[np.ndarray, " S"]]:
    """Prefix blocks numbered anew, so that equal numbers have equal text before them too."""
    starts, names = requests.prefix_starts, requests.prefix_blocks
    if not len(names):
        return np.zeros(len(requests) + 1, np.int64), np.zeros(0, np.int64)
    sizes = np.diff(starts)
    numbers, names = np.empty(len(names), np.int64), np.unique(names, return_inverse=True)[1]
    before, known = np.zeros(len(sizes), np.int64), 0
    for depth in range(int(sizes.max())):
        rows = np.flatnonzero(sizes > depth)
        at = starts[rows] + depth
        _, own = np.unique(before[rows] * len(names) + names[at], return_inverse=True)
        numbers[at] = before[rows] = own + known
        known += int(own.max()) + 1
    return np.asarray(starts, np.int64), numbers
