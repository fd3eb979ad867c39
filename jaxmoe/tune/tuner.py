"""The gradient tuner: descend, round, rebalance, improve locally, score again, keep the best.

What is tuned gathers its results. Tensor parallelism, which reduces by a ring, is scored beside it: a layer
for which it is faster gets that.

Every step is scored on the same selection batches, which the descent never sees.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.latency import judge
from jaxmoe.network import whole_ring
from jaxmoe.placement import tensor_parallel
from jaxmoe.placement.rounding import fit_memory, keep_hosts, rebalance
from jaxmoe.relax import geometric
from jaxmoe.traces import Batch, merge_tokens
from jaxmoe.tune import descent, local_search
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.problem import PlacementProblem, objective
from jaxmoe.tune.relaxation import typical_part
from jaxmoe.tune.result import History, Progress, TuneResult
from jaxmoe.tune.settings import TunerSettings
from jaxmoe.tune.stop import StopSwitch

LEAST_PART = 0.1  # of an expert's typical part on a node; less is rounded away
SELECTION_BATCHES = 128
REFINE_COLDNESS = (3e2, 1e4)  # 1 / temperature of local improvement, first and last, relative to a layer's time

REBALANCE_BATCHES = 256

Plans = Float[np.ndarray, "layer candidate expert node"]
Scores = Float[np.ndarray, "layer candidate"]


def _silent(stage: str, done: int, of: int) -> None:
    """Report progress to nobody."""


def tune(problem: PlacementProblem, settings: TunerSettings, progress: Progress = _silent) -> TuneResult:
    """Find a good legal placement of every layer.

    Ctrl-C or the time limit ends the stage under way; what follows is cut to rounding and scoring, and the
    result says why it stopped. The same problem and settings give the same plan, unless stopped.
    """
    with StopSwitch(settings.time_limit_s) as stop:
        return _Run(problem, settings, progress, stop).result()


@dataclass
class _Run:
    """One run of the tuner."""

    problem: PlacementProblem
    settings: TunerSettings
    progress: Progress
    stop: StopSwitch
    seconds: dict[str, float] = field(default_factory=dict)
    seeds: Iterator[int] = field(init=False)
    drawn: Batch = field(init=False)  # the selection batches, token by token
    selection: Batch = field(init=False)  # the same, merged where that pays
    search: local_search.Search = field(init=False)

    def __post_init__(self) -> None:
        # One stream of seeds: every draw of batches has its own, all of them given by the settings' seed.
        source = np.random.default_rng([self.settings.seed, 1])
        self.seeds = iter(lambda: int(source.integers(2**62)), None)
        self.drawn = self.problem.draw(SELECTION_BATCHES, next(self.seeds))
        self.selection = merge_tokens(self.drawn, self.problem.trace.num_experts)
        self.search = local_search.Search(
            self.problem.model,
            jnp.asarray(self.problem.frequency, jnp.float32),
            jnp.asarray(self.problem.room, jnp.float32),
            jnp.asarray(self.problem.p95_weight, jnp.float32),
        )

    def draw(self, batches: int) -> Batch:
        return merge_tokens(self.problem.draw(batches, next(self.seeds)), self.problem.trace.num_experts)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begun

    def result(self) -> TuneResult:
        with self.timed("descent"):
            relaxed, relaxed_seconds, descended = self.descend()
        with self.timed("rounding"):
            plans = self.round(relaxed)
            scores = self.score(plans)
            stages = {"relaxed": relaxed_seconds, "rounded": scores.min(axis=1)}
            plans, scores = _best(plans, scores, self.settings.refine_chains)
        with self.timed("rebalance"):
            plans, scores = self.rebalance(plans, scores)
            stages["rebalanced"] = scores.min(axis=1)
        with self.timed("refinement"):
            plans, scores, refined = self.refine(plans, scores)
            plans, scores = self.rebalance(*_best(plans, scores, 1))
            stages["refined"] = scores[:, 0]
        with self.timed("tensor_parallel"):
            share, stages["final"] = self.or_tensor_parallel(plans[:, 0], scores[:, 0])
        with self.timed("bound"):
            bound = lower_bound(self.problem, self.selection)
        return TuneResult(
            share=share,
            gathered=plans[:, 0],
            stages=stages,
            bound=bound,
            descent=descended,
            refinement=refined,
            seed=self.settings.seed,
            seconds=self.seconds,
            stopped=self.stop.reason,
        )

    def descend(self) -> tuple[Plans, Float[np.ndarray, " layer"], History]:
        """Relaxed plans of all restarts, the best relaxed time, and its history."""
        settings, history = self.settings, History()
        ends = {
            "temperature": settings.sinkhorn_temperature,
            "width": settings.support_width,
            "max_temperature": settings.max_temperature,
        }
        land = descent.landscape(self.problem, settings.budget_spread, settings.learning_rate)
        state = descent.start(self.problem, settings.restarts, settings.seed)
        for first in range(0, settings.steps, descent.SEGMENT):
            batches = descent.segment_batches(self.problem, settings.batches_per_step, next(self.seeds))
            schedule = descent.schedule(first, settings.steps, ends)
            state, seconds = descent.descend(land, state, batches, schedule)
            # Few batches are noisy: the mean over a segment is not.
            history.add(first + descent.SEGMENT, np.asarray(seconds.mean(axis=0).min(axis=1)))
            self.progress("descent", min(first + descent.SEGMENT, settings.steps), settings.steps)
            if self.stop.reason:
                break
        shares = descent.relaxed_shares(land, state.plans, schedule.temperature[-1])
        return np.asarray(shares, float), history.seconds[-1], history

    def round(self, relaxed: Plans) -> Plans:
        """Keep the hosts that count, and divide each expert over them as descent did."""
        least = LEAST_PART * typical_part(self.problem.frequency, relaxed.shape[-1])
        plans = keep_hosts(relaxed, np.broadcast_to(least[:, None], relaxed.shape[:-1]))
        for layer, candidate in np.argwhere(~self.fits(plans)):
            plans[layer, candidate] = fit_memory(relaxed[layer, candidate], self.problem.room)
        return plans

    def fits(self, plans: Plans) -> Bool[np.ndarray, "layer candidate"]:
        """Whether no node holds more than it has room for."""
        return (plans.sum(axis=2) <= self.problem.room * (1 + 1e-5)).all(axis=-1)

    def score(self, plans: Plans) -> Scores:
        """Exact objective on the selection batches, s."""
        shares = jnp.asarray(np.moveaxis(plans, 1, 0), jnp.float32)
        return np.stack(
            [local_search.score_all(self.search, share, self.selection) for share in shares], axis=1, dtype=float
        )

    def rebalance(self, plans: Plans, scores: Scores) -> tuple[Plans, Scores]:
        """Divide experts over their hosts anew, where that is better; not when there is no time left for it."""
        if self.stop.reason:
            return plans, scores
        model, batches = self.problem.model, self.problem.draw(REBALANCE_BATCHES, next(self.seeds))
        seconds_per_token = float(model.flops_per_token_expert) / np.asarray(model.platform.die.flops, float)
        balanced = np.empty_like(plans)
        for layer in range(len(plans)):
            chosen = np.asarray(jax.tree.map(lambda leaf: leaf[layer], batches).choices(plans.shape[2]))  # noqa: B023
            counts = chosen.sum(axis=1)
            for candidate in range(plans.shape[1]):
                support = plans[layer, candidate] > 0
                balanced[layer, candidate] = rebalance(support, counts, seconds_per_token, self.problem.room)
            self.progress("rebalance", layer + 1, len(plans))
        return _better(plans, scores, balanced, self.score(balanced))

    def or_tensor_parallel(
        self, plans: Float[np.ndarray, "layer expert node"], scores: Float[np.ndarray, " layer"]
    ) -> tuple[Float[np.ndarray, "layer expert node"], Float[np.ndarray, " layer"]]:
        """Tensor parallelism, round a ring both ways, in the layers where that fits and is faster."""
        spread = tensor_parallel(*plans.shape)
        if not self.fits(spread[:, None]).all():
            return plans, scores
        ring = whole_ring(self.problem.model.platform.topology, both_ways=True)
        judged = judge(self.problem.model, jnp.asarray(spread, jnp.float32), self.drawn, ring)
        seconds = np.asarray(objective(judged.total, self.problem.p95_weight), float)
        return np.where((seconds < scores)[:, None, None], spread, plans), np.minimum(seconds, scores)

    def refine(self, plans: Plans, scores: Scores) -> tuple[Plans, Scores, History]:
        """Chains of exact moves from every plan; each ends with the better of its first and its last plan."""
        steps, history, key = self.settings.refine_steps, History(), jr.key(self.settings.seed)
        shares = jnp.asarray(plans, jnp.float32)
        for first in range(0, steps, local_search.SEGMENT):
            if self.stop.reason:
                break
            progress = np.minimum((first + np.arange(local_search.SEGMENT)) / steps, 1)
            coldness = jnp.asarray(geometric(*REFINE_COLDNESS, progress), jnp.float32)
            batches = self.draw(self.settings.refine_batches)
            shares, costs = local_search.improve(self.search, shares, batches, coldness, jr.fold_in(key, first))
            history.add(first + local_search.SEGMENT, np.asarray(costs.min(axis=1)))
            self.progress("refinement", min(first + local_search.SEGMENT, steps), steps)
        ended = np.asarray(shares, float)
        return *_better(plans, scores, ended, self.score(ended)), history


def _better(plans: Plans, scores: Scores, others: Plans, other_scores: Scores) -> tuple[Plans, Scores]:
    """The better of two plans, candidate by candidate."""
    better = other_scores < scores
    return np.where(better[..., None, None], others, plans), np.where(better, other_scores, scores)


def _best(
    plans: Plans, scores: Scores, count: int
) -> tuple[Float[np.ndarray, "layer best expert node"], Float[np.ndarray, "layer best"]]:
    """The best candidates of every layer, best first."""
    order = np.argsort(scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(plans, order[..., None, None], axis=1), np.take_along_axis(scores, order, axis=1)
