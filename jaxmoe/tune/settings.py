"""How long, how wide and among which exchanges the gradient tuner searches, and what stops it."""

import math
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxmoe.tune.problem import PlacementProblem


HYBRIDS = "rings"  # among exchanges: the complete hybrids of every cut of the machine
SPLIT_TREES = ("corner_host_split_tree", "least_loaded_split_tree", "random_host_split_tree")
DEFAULT_EXCHANGES = ("least_loaded", "reduce_scatter", *SPLIT_TREES, "least_congested", "ring_both_ways", HYBRIDS)
WITHOUT_MESH = {  # default exchanges that need a mesh, and those that take their place elsewhere
    "corner_host_split_tree": "least_loaded_tree",
    "least_loaded_split_tree": "least_loaded_tree",
    "random_host_split_tree": "random_host_tree",
}


@dataclass(frozen=True)
class TunerSettings:
    """Settings of the gradient tuner. Pairs are the first and the last value of what is annealed."""

    restarts: int = 12  # descents of every layer, from different starts; with none, local search alone
    steps: int = 300  # of a descent; rounded up to whole segments
    batches_per_step: int = 4
    learning_rate: float = 0.1  # times the temperature of the moment
    sinkhorn_temperature: tuple[float, float] = (1.0, 0.05)
    support_width: tuple[float, float] = (1.0, 0.03)  # of soft hosts, relative to an expert's typical part
    max_temperature: tuple[float, float] = (0.1, 0.02)  # of the smooth maximum, relative
    budget_spread: float = 0.2  # how far a node's work may be from its even part, relatively
    refine_steps: int = 1000  # moves of every chain of local search
    refine_chains: int = 2  # chains of every layer, from its best descents
    refine_batches: int = 32  # that judge a move
    descent_cuts: int = 3  # cuts of the machine into groups over which descents deal experts, beside single nodes
    hybrid_cuts: int = 2  # cuts whose complete hybrids are improved along their rings
    descent_tokens: int = 1024  # of a larger batch, descent sees so many
    seed: int = 0
    time_limit_s: float | None = None


LARGE = 4e6  # [token, expert, node] entries of one batch; above this, hybrids only start the search
STEP_PRODUCTS = 5e9  # [token, expert, node] entries of all steps of a descent, for each layer
MOVE_PRODUCTS = 2e10  # of all moves, which take less for each entry
FULL_LAYERS = 4  # so many layers have a full search each
FEWER = 5 / 3  # power by which each of more layers has less: 32 share what one has by default
DESCENTS = 12 * 300 * 4  # of a full search, [restart, step, batch]
MOVES = 2 * 1000 * 32  # [chain, move, batch]
ALONE = 6  # times as many moves where there is no descent


def affordable(settings: TunerSettings, problem: "PlacementProblem") -> TunerSettings:
    """The settings for machines and models so large that the full search would take many minutes: fewer restarts,
    batches and steps.

    Of many layers each has fewer too: all 26 of DeepSeek-V2-Lite had plans 0.04 % slower with it in six tenths of the
    command's time, those of Mixtral none that were slower.
    """
    layers, experts = len(problem.frequency), problem.trace.num_experts
    tokens = min(problem.batch_tokens, settings.descent_tokens)
    entries = tokens * experts * problem.num_nodes

    def fitting(wanted: int, budget: float, least: int = 1) -> int:
        return int(np.clip(budget, least, wanted)) if wanted > least else wanted

    part = (FULL_LAYERS / layers) ** FEWER if layers > FULL_LAYERS else math.inf
    descents = DESCENTS * part / settings.steps  # [restart, batch]
    restarts = fitting(settings.restarts, min(STEP_PRODUCTS / settings.steps / entries / 2, descents), 2)
    batches = fitting(settings.batches_per_step, STEP_PRODUCTS / settings.steps / entries / max(restarts, 1), 2)
    batches = int(min(batches, max(descents / max(restarts, 1), 1)))
    batches = max(batches, len(problem.topics))  # a step sees every topic
    steps = fitting(settings.steps, STEP_PRODUCTS / (entries * max(restarts, 1) * batches), 100)
    moved = problem.batch_tokens * experts * problem.num_nodes
    alone = 1 if restarts else ALONE
    all_moves = alone * MOVES * part / settings.refine_chains  # [move, batch]
    of_each = min(STEP_PRODUCTS / 500 / moved, all_moves / max(settings.refine_steps, 1))
    refine_batches = fitting(settings.refine_batches, of_each, 8)
    of_chain = min(alone * MOVE_PRODUCTS / (moved * settings.refine_chains), all_moves)  # [move, batch]
    moves = fitting(settings.refine_steps, of_chain / refine_batches, 100)
    cuts = 0 if moved > LARGE else settings.hybrid_cuts
    return replace(
        settings,
        hybrid_cuts=cuts,
        restarts=restarts,
        batches_per_step=batches,
        steps=steps,
        refine_batches=refine_batches,
        refine_steps=moves,
    )


# When to stop early: time is up, or the user pressed Ctrl-C.


class StopSwitch:
    """Asks long work to end at its next look. Inside the `with` block the first Ctrl-C sets it; a second one raises."""

    def __init__(self, time_limit_s: float | None = None) -> None:
        self._begun, self._limit_s = time.monotonic(), time_limit_s
        self._interrupted = self._short = False
        self._previous: Any = None

    @property
    def reason(self) -> str | None:
        """Why to stop, or `None` to go on."""
        if self._interrupted:
            return "interrupted"
        return "time limit" if self.used > 1 or self._short else None

    @property
    def used(self) -> float:
        """The part of the time limit that has passed, 0 without one."""
        if self._limit_s is None:
            return 0.0
        return (time.monotonic() - self._begun) / self._limit_s if self._limit_s > 0 else math.inf

    def has(self, seconds: float) -> bool:
        """Whether so many seconds are left, for work that looks not in between; if not, time counts as up."""
        if self._limit_s is not None:
            self._short |= time.monotonic() - self._begun + seconds > self._limit_s
        return self.reason is None

    def _interrupt(self, signum, frame) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def __enter__(self) -> "StopSwitch":
        # Only the main thread may handle signals; elsewhere Ctrl-C is not ours to catch.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
