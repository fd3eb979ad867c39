"""What all optimisers have in common: fresh batches, exact scores on batches no search sees, and the last word.

What is searched gathers its results. Tensor parallelism, which reduces by a ring, is scored beside it: a layer
for which it is faster gets that.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.network import build_exchange
from jaxmoe.placement import tensor_parallel
from jaxmoe.placement.rounding import fit_memory, rebalance
from jaxmoe.traces import Batch, merge_tokens
from jaxmoe.tune import local_search
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.result import History, Progress, TuneResult, silent
from jaxmoe.tune.stop import StopSwitch

SELECTION_BATCHES = 128
REBALANCE_BATCHES = 256

Plan = Float[np.ndarray, "layer expert node"]
Plans = Float[np.ndarray, "layer candidate expert node"]
Scores = Float[np.ndarray, "layer candidate"]


@dataclass
class Referee:
    """One run of an optimiser. The same problem and seed give the same batches, in the order they are drawn."""

    problem: PlacementProblem
    seed: int
    stop: StopSwitch
    progress: Progress = silent
    seconds: dict[str, float] = field(default_factory=dict)
    seeds: Iterator[int] = field(init=False)
    selection: Batch = field(init=False)  # the batches that have the last word
    search: local_search.Search = field(init=False)

    def __post_init__(self) -> None:
        # One stream of seeds: every draw of batches has its own, all of them given by one seed.
        source = np.random.default_rng([self.seed, 1])
        self.seeds = iter(lambda: int(source.integers(2**62)), None)
        self.selection = self.draw(SELECTION_BATCHES)
        self.search = local_search.search_of(self.problem)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the wall time of the block to that of the stage."""
        begun = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begun

    def draw(self, batches: int) -> Batch:
        """Fresh batches to search with, leaves [layer, batch, ...], merged where that pays."""
        return merge_tokens(self.problem.draw(batches, next(self.seeds)), self.problem.trace.num_experts)

    def fits(self, plans: Plans) -> Bool[np.ndarray, "layer candidate"]:
        """Whether no node holds more than it has room for."""
        return (plans.sum(axis=2) <= self.problem.room * (1 + 1e-5)).all(axis=-1)

    def score(self, plans: Plans) -> Scores:
        """Exact objective on the selection batches, s."""
        shares = [jnp.asarray(share) for share in np.moveaxis(plans, 1, 0).astype(np.float32)]
        return np.stack(
            [local_search.score_all(self.search, share, self.selection) for share in shares], axis=1, dtype=float
        )

    def legal(self, plans: Plans) -> Plans:
        """The same plans, but those that do not fit moved to the nearest ones that do."""
        made = np.array(plans, float)
        for layer, candidate in np.argwhere(~self.fits(made)):
            made[layer, candidate] = fit_memory(made[layer, candidate], self.problem.room)
        return made

    def rebalance(self, plans: Plans, scores: Scores) -> tuple[Plans, Scores]:
        """Divide experts over their hosts anew, where that is better; not when there is no time left for it."""
        if self.stop.reason:
            return plans, scores
        drawn = self.problem.draw(REBALANCE_BATCHES, next(self.seeds))
        model, batches = self.problem.model, jax.tree.map(np.asarray, drawn)
        seconds_per_token = float(model.costs.flops_per_token_expert) / np.asarray(model.machine.die.flops, float)
        balanced = np.empty_like(plans)
        for layer in range(len(plans)):
            chosen = np.asarray(jax.tree.map(lambda leaf: leaf[layer], batches).choices(plans.shape[2]))  # noqa: B023
            counts = chosen.sum(axis=1)
            for candidate in range(plans.shape[1]):
                support = plans[layer, candidate] > 0
                balanced[layer, candidate] = rebalance(support, counts, seconds_per_token, self.problem.room)
            self.progress("rebalance", layer + 1, len(plans))
        return better(plans, scores, balanced, self.score(balanced))

    def conclude(self, plan: Plan, stages: Mapping[str, np.ndarray], history: Mapping[str, History]) -> TuneResult:
        """The result of a search that ended with `plan`. `stages` are those before `searched`."""
        with self.timed("scoring"):
            searched = self.score(plan[:, None])[:, 0]
        with self.timed("tensor_parallel"):
            share, final = self._or_tensor_parallel(plan, searched)
        with self.timed("bound"):
            bound = lower_bound(self.problem, self.selection)
        return TuneResult(
            share=share,
            gathered=plan,
            stages={**stages, "searched": searched, "final": final},
            bound=bound,
            history=dict(history),
            seed=self.seed,
            seconds=self.seconds,
            stopped=self.stop.reason,
        )

    def _or_tensor_parallel(
        self, plan: Plan, scores: Float[np.ndarray, " layer"]
    ) -> tuple[Plan, Float[np.ndarray, " layer"]]:
        """Tensor parallelism, round a ring both ways, in the layers where that fits and is faster."""
        spread = tensor_parallel(*plan.shape)
        if not self.fits(spread[:, None]).all():
            return plan, scores
        ring = build_exchange("ring_both_ways", self.problem.model.machine.topology)
        shares = jnp.asarray(spread, jnp.float32)
        seconds = np.asarray(local_search.score_all(self.search, shares, self.selection, ring), float)
        return np.where((seconds < scores)[:, None, None], spread, plan), np.minimum(seconds, scores)


def better(plans: Plans, scores: Scores, others: Plans, other_scores: Scores) -> tuple[Plans, Scores]:
    """The better of two plans, candidate by candidate."""
    chosen = other_scores < scores
    return np.where(chosen[..., None, None], others, plans), np.where(chosen, other_scores, scores)


def best(
    plans: Plans, scores: Scores, count: int
) -> tuple[Float[np.ndarray, "layer best expert node"], Float[np.ndarray, "layer best"]]:
    """The best candidates of every layer, best first."""
    order = np.argsort(scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(plans, order[..., None, None], axis=1), np.take_along_axis(scores, order, axis=1)
