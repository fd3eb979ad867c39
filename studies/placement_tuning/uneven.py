"""Gains where dies and links are not alike: ten uneven machines, and the even one of which most are made.

Rows are those of `gains`, of one layer. `shipped` may deal experts by how fast nodes are, by compute and memory, and
divide them likewise inside groups; `shipped_even` deals as if nodes were alike.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import gains
from cases import DEEPSEEK, MIXTRAL, Run
from elsewhere import Searches
from machines import LAYERS, inputs_of
from scoring import SEED, Found

from jaxmoe.experiment.inputs import Inputs
from jaxmoe.placement.strategies import shipped_strategies
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.results import least
from jaxmoe.tune.settings import StopSwitch

COLUMNS = gains.COLUMNS
LEFT_OUT = ("without_descent", "without_moves")
TOKENS = 128
MESH = "nmp_4x8_10TFLOPs_25GBps"  # dies of 10 TFLOP/s, links of 25 GB/s; node [x, y] has the number 8 x + y
CLUSTERS = "dgx_b200_4x8"  # four servers of eight GPUs, 2250 TFLOP/s and 8000 GB/s each
ROWS, COLUMNS_OF_DIES = range(4), range(8)
EVERY = [(x, y) for x in ROWS for y in COLUMNS_OF_DIES]
Node = tuple[int, int]


@dataclass(frozen=True)
class Uneven:
    """A machine that ships, with what is other on it, as `--set` has it."""

    name: str
    overrides: tuple[str, ...] = ()
    machine: str = MESH
    models: tuple[str, ...] = (DEEPSEEK, MIXTRAL)


def dies(nodes: Iterable[Node], key: str, value: float) -> str:
    """Nodes [x, y] of the mesh whose dies have another number."""
    return f"hardware.dies=[{{nodes: {[8 * x + y for x, y in nodes]}, {key}: {value:g}}}]"


def rates(nodes: Iterable[Node], tflops: float) -> str:
    """Nodes [x, y] of the mesh that compute at another rate."""
    return dies(nodes, "compute_TFLOPs_per_s", tflops)


def links(ends: Iterable[tuple[Node, Node]], gbps: float) -> str:
    """Links of the mesh, both ways, of another bandwidth."""
    each = (f"{{from: {list(a)}, to: {list(b)}, bandwidth_GB_per_s: {gbps:g}, one_way: false}}" for a, b in ends)
    return f"hardware.links=[{', '.join(each)}]"


MACHINES = (
    Uneven("even"),
    Uneven("a column of dies at half the rate", (rates([(x, 3) for x in ROWS], 5),)),
    Uneven("one die at a quarter", (rates([(1, 3)], 2.5),)),
    Uneven("two dies at a hundredth", (rates([(1, 2), (2, 5)], 0.1),)),
    Uneven("two generations of dies in a checkerboard", (rates([(x, y) for x, y in EVERY if (x + y) % 2], 5),)),
    Uneven("dies on the border twice as fast", (rates([(x, y) for x, y in EVERY if x in (0, 3) or y in (0, 7)], 20),)),
    Uneven("links of a row at a third", ("hardware.links=[{row: 1, bandwidth_GB_per_s: 8.333333}]",)),
    Uneven("one link at a twentieth", (links([((1, 3), (1, 4))], 1.25),)),
    Uneven(
        "half of the dies at half the rate, links to them at a third",
        (rates([(x, y) for x, y in EVERY if y > 3], 5), links([((x, 3), (x, 4)) for x in ROWS], 25 / 3)),
    ),
    Uneven(
        "half of the dies with twice the memory",  # the others hold little more than an even part of all experts
        ("hardware.die.memory_capacity_GB=1", dies([(x, y) for x, y in EVERY if y > 3], "memory_capacity_GB", 2)),
        models=(DEEPSEEK,),
    ),
    Uneven(
        "one server of an earlier generation",
        (
            "hardware.dies=[{nodes: [0, 1, 2, 3, 4, 5, 6, 7], compute_TFLOPs_per_s: 990, "
            "memory_bandwidth_GB_per_s: 3350, memory_capacity_GB: 80}]",
        ),
        CLUSTERS,
    ),
)


def shipped_even(problem: PlacementProblem) -> Found:
    """The best shipped plan that deals experts as if nodes were alike, chosen on batches to tune on."""
    topology, gathers = problem.model.machine.topology, tuple(problem.gathers)
    even = [each.name for each in shipped_strategies(problem.frequency, topology, gathers, SEED)]
    with StopSwitch() as stop:
        looks = Evaluator(problem, SEED, stop).looks
    best = least([looks[name] for name in even if name in looks])
    return Found(problem, best.plan, str(best.exchange[0]))


def others(problem: PlacementProblem, _: Inputs) -> Searches:
    return {"shipped_even": lambda: shipped_even(problem)}


def cells(run: Run) -> Iterator[gains.Cell]:
    """All machines with each model; DeepSeek-V2-Lite first."""
    for model in (DEEPSEEK, MIXTRAL):
        for each in MACHINES:
            if model in each.models:
                inputs = partial(inputs_of, each.machine, model, TOKENS, run, each.overrides)
                yield gains.Cell(f"{model}, {each.name}", LAYERS[model], inputs, LEFT_OUT, others=others)


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every machine and model."""
    return {
        f"uneven_{cell.name.replace(', ', '_')}".replace(" ", "_"): partial(gains.rows, cell, 1, run)
        for cell in cells(run)
    }
