"""What each part of tuning gives at equal bytes: the exchange, the copies, the local moves and the descent.

Every layer is tuned on one half of the requests of its trace and judged on 64 batches of the other half. `shipped` is
the best plan that ships with jaxmoe under its best exchange (with copies: the best plan of regions), `tuned` what
tuning ends with. Without copies there are rows with a part left out: `without_exchange` chooses among exchanges that
know nothing at run time, `without_descent` makes six times the moves, in about the same seconds, and
`without_moves` makes none. What deciding takes is not charged. An interval is twice the standard error of the
difference to `tuned`, batch by batch.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import CASES, DEEPSEEK, Run
from machines import BATCHES, LAYERS, MACHINES, inputs_of
from scoring import MICRO, SEED

from jaxmoe.engine import LayerTime, evaluate
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.network import build_exchange
from jaxmoe.traces import Batch, GatingTrace, TraceError, sample_batches
from jaxmoe.tune import PlacementProblem, TunerSettings, tune
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.regions import in_regions
from jaxmoe.tune.settings import HYBRIDS, StopSwitch

MEASURED = ("total_us", "compute_us", "communication_us", "over_tuned", "interval")
COLUMNS = (
    "job",
    "cell",
    "layer",
    "copies",
    "strategy",
    "served_by",
    "exchange",
    *MEASURED,
    "experts_per_node",
    "bound_us",
    "search_s",
)
COPIES = (1, 2, 4)
PARTS = tuple(f"{case.name}" for case in CASES[2:5])  # cases of which every part is left out, with 1, 2 and 4 copies
WHOLE = "nmp_8x8_10TFLOPs_25GBps"  # and this machine
MOVES = 6  # times as many moves where there is no descent, which take as long as all of tuning


@dataclass(frozen=True)
class Cell:
    """One layer of a model on a machine."""

    name: str
    layer: int
    inputs: Callable[[], Inputs]
    parts: bool  # whether every part is left out, or the descent alone, and whether there are copies


def cells(run: Run) -> Iterator[Cell]:
    """The layers of the main table, then the machines, those with the smallest batches first."""
    for case in CASES:
        for layer in case.layers(run.layers_step):
            yield Cell(case.name, layer, lambda case=case, layer=layer: case.inputs(run, layer), case.name in PARTS)
    for tokens in BATCHES:
        for machine in MACHINES:
            for model, layer in LAYERS.items():
                yield Cell(
                    f"{machine}_{model}_{tokens}",
                    layer,
                    lambda at=(machine, model, tokens): inputs_of(*at, run),
                    (machine, model, tokens) == (WHOLE, DEEPSEEK, 128),
                )


def halves(trace: GatingTrace) -> tuple[GatingTrace, GatingTrace]:
    """Every other request; of a single long one the first half of the tokens, and the second."""
    try:
        return trace.halves()
    except TraceError:
        middle = trace.num_tokens // 2
        return trace.select_tokens(np.arange(middle)), trace.select_tokens(np.arange(middle, trace.num_tokens))


class Found(NamedTuple):
    """A plan of one layer, what it solves, and its exchange."""

    problem: PlacementProblem
    share: np.ndarray  # [1, expert, node]
    exchange: str

    def judged(self, batches: Batch) -> LayerTime:
        """Times on batches whose choices name experts."""
        problem, share = self.problem, jnp.asarray(self.share, jnp.float32)
        serving = None if problem.serving is None else jax.tree.map(lambda leaf: leaf[None], problem.serving)
        exchange = build_exchange(self.exchange, problem.model.machine.topology)
        return evaluate(problem.model, share, problem.served(batches), exchange, serving=serving).as_numpy()


def against(seen: LayerTime, tuned: LayerTime) -> dict[str, str]:
    """Mean times of a plan, its ratio to the tuned one, and twice the standard error of that, batch by batch."""
    base, away = tuned.total[0], seen.total[0] - tuned.total[0]
    parts = {"total_us": seen.total, "compute_us": seen.compute, "communication_us": seen.communication}
    row = {part: f"{MICRO * float(of_batch.mean()):.4f}" for part, of_batch in parts.items()}
    row |= {"over_tuned": f"{1 + away.mean() / base.mean():.5f}"}
    return row | {"interval": f"{2 * away.std(ddof=1) / len(away) ** 0.5 / base.mean():.5f}"}


class Job:
    """One layer with so many copies of every expert."""

    def __init__(self, cell: Cell, copies: int, run: Run) -> None:
        inputs = cell.inputs()
        tuning, judging = halves(inputs.trace)
        tokens = min(inputs.scenario.workload.batch_tokens, tuning.num_tokens, judging.num_tokens)
        self.problem = replace(placement_problem(inputs), trace=tuning, batch_tokens=tokens)
        self.judging = sample_batches(judging, tokens, inputs.scenario.evaluation.batches, SEED + 1)
        self.settings, self.cell, self.copies = run.settings, cell, copies

    def rows(self) -> Iterator[dict]:
        """A row for every strategy."""
        found, seconds = {}, {}
        for name, search in self.searches().items():
            begun = time.perf_counter()
            found[name] = search()
            seconds[name] = time.perf_counter() - begun
        times = {name: plan.judged(self.judging) for name, plan in found.items()}
        for name, seen in times.items():
            problem = found[name].problem
            row = {"cell": self.cell.name, "layer": self.cell.layer, "copies": self.copies, "strategy": name}
            row |= {"served_by": problem.served_by if problem.regions else "", "exchange": found[name].exchange}
            row |= against(seen, times["tuned"])
            row |= {"experts_per_node": f"{problem.num_experts / problem.num_nodes:g}"}
            bound = float(lower_bound(problem, problem.served(self.judging))[0])
            yield row | {"bound_us": f"{MICRO * bound:.4f}", "search_s": f"{seconds[name]:.1f}"}

    def searches(self) -> dict[str, Callable[[], Found]]:
        """What finds a plan, by strategy."""
        ignorant = tuple(name for name in self.problem.exchanges if self.knows(name) != "batch")
        known = replace(self.problem, exchanges=ignorant)
        searches = {
            "tuned": lambda: self.tuned(self.problem, self.settings),
            "shipped": lambda: self.shipped(self.problem),
        }
        if self.copies == 1:
            moves = replace(self.settings, restarts=0, refine_steps=MOVES * self.settings.refine_steps)
            searches["without_descent"] = lambda: self.tuned(self.problem, moves)
        if self.cell.parts and self.copies == 1:
            searches["shipped_without_exchange"] = lambda: self.shipped(known)
            searches["without_exchange"] = lambda: self.tuned(known, self.settings)
            searches["without_moves"] = lambda: self.tuned(self.problem, replace(self.settings, refine_steps=0))
        return searches

    def tuned(self, problem: PlacementProblem, settings: TunerSettings) -> Found:
        """What tuning ends with."""
        if self.copies == 1:
            result = tune(problem, settings)
        else:
            problem, result = in_regions(problem, self.copies, SEED).tuned(lambda each: tune(each, settings), SEED)
        return Found(problem, result.share, str(result.exchange[0]))

    def shipped(self, problem: PlacementProblem) -> Found:
        """The best shipped plan, chosen on batches to tune on."""
        problem = problem if self.copies == 1 else in_regions(problem, self.copies, SEED).shipped
        with StopSwitch() as stop:
            best = Evaluator(problem, SEED, stop).shipped
        if best is None:
            raise ValueError("no shipped plan fits the memory; have fewer copies, or raise the memory capacity")
        return Found(problem, best.plan, str(best.exchange[0]))

    def knows(self, name: str) -> str:
        """What an exchange has to know at run time."""
        return "nothing" if name == HYBRIDS else build_exchange(name, self.problem.model.machine.topology).knows


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every layer and number of copies; the machines come last."""
    every = [(cell, copies) for copies in COPIES for cell in cells(run) if copies == 1 or cell.parts]
    every.sort(key=lambda job: (job[0].name.startswith(MACHINES) and not job[0].parts, job[1] > 1, not job[0].parts))
    return {
        f"gains_{cell.name}_{cell.layer}_{copies}": lambda at=(cell, copies): list(Job(*at, run).rows())
        for cell, copies in every
    }
