"""What each part of tuning gives at equal bytes: the exchange, the copies, the local moves and the descent.

Every layer is tuned on one half of the requests of its trace and judged on 64 batches of the other half. `shipped` is
the best plan that ships with jaxmoe under its best exchange (with copies: the best plan of regions), `tuned` what
tuning ends with. Without copies there are, of the layers of the main table, rows with a part left out:
`without_exchange` chooses among exchanges that know nothing at run time, `without_descent` makes six times the moves,
in about the same seconds, and `without_moves` makes none. Others are plans from `elsewhere`. What deciding takes is not
charged. An interval is twice the standard error of the difference to `tuned`, batch by batch.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import elsewhere
import numpy as np
from cases import CASES, DEEPSEEK, Run
from elsewhere import Searches
from machines import BATCHES, LAYERS, MACHINES, inputs_of
from scoring import MICRO, SEED, Found

from jaxmoe.engine import LayerTime
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.network import build_exchange
from jaxmoe.traces import GatingTrace, TraceError, sample_batches
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
DESCENT = "without_descent"
PARTS = ("shipped_without_exchange", "without_exchange", "without_moves")
WHOLE = CASES[2:5]  # cases of which every part is left out, with 1, 2 and 4 copies
WHOLE_MACHINE = "nmp_8x8_10TFLOPs_25GBps"  # and this machine
MOVES = 6  # times as many moves where there is no descent, which take as long as all of tuning


@dataclass(frozen=True)
class Cell:
    """One layer of a model on a machine, what is left out of tuning it with one copy, and how many copies it may have.

    `others` are further searches with one copy, by strategy.
    """

    name: str
    layer: int
    inputs: Callable[[], Inputs]
    left_out: tuple[str, ...] = (DESCENT,)
    copies: tuple[int, ...] = (1,)
    others: Callable[[PlacementProblem, Inputs], Searches] = lambda *_: {}

    @property
    def whole(self) -> bool:
        """Whether every part is left out, and there are copies."""
        return len(self.copies) > 1


EVERY_PART = {"left_out": (DESCENT, *PARTS), "copies": COPIES}


def cells(run: Run) -> Iterator[Cell]:
    """The layers of the main table, then the machines, those with the smallest batches first."""
    for case in CASES:
        for layer in case.layers(run.layers_step):
            inputs = partial(case.inputs, run, layer)
            every = EVERY_PART if case in WHOLE else {}
            yield Cell(case.name, layer, inputs, others=partial(elsewhere.published, case, run), **every)
    for tokens in BATCHES:
        for machine in MACHINES:
            for model, layer in LAYERS.items():
                every = EVERY_PART if (machine, model, tokens) == (WHOLE_MACHINE, DEEPSEEK, 128) else {"left_out": ()}
                yield Cell(
                    f"{machine}_{model}_{tokens}", layer, partial(inputs_of, machine, model, tokens, run), **every
                )


def halves(trace: GatingTrace) -> tuple[GatingTrace, GatingTrace]:
    """Every other request; of a single long one the first half of the tokens, and the second."""
    try:
        return trace.halves()
    except TraceError:
        middle = trace.num_tokens // 2
        return trace.select_tokens(np.arange(middle)), trace.select_tokens(np.arange(middle, trace.num_tokens))


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
        self.others = cell.others(self.problem, inputs) if copies == 1 else elsewhere.slots(self.problem, copies)

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
            row |= {"served_by": found[name].served_by, "exchange": found[name].exchange}
            row |= against(seen, times["tuned"])
            row |= {"experts_per_node": f"{problem.num_experts / problem.num_nodes:g}"}
            bound = float(lower_bound(problem, problem.served(self.judging))[0])
            yield row | {"bound_us": f"{MICRO * bound:.4f}", "search_s": f"{seconds[name]:.1f}"}

    def searches(self) -> Searches:
        """What finds a plan, by strategy."""
        tuned, problem, settings = self.tuned, self.problem, self.settings
        searches = {"tuned": lambda: tuned(problem, settings), "shipped": lambda: self.shipped(problem)}
        if self.copies > 1:
            return searches | self.others
        known = replace(problem, exchanges=tuple(name for name in problem.exchanges if self.knows(name) != "batch"))
        moves = replace(settings, restarts=0, refine_steps=MOVES * settings.refine_steps)
        left_out = {
            DESCENT: lambda: tuned(problem, moves),
            "shipped_without_exchange": lambda: self.shipped(known),
            "without_exchange": lambda: tuned(known, settings),
            "without_moves": lambda: tuned(problem, replace(settings, refine_steps=0)),
        }
        return searches | {name: left_out[name] for name in self.cell.left_out} | self.others

    def tuned(self, problem: PlacementProblem, settings: TunerSettings) -> Found:
        """What tuning ends with."""
        if self.copies == 1:
            result = tune(problem, settings)
        else:
            problem, result = in_regions(problem, self.copies, SEED).tuned(lambda each: tune(each, settings), SEED)
        return self.found(problem, result.share, result.exchange[0])

    def shipped(self, problem: PlacementProblem) -> Found:
        """The best shipped plan, chosen on batches to tune on."""
        problem = problem if self.copies == 1 else in_regions(problem, self.copies, SEED).shipped
        with StopSwitch() as stop:
            best = Evaluator(problem, SEED, stop).shipped
        if best is None:
            raise ValueError("no shipped plan fits the memory; have fewer copies, or raise the memory capacity")
        return self.found(problem, best.plan, best.exchange[0])

    def found(self, problem: PlacementProblem, share: np.ndarray, exchange: object) -> Found:
        """A plan, with the rule of its copies where it has several."""
        return Found(problem, share, str(exchange), problem.served_by if problem.regions else "")

    def knows(self, name: str) -> str:
        """What an exchange has to know at run time."""
        return "nothing" if name == HYBRIDS else build_exchange(name, self.problem.model.machine.topology).knows


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every layer and number of copies; the machines come last."""
    every = [(cell, copies) for copies in COPIES for cell in cells(run) if copies in cell.copies]
    every.sort(key=lambda job: (job[0].name.startswith(MACHINES) and not job[0].whole, job[1] > 1, not job[0].whole))
    return {f"gains_{cell.name}_{cell.layer}_{copies}": partial(rows, cell, copies, run) for cell, copies in every}


def rows(cell: Cell, copies: int, run: Run) -> list[dict]:
    """All strategies of a layer with so many copies of every expert."""
    return list(Job(cell, copies, run).rows())
