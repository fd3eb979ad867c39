"""Parts that all optimisers share: fresh batches, exact scores on batches that no search sees, and the final choice.

The final choice compares the plans that a search found, under every exchange that may be chosen, with every strategy
that ships with jaxmoe. No plan that is returned is slower than any of these strategies. One of them is returned unless
a plan that was found is faster by more than the choice of batches explains.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.engine import at_once
from jaxmoe.engine.layer import MANY_NODES
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.placement.regions import shipped_regions
from jaxmoe.placement.rounding import fit_memory, fit_slots, is_even, rebalance
from jaxmoe.placement.strategies import Shipped, shipped_replicas, shipped_strategies
from jaxmoe.threads import side_by_side
from jaxmoe.traces import Batch, expert_counts
from jaxmoe.tune import local_search
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.problem import BRIM, PlacementProblem
from jaxmoe.tune.results import (
    Groups,
    History,
    Plan,
    Plans,
    PlanSoFar,
    Progress,
    Ranked,
    Scores,
    TuneResult,
    best,
    best_so_far,
    better,
    least,
    silent,
    where_surely_faster,
)
from jaxmoe.tune.settings import FULL_LAYERS, StopSwitch

SELECTION_ENTRIES = 2**21  # entries [batch, token, node] of the batches of the final choice
SELECTION_BATCHES = (8, 256)  # but at least and at most so many
MANY_LAYERS_BATCHES = 64  # where there are many layers, each has fewer, but so many
LOOK_PART, FAR = 4, 1.05  # of these batches a look takes a fourth; what it finds so much slower is not looked at again
HYBRIDS_TRIED = 2  # complete hybrids that are tried under any exchange on machines with many nodes, the fastest
GLANCE_BATCHES = 2  # batches that rank them
REBALANCE_BATCHES = 128  # over which work is divided anew, or as many as the linear programme may have
LEAST_BATCHES = 4  # over fewer, work is not divided anew
REBALANCE_ENTRIES = 2**16  # of the linear programme; larger ones take minutes


@dataclass
class Evaluator:
    """One run of an optimiser. The same problem and seed give the same batches, in the order they are drawn."""

    problem: PlacementProblem
    seed: int
    stop: StopSwitch
    progress: Progress = silent
    most_batches: int | None = None  # of the final choice; by default as many as are affordable
    seconds: dict[str, float] = field(default_factory=dict)
    seeds: Iterator[int] = field(init=False)
    selection: Batch = field(init=False)  # the batches of the final choice
    search: local_search.Search = field(init=False)

    def __post_init__(self) -> None:
        # One stream of seeds: every draw of batches has its own, all of them given by one seed.
        source = np.random.default_rng([self.seed, 1])
        self.seeds = iter(lambda: int(source.integers(2**62)), None)
        affordable = SELECTION_ENTRIES // (self.problem.batch_tokens * self.problem.num_nodes)
        least_count, most = SELECTION_BATCHES
        shared = max(FULL_LAYERS * most // len(self.problem.frequency), MANY_LAYERS_BATCHES)
        count = int(np.clip(affordable, least_count, min(most, shared)))
        count = count if self.most_batches is None else min(count, self.most_batches)
        self._at_once = min(at_once(self.problem.num_nodes), count)
        self.selection = self.problem.draw(count // self._at_once * self._at_once, next(self.seeds))
        self._merged: dict[tuple, Batch] = {}
        self._known: dict[tuple[bytes, str], list[np.ndarray]] = {}  # times of plans by exchange, part by part
        self._merging = Lock()
        self.search = local_search.search_of(self.problem)
        self._best_so_far = best_so_far.get()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the wall time of the block to that of the stage."""
        begun = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begun

    def draw(self, batches: int, exchange: AbstractExchange | None = None) -> Batch:
        """Fresh batches to search with, leaves [layer, batch, ...], merged where that pays under the exchange."""
        return self.problem.merged(self.problem.draw(batches, next(self.seeds)), exchange)

    def fits(self, plans: Plans) -> Bool[np.ndarray, "layer candidate"]:
        """Whether no node holds more than it has room for."""
        held = plans if self.problem.model.mode == "sharded" else plans > 0
        return (held.sum(axis=2) <= self.problem.room * BRIM).all(axis=-1)

    def score(self, plans: Plans, exchange: AbstractExchange | None = None, batches: int | None = None) -> Scores:
        """Exact objective of plans on the selection batches, or about so many of them, s.

        By default they run under the model's own exchange.
        """
        parts, shares = self._parts(batches), np.moveaxis(plans, 1, 0).astype(np.float32)
        seconds = [[self._part_seconds(share, exchange, part) for part in range(parts)] for share in shares]
        scores = self.problem.aim.of(np.stack([np.concatenate(of_one, axis=1) for of_one in seconds], axis=1))
        self.offer(plans, scores, exchange)
        return scores

    def offer(self, plans: Plans, scores: Scores, exchange: AbstractExchange | None = None) -> None:
        """Tell the fastest legal plan of every layer to those who may have to end the search before it does."""
        used = self.problem.model.exchange if exchange is None else exchange
        name = next((name for name, each in self.problem.gathers.items() if each is used), None)
        fits = self.fits(plans)
        if self._best_so_far is not None and name is not None and fits.any(axis=1).all():
            plan, seconds = best(plans, np.where(fits, scores, np.inf), 1)
            names = np.full(len(plan), name, object)
            self._best_so_far.offer(PlanSoFar(self.problem, plan[:, 0], seconds[:, 0], names))

    def _parts(self, batches: int | None) -> int:
        """In how many parts so many selection batches are evaluated; all by default."""
        count = self.selection.weight.shape[1]
        return -(-min(count if batches is None else batches, count) // self._at_once)

    def _part_seconds(
        self, share: Plan, exchange: AbstractExchange | None, part: int
    ) -> Float[np.ndarray, "layer batch"]:
        drawn = self._selected(part * self._at_once, exchange)
        return np.asarray(local_search.seconds_of_all(self.search, jnp.asarray(share), drawn, exchange), float)

    def _selected(self, first: int, exchange: AbstractExchange | None) -> Batch:
        """Some selection batches from the first on, merged where that pays under the exchange."""
        key = first, self.problem.model.merging(exchange, self._at_once)
        with self._merging:
            if key not in self._merged:
                self._merged[key] = self.problem.merged(self.selection.some(first, self._at_once), exchange)
            return self._merged[key]

    @property
    def look(self) -> int:
        """How many batches are enough to tell what is far slower."""
        return -(-self.selection.weight.shape[1] // LOOK_PART)

    def under_best(self, plan: Plan, exchanges: Mapping[str, AbstractExchange], batches: int | None = None) -> Ranked:
        """The plan with the best of these exchanges in every layer, on all selection batches or about so many.

        Exchanges that a look at some batches finds far slower are not tried on the others.
        """
        near = self.near(plan, exchanges, self.look if batches is None else min(batches, self.look))
        ranked = least(self._under(plan, near, batches))
        if self._best_so_far is not None and self.fits(plan[:, None]).all():
            self._best_so_far.offer(PlanSoFar(self.problem, plan, ranked.seconds, ranked.exchange))
        return ranked

    def near(self, plan: Plan, exchanges: Mapping[str, AbstractExchange], batches: int) -> dict[str, AbstractExchange]:
        """Those of the exchanges under which the plan is not far slower than under the best of them, in any layer."""
        looks = self._under(plan, exchanges, batches)
        most = least(looks).seconds * FAR
        return {
            name: exchanges[name] for name, look in zip(exchanges, looks, strict=True) if (look.seconds <= most).any()
        }

    def _under(self, plan: Plan, exchanges: Mapping[str, AbstractExchange], batches: int | None) -> list[Ranked]:
        """The plan under each of these exchanges, on all selection batches or about so many."""
        share = plan.astype(np.float32)
        alike = share.tobytes()  # strategies often agree

        def under(name: str) -> Ranked:
            known = self._known.setdefault((alike, name), [])
            for part in range(len(known), self._parts(batches)):
                known.append(self._part_seconds(share, exchanges[name], part))
            seconds = np.concatenate(known[: self._parts(batches)], axis=1)
            return Ranked(plan, self.problem.aim.of(seconds), np.full(len(plan), name, object), seconds)

        return list(side_by_side(under, exchanges))

    @cached_property
    def looks(self) -> dict[str, Ranked]:
        """Every strategy that ships with jaxmoe and fits, by name, under its best exchange in a look at every layer."""
        return {name: self.under_best(plan, options, self.look) for name, (plan, options) in self._options.items()}

    @cached_property
    def strategies(self) -> dict[str, Ranked]:
        """Those of `looks` that are not far slower than the fastest of any layer, on all selection batches."""
        most = least(self.looks.values()).seconds * FAR if self.looks else np.zeros(0)
        near = [name for name, look in self.looks.items() if (look.seconds <= most).any()]
        return {name: self.under_best(*self._options[name]) for name in near}

    @cached_property
    def _options(self) -> dict[str, tuple[Plan, dict[str, AbstractExchange]]]:
        """The plans of strategies that fit, and the exchanges under which each is tried.

        All hybrids run under their own rings; on machines with many nodes only the best few under any exchange.
        """
        gathers = self.problem.gathers
        options = {each.name: (each.share.astype(float), self._exchanges(each)) for each in self._able}
        hybrids = [name for name, (_, named) in options.items() if any(of.groups > 1 for of in named.values())]
        if self.problem.num_nodes > MANY_NODES:  # to save time
            seen = {name: self.under_best(options[name][0], gathers, GLANCE_BATCHES).seconds.mean() for name in hybrids}
            for name in sorted(hybrids, key=seen.__getitem__)[HYBRIDS_TRIED:]:
                plan, named = options[name]
                options[name] = plan, {key: of for key, of in named.items() if of.groups > 1}
        return options

    @property
    def hybrids(self) -> list[Shipped]:
        """The shipped strategies that are complete hybrids and fit: those by pace, if any."""
        able = [each for each in self._able if each.rings is not None]
        return [each for each in able if each.by_pace] or able

    @property
    def shipped(self) -> Ranked | None:
        """The fastest strategy that ships in every layer; `None` where none fits."""
        return least(self.strategies.values()) if self.strategies else None

    @cached_property
    def _able(self) -> list[Shipped]:
        """Shipped strategies that fit."""
        return [each for each in self._strategies if self.fits(each.share[:, None]).all()]

    @property
    def _strategies(self) -> list[Shipped]:
        problem, topology = self.problem, self.problem.model.machine.topology
        if problem.model.mode == "replicated":
            return shipped_replicas(problem.frequency, problem.room, tuple(problem.gathers), self.seed)
        if problem.regions:
            return shipped_regions(problem.regions, problem.expert_frequency, topology, tuple(problem.gathers))
        pace = problem.pace if problem.uneven else None
        strategies = shipped_strategies(problem.frequency, topology, tuple(problem.gathers), self.seed, pace)
        return [each for each in strategies if self._exchanges(each)]

    def _exchanges(self, strategy: Shipped) -> dict[str, AbstractExchange]:
        """Exchanges of a strategy that the problem lets it choose, by name."""
        problem = self.problem
        made = {name: problem.gathers[name] for name in strategy.exchanges if name in problem.gathers}
        for name in strategy.exchanges:
            if name in problem.named:
                made.setdefault(name, problem.named[name])
            elif name in problem.hybrids:
                made.setdefault(name, build_exchange(name, problem.model.machine.topology))
        return made

    def legal(self, plans: Plans) -> Plans:
        """Returns the plans, with every one that exceeds a node's memory replaced by a near one that fits."""
        made, fit = np.array(plans, float), fit_memory if self.problem.model.mode == "sharded" else fit_slots
        for layer, candidate in np.argwhere(~self.fits(made)):
            made[layer, candidate] = fit(made[layer, candidate], self.problem.room)
        return made

    def rebalance(
        self, plans: Plans, scores: Scores, exchange: AbstractExchange | None = None, group: Groups | None = None
    ) -> tuple[Plans, Scores]:
        """Divides experts over their hosts anew, and keeps the better plans; changes nothing once `stop` is set.

        Nor where what copies serve is decided at run time: their work is not known before.
        With `group` experts are divided over groups of nodes, which hold them by their pace.
        """
        if self.stop.reason or self.problem.serving is not None:
            return plans, scores
        drawn = self.problem.draw(REBALANCE_BATCHES, next(self.seeds))
        counts = expert_counts(drawn, plans.shape[2])
        room, pace, model = self.problem.room, self.problem.pace, self.problem.model
        flops = np.asarray(model.machine.die.flops, float)
        seconds = float(model.costs.flops_per_token_expert) / flops.sum() / pace
        groups = np.broadcast_to(np.arange(plans.shape[3]), (*plans.shape[:2], plans.shape[3]))
        groups = groups if group is None else group
        balanced = np.array(plans)

        def divided(at: tuple[int, int]) -> None:
            member = groups[at] == np.arange(groups[at].max() + 1)[:, None]
            spread = member * pace / (member @ pace)[:, None]
            plan, some = plans[at] @ member.T, counts[at[0], : self._affordable(plans[at])]
            slowest = (spread * seconds).max(axis=1)
            if len(some) >= LEAST_BATCHES and not is_even(plan, some, slowest) and not self.stop.reason:
                held = np.divide(room, spread, out=np.full(spread.shape, np.inf), where=member).min(axis=1)
                balanced[at] = rebalance(plan > 0, some, slowest, self._divisible(held)) @ spread

        every = list(itertools.product(range(plans.shape[0]), range(plans.shape[1])))
        for done, _ in enumerate(side_by_side(divided, every), start=1):
            self.progress("rebalance", done, len(every))
        return better(plans, scores, balanced, np.where(self.fits(balanced), self.score(balanced, exchange), np.inf))

    def _affordable(self, plan: Float[np.ndarray, "expert node"]) -> int:
        """How many batches a linear programme of the plan's hosts may have."""
        return REBALANCE_ENTRIES // max(int((plan > 0).sum()), plan.shape[1])

    def _divisible(self, room: np.ndarray) -> np.ndarray:
        """Room as it limits shares: replicas take a whole expert's room, however little they serve."""
        return room if self.problem.model.mode == "sharded" else np.full_like(room, np.inf)

    def conclude(
        self,
        plan: Plan,
        stages: Mapping[str, np.ndarray],
        history: Mapping[str, History],
        others: Iterable[Ranked] = (),
    ) -> TuneResult:
        """The result of a search that ended with `plan`, and maybe others. `stages` are those before `searched`."""
        with self.timed("scoring"):
            found = self.under_best(plan, self.problem.gathers)
        with self.timed("strategies"):
            plans, known = [found, *others], self.shipped
            if known is not None:
                plans = [known, *(where_surely_faster(each, known, self.problem.aim) for each in plans)]
            final = least(plans)
        with self.timed("bound"):
            bound = lower_bound(self.problem, self.selection)
        return TuneResult(
            share=final.plan,
            exchange=tuple(final.exchange.tolist()),
            gathered=plan,
            gathered_exchange=tuple(found.exchange.tolist()),
            stages={**stages, "searched": found.seconds, "final": final.seconds},
            bound=bound,
            history=dict(history),
            seed=self.seed,
            seconds=self.seconds,
            stopped=self.stop.reason,
            shipped=known,
        )
