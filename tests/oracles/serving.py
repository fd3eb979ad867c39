"""The simulator of engines over time in plain Python: what `serve` has to do, one event after another.

Of one moment, steps end first, then KV transfers, then requests come, then engines that are idle begin a step. Engines
are taken in their order, transfers in that of their requests.
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.changes import Change, check_changes
from jaxmoe.serving.online.engine import Engine, Fleet, Reserve, Router
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served, StepLog
from jaxmoe.serving.online.step_table import FEATURES, StepTable
from oracles.serving_buffering import earn, pass_layers
from oracles.serving_rank import Job, Rank
from oracles.serving_sglang import SglangRank

ALL_TOKENS, MOST_TOKENS = FEATURES.index("all_tokens"), FEATURES.index("most_tokens")


def serve_plainly(
    requests: Requests,
    fleet: Fleet,
    table: StepTable,
    decode_table: StepTable | None = None,
    changes: Sequence[Change] = (),
    buffering: RequestBuffering | None = None,
) -> Served:
    """All that `serve` tells, token times and steps included."""
    fleet.check(requests)
    check_changes(changes, fleet.all_engines)
    if buffering is not None:
        buffering.check(requests, fleet)
    return _Simulation(requests, fleet, table, decode_table or table, changes, buffering).run()


class _Running:
    """An engine of `ranks` in lockstep and the end of its step under way."""

    def __init__(
        self, engine: Engine, reserve: Reserve, table: StepTable, number: int, changes: Sequence[Change]
    ) -> None:
        sglang = engine.batching == "sglang"
        self.ranks = [SglangRank(engine, reserve) if sglang else Rank(engine) for _ in range(engine.ranks)]
        self.changes = [change for change in changes if change.engine == number]
        self.turn = _Turn("least_loaded", len(self.ranks))
        self.table, self.number, self.end = table, number, math.inf
        self.lookahead = engine.lookahead

    def look(self, now: float) -> None:
        for rank in self.ranks:
            rank.look(now)

    def load(self) -> int:
        return sum(rank.load() for rank in self.ranks)

    def change(self, now: float) -> float:
        """Take the tables whose time has come. Returns the pause, in seconds."""
        pause = 0.0
        while self.changes and self.changes[0].at <= now:
            change = self.changes.pop(0)
            self.table, pause = change.table, pause + change.pause
        return pause


class _Turn:
    """Chooses one of several: the next in turn, or among the least loaded the next in turn."""

    def __init__(self, router: Router, size: int) -> None:
        self.router, self.size, self.next = router, size, 0

    def choose(self, several: Sequence[_Running] | Sequence[Rank]) -> int:
        order = [(self.next + step) % self.size for step in range(self.size)]
        chosen = order[0] if self.router == "round_robin" else min(order, key=lambda each: several[each].load())
        self.next = (chosen + 1) % self.size
        return chosen


class _Simulation:
    def __init__(
        self,
        requests: Requests,
        fleet: Fleet,
        table: StepTable,
        decode_table: StepTable,
        changes: Sequence[Change],
        buffering: RequestBuffering | None,
    ) -> None:
        self.requests, self.fleet, self.buffering = requests, fleet, buffering
        reserve, *others = fleet.reserves
        self.first = [_Running(fleet.engine, reserve, table, number, changes) for number in range(fleet.engines)]
        self.first_turn, decode = _Turn(fleet.router, fleet.engines), fleet.decode
        self.later: list[_Running] = []
        if decode:
            numbers = range(fleet.engines, fleet.all_engines)
            self.later = [_Running(decode.engine, others[0], decode_table, number, changes) for number in numbers]
            self.later_turn = _Turn(decode.router, decode.engines)
        self.transfers: list[tuple[float, int, Job, Rank]] = []
        self.next, self.in_flight = 0, 0
        count = len(requests)
        (self.sent, self.queued), self.scheduled = np.zeros((2, count)), np.full(count, -1.0)
        self.engine, self.rank, self.decode_engine = np.full((3, count), -1)
        self.cached, self.preemptions, self.deferrals = np.zeros((3, count), int)
        self.tokens: list[list[float]] = [[] for _ in range(count)]
        self.steps: list[tuple[float, ...]] = []

    def run(self) -> Served:
        """Go from event to event until no more comes."""
        engines = [*self.first, *self.later]
        while True:
            ends = [engine.end for engine in engines] + [moment for moment, *_ in self.transfers]
            now = min([*ends, self._next_sending()])
            if now == math.inf:
                return self._served()
            for engine in engines:
                if engine.end == now:
                    self._end_step(engine, now)
            for transfer in sorted(self.transfers, key=lambda each: each[:2]):
                if transfer[0] == now:
                    self._end_transfer(transfer)
            while self._next_sending() <= now:
                self._send(now)
            for engine in engines:
                if engine.end == math.inf:
                    self._begin_step(engine, now)

    def _next_sending(self) -> float:
        full = self.fleet.users is not None and self.in_flight >= self.fleet.users
        return math.inf if full or self.next == len(self.requests) else float(self.requests.arrival[self.next])

    def _send(self, now: float) -> None:
        row, requests = self.next, self.requests
        first, end = requests.prefix_starts[row : row + 2] if len(requests.prefix_starts) else (0, 0)
        names = requests.prefix_blocks[first:end]
        prompt, output = int(requests.prompt[row]), int(requests.output[row])
        job = Job(row, prompt, output, tuple(map(int, names)), requests.prefix_tokens, known=prompt)
        self.sent[row] = now
        self.next, self.in_flight = row + 1, self.in_flight + 1
        self.engine[row] = self.first_turn.choose(self.first)
        self.rank[row] = self._queue(job, self.first[self.engine[row]])

    def _queue(self, job: Job, engine: _Running) -> int:
        rank = engine.turn.choose(engine.ranks)
        engine.ranks[rank].waiting.append(job)
        return rank

    def _begin_step(self, engine: _Running, now: float) -> None:
        """Run the batch of those whom the ranks knew of when the last step began, if any, else of all who are there."""
        if not engine.lookahead or not self._schedule(engine, now):
            engine.look(now)
            self._schedule(engine, now)
        self._run_step(engine, now)
        if engine.lookahead:
            engine.look(now)

    def _schedule(self, engine: _Running, now: float) -> bool:
        """Make a batch. Returns whether there is any."""
        for rank in engine.ranks:
            for job in rank.schedule():
                if self.scheduled[job.row] < 0:
                    self.scheduled[job.row], self.cached[job.row] = now, job.computed
        return any(job.given for rank in engine.ranks for job in rank.running)

    def _run_step(self, engine: _Running, now: float) -> None:
        tokens = sum(job.given for rank in engine.ranks for job in rank.running)
        if tokens:
            pause = engine.change(now)
            seconds = pause + self._seconds(engine)
            engine.end = now + seconds
            tokens = sum(job.given for rank in engine.ranks for job in rank.running if job.paused is None)
            counts = [(len(rank.running), len(rank.waiting), rank.blocks.used) for rank in engine.ranks]
            self.steps.append((engine.number, now, seconds, tokens, *map(sum, zip(*counts, strict=True))))
            return
        for rank in engine.ranks:
            rank.idle()

    def _seconds(self, engine: _Running) -> float:
        if self.buffering is not None:
            (rank,) = engine.ranks
            return float(engine.table.seconds(pass_layers(rank, self.buffering)[:, None]).mean())
        given = [[job for job in rank.running if job.given] for rank in engine.ranks]
        features = np.array([rank.features(own) for rank, own in zip(engine.ranks, given, strict=True)])
        tokens = features[:, FEATURES.index("tokens")]
        features[:, ALL_TOKENS], features[:, MOST_TOKENS] = tokens.sum(), tokens.max()
        return float(engine.table.seconds(features))

    def _end_step(self, engine: _Running, now: float) -> None:
        engine.end = math.inf
        for rank in engine.ranks:
            for job in [*rank.running]:
                if job.paused is not None:
                    job.given = 0
                job.computed += job.given
                if job.given and job.left() == 0:
                    job.known += 1
                    if self.buffering is not None:
                        earn(job, self.buffering)
                    self.tokens[job.row].append(now)
                    self._after_token(job, rank, engine, now)
                job.given = 0

    def _after_token(self, job: Job, rank: Rank, engine: _Running, now: float) -> None:
        decode = self.fleet.decode
        if len(self.tokens[job.row]) == job.output:
            self.queued[job.row], self.preemptions[job.row] = job.queued, job.preemptions
            self.deferrals[job.row] = job.deferrals
            self.in_flight -= 1
        elif decode and engine.number < self.fleet.engines:
            seconds = decode.latency_s + job.prompt * decode.seconds_per_token()
            self.transfers.append((now + seconds, job.row, job, rank))
        else:
            return
        rank.leaving[job] = len(self.tokens[job.row]) == job.output

    def _end_transfer(self, transfer: tuple[float, int, Job, Rank]) -> None:
        _, row, job, source = transfer
        self.transfers.remove(transfer)
        source.blocks.release(job)
        job.computed, job.brought = 0, job.prompt
        engine = self.later[self.later_turn.choose(self.later)]
        self.decode_engine[row] = engine.number
        self._queue(job, engine)

    def _served(self) -> Served:
        steps = np.array(sorted(self.steps, key=lambda step: (step[1], step[0])), float).reshape(-1, 7)
        engine, tokens, running, waiting, kv_blocks = steps[:, [0, 3, 4, 5, 6]].T.astype(int)
        return Served(
            sent=self.sent,
            engine=self.engine,
            rank=self.rank,
            decode_engine=self.decode_engine,
            queued=self.queued,
            scheduled=self.scheduled,
            first_token=np.array([times[0] for times in self.tokens]),
            finish=np.array([times[-1] for times in self.tokens]),
            cached=self.cached,
            preemptions=self.preemptions,
            deferrals=self.deferrals,
            token_starts=np.concatenate([[0], np.cumsum([len(times) for times in self.tokens])]),
            token_times=np.concatenate(self.tokens) if self.tokens else np.zeros(0),
            steps=StepLog(engine, steps[:, 1], steps[:, 2], tokens, running, waiting, kv_blocks),
        )
