"""One data-parallel rank of an engine in plain Python: its queue, the requests it runs, and its KV blocks.

Follows `Scheduler.schedule` and `KVCacheManager` of vLLM's V1 engine. Left out: speculative tokens, encoders, LoRA,
priorities, and limits on a part of a long prompt. SGLang's ranks are in `serving_sglang`.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from jaxmoe.serving.online.engine import Engine


@dataclass(eq=False)
class Block:
    """KV of `block_tokens` tokens: how many requests hold it, and the text it ends, once it is full."""

    holders: int = 0
    name: Hashable = None


@dataclass(eq=False)
class Job:
    """A request on its way: `known` tokens of prompt and output, `computed` of them with KV in its `blocks`."""

    row: int
    prompt: int
    output: int
    prefix: tuple[int, ...]  # names of blocks of `prefix_tokens` tokens
    prefix_tokens: int
    known: int = 0
    computed: int = 0
    brought: int = 0  # tokens whose KV came from the engine that read the prompt
    blocks: list[Block] = field(default_factory=list)
    named: bool = True  # all of its full blocks are in the cache by their names
    given: int = 0  # tokens of the step under way
    preemptions: int = 0
    queued: float = -1.0  # s, when an engine first knew of it
    paused: int | None = None  # the layer at whose experts it waits
    timer: int = 0  # waits that it has left
    passes: int = 0  # tokens since it last earned one
    deferrals: int = 0

    def left(self) -> int:
        return self.known - self.computed

    def decodes(self) -> bool:
        """Whether it needs one more token only to have its next, as all do once their prompt is read."""
        return self.known > self.prompt and self.left() == 1

    def name(self, index: int, block_tokens: int) -> Hashable:
        """Text up to the end of a block: named by the prefix's blocks as far as they go in the prompt, then its own."""
        end = (index + 1) * block_tokens
        if end <= min(self.prompt, len(self.prefix) * self.prefix_tokens):
            return self.prefix[: -(-end // self.prefix_tokens)], end
        return "own", self.row, end


class Blocks:
    """KV blocks of a rank. One that nobody holds is free; it keeps its text until it is taken anew, the oldest first.

    A block gets its name as soon as a step fills it, so that requests admitted later in the same step find it. Where
    the cache has that text already, in another block, the request names none of its further blocks: vLLM would keep
    both. A request frees its last block first.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.free = OrderedDict.fromkeys(Block() for _ in range(engine.kv_blocks or 0))
        self.cached: dict[Hashable, Block] = {}
        self.used = 0

    def found(self, job: Job) -> list[Block]:
        """Blocks of the cache that hold how a request begins; one token at least is left to compute."""
        found: list[Block] = []
        if self.engine.prefix_cache:
            for index in range((job.known - 1) // self.engine.block_tokens):
                block = self.cached.get(job.name(index, self.engine.block_tokens))
                if block is None:
                    break
                found.append(block)
        return found

    def grow(self, job: Job, tokens: int, found: list[Block]) -> bool:
        """Hold `found` and blocks for so many tokens of a request, or change nothing where blocks do not suffice."""
        new = self.engine.blocks_of(tokens) - len(job.blocks) - len(found)
        idle = [block for block in found if block.holders == 0]
        if self.engine.kv_blocks is not None and new + len(idle) > len(self.free):
            return False
        for block in idle:
            del self.free[block]
        for block in [*found, *(self._take() for _ in range(new))]:
            block.holders += 1
            job.blocks.append(block)
        self.used += new + len(idle)
        if self.engine.prefix_cache:
            for index in range(len(found), tokens // self.engine.block_tokens):
                self._name(job, index)
        return True

    def _take(self) -> Block:
        if self.engine.kv_blocks is None:
            return Block()
        block, _ = self.free.popitem(last=False)
        if block.name is not None:
            del self.cached[block.name]
            block.name = None
        return block

    def _name(self, job: Job, index: int) -> None:
        block, name = job.blocks[index], job.name(index, self.engine.block_tokens)
        if block.name is None and job.named:
            job.named = name not in self.cached
            if job.named:
                block.name, self.cached[name] = name, block

    def release(self, job: Job) -> None:
        """Let go of all blocks of a request."""
        for block in reversed(job.blocks):
            block.holders -= 1
            if block.holders == 0:
                self.used -= 1
                if self.engine.kv_blocks is not None:
                    self.free[block] = None
        job.blocks, job.named = [], True


class Rank:
    """Requests that wait, first come first, and those that run, in the order in which they were admitted."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.blocks = engine, Blocks(engine)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.seen = 0  # of those that wait: the rank knew of them when it last looked
        # Of those that run: their seats are free when it looks again, and the blocks of those that are done.
        self.leaving: dict[Job, bool] = {}

    def load(self) -> int:
        """Number that balancers compare."""
        return 4 * len(self.waiting) + len(self.running) - len(self.leaving)

    def look(self, now: float) -> None:
        """See who came, and let go of who leaves."""
        for job in [*self.waiting][self.seen :]:
            if job.queued < 0:
                job.queued = now
        for job, done in self.leaving.items():
            self.running.remove(job)
            if done:
                self.blocks.release(job)
        self.leaving, self.seen = {}, len(self.waiting)

    def idle(self) -> None:
        """Have nothing to do until somebody comes."""

    def schedule(self) -> list[Job]:
        """Give out tokens of a step: first to requests that run, then to those that wait. Returns those admitted.

        Where blocks run out, the request admitted last loses its own and waits, as the first, to be computed anew;
        nobody is admitted in that step.
        """
        self.budget = self.engine.token_budget
        for job in self.running:
            job.given = 0
        before = len(self.waiting)
        self.go_on([job for job in self.running if job not in self.leaving])
        return [] if len(self.waiting) > before else self._admit()

    def go_on(self, jobs: list[Job]) -> None:
        """Tokens for requests that run."""
        for job in jobs:
            if job.paused is not None:  # the token of its pass was counted where it began
                job.given = 1
                continue
            tokens = min(job.left(), self.budget)
            if tokens == 0 or job not in self.running:
                continue
            while not self.blocks.grow(job, job.computed + tokens, []):
                last = next(each for each in reversed(self.running) if each not in self.leaving)
                self.unseat(last)
                self.waiting.appendleft(last)
                self.seen += 1
                if last is job:
                    return
            job.given = tokens
            self.budget -= tokens

    def unseat(self, job: Job) -> None:
        """Take seat and blocks from a request."""
        self.running.remove(job)
        self.blocks.release(job)
        job.computed = job.brought = job.given = 0
        job.paused = None
        job.preemptions += 1

    def _admit(self) -> list[Job]:
        admitted: list[Job] = []
        while self.seen and self.budget > 0 and len(self.running) < self.engine.seats:
            job = self.waiting[0]
            found = self.blocks.found(job)
            computed = max(len(found) * self.engine.block_tokens, job.brought)
            tokens = min(job.known - computed, self.budget)
            if not self.blocks.grow(job, computed + tokens, found):
                break
            self.seat(job, computed, tokens)
            admitted.append(job)
        return admitted

    def seat(self, job: Job, computed: int, tokens: int) -> None:
        """Let the first that waits run, with tokens of the step."""
        job.computed, job.given = computed, tokens
        self.budget -= tokens
        self.running.append(self.waiting.popleft())
        self.seen -= 1

    def features(self, given: list[Job]) -> Float[np.ndarray, " F"]:
        """What those that are `given` tokens have in the step, without what is over all ranks."""
        read = [job for job in given if not job.decodes()]
        contexts = [job.computed for job in given if job.decodes()]
        tokens = sum(job.given for job in read)
        before = sum(job.given * job.computed for job in read)
        return np.array(
            [
                tokens + len(contexts),
                len(contexts) + sum(job.given == job.left() for job in read),
                tokens,
                before / tokens if tokens else 0,
                len(contexts),
                sum(contexts) / len(contexts) if contexts else 0,
                max(contexts, default=0),
                0,
                0,
                tokens + len(contexts),
                0,
            ],
            float,
        )
