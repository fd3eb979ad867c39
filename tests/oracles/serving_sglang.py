"""One data-parallel rank of SGLang in plain Python: prompts before decoding, and memory kept for outputs to come.

Follows `get_next_batch_to_run` of its scheduler, `PrefillAdder` and `retract_decode`, with chunked prefill, no mixed
chunks, and requests first come first served. Left out: chunks that end with whole blocks.
"""

from jaxmoe.serving.online.engine import Engine, Reserve
from oracles.serving_rank import Job, Rank


class SglangRank(Rank):
    """A rank whose `batch` is what SGLang counts as running: with those done since it last began to decode."""

    def __init__(self, engine: Engine, reserve: Reserve) -> None:
        super().__init__(engine)
        self.reserve, self.size = reserve, engine.block_tokens
        self.batch, self.full, self.reads = 0, False, False
        self.start, self.decays = reserve.first, 0

    def ratio(self) -> float:
        """Part of the further tokens of those that decode for which memory is kept."""
        if self.decays == 0:
            return self.start
        return max(self.start - self.decays * self.reserve.decay, self.reserve.least)

    def idle(self) -> None:
        """Take the first ratio again."""
        self.start, self.decays = self.reserve.first, 0

    def look(self, now: float) -> None:
        """See who came, and let go of who leaves; after a step of prompts SGLang counts those no more."""
        if self.reads and self.leaving:
            self.batch -= len(self.leaving)
            self.full = False
        super().look(now)

    def schedule(self) -> list[Job]:
        """Read a chunk that was begun, and prompts of those that wait; or let all decode."""
        if not self.running and not self.waiting:
            self.reads = False
            return []
        self.budget = self.engine.token_budget
        for job in self.running:
            job.given = 0
        self.go_on([job for job in self._own() if not job.decodes()])
        if not self._own():
            self.batch = 0
        if self.budget < self.engine.token_budget or not self._own():
            self.full = False
        admitted = [] if self.full else self._admit()
        self.reads = self.budget < self.engine.token_budget
        if not self.reads:
            self._decode()
        return admitted

    def unseat(self, job: Job) -> None:
        """Take seat and blocks from a request; of its text the cache keeps what is of its prompt alone."""
        for block in job.blocks[job.prompt // self.size :]:
            self.blocks.cached.pop(block.name, None)
            block.name = None
        super().unseat(job)

    def _own(self) -> list[Job]:
        return [job for job in self.running if job not in self.leaving]

    def _decode(self) -> None:
        lost = False
        while not self._fits(self._own()):
            order = sorted(self._own(), key=lambda job: (job.known - job.prompt, -job.prompt), reverse=True)
            self.unseat(order[-1])
            self.waiting.append(order[-1])
            lost = True
        left = self._own()
        if len(left) < self.batch:
            self.batch, self.full = len(left), False
        if lost:
            done = sum(job.known - job.prompt for job in left) + self.reserve.steps_ahead * len(left)
            self.start, self.decays = min(1.0, done / (sum(job.output for job in left) + 1)), 0
        elif left:
            self.decays += 1
        self.budget = len(self.running)
        self.go_on(left)

    def _fits(self, jobs: list[Job]) -> bool:
        """Whether all have room for one further token."""
        if self.engine.kv_blocks is None:
            return True
        new = sum(job.paused is None and job.computed + 1 > len(job.blocks) * self.size for job in jobs)
        return new <= self.engine.kv_blocks - self.blocks.used

    def _further(self, job: Job) -> int:
        return min(job.output - (job.known - job.prompt), self.reserve.most)

    def _admit(self) -> list[Job]:
        admitted: list[Job] = []
        decoding = sum(self._further(job) for job in self._own() if job.decodes())
        reading = sum(
            self.size + (self._further(job) if job.given == job.left() else 0)
            for job in self._own()
            if not job.decodes()
        )
        while self.seen and self.budget > 0:
            job = self.waiting[0]
            if max(self.batch, len(self.running)) >= self.engine.seats:
                self.full = True
                break
            found = self.blocks.found(job)
            if self.engine.kv_blocks is not None:
                held = self.blocks.used + sum(block.holders == 0 for block in found)
                needed = job.known - len(found) * self.size + self._further(job) + self.size
                kept = reading + self.ratio() * decoding
                if needed >= (self.engine.kv_blocks - held) * self.size - kept:
                    self.full = True
                    break
            computed = max(len(found) * self.size, job.brought)
            tokens = min(job.known - computed, self.budget)
            reading += self.size + (self._further(job) if tokens == job.known - computed else 0)
            if job.known > job.prompt and job.known - computed == 1:
                tokens = 0  # it decodes in a step to come, or in this one if nobody has a prompt to read
            assert self.blocks.grow(job, computed + tokens, found)
            self.seat(job, computed, tokens)
            self.batch += 1
            admitted.append(job)
        return admitted
