"""What the gain of a tuned plan hangs on: the same plan where the machine, the charges or the text are others.

A layer is tuned once, with one and with two copies of every expert, as in `gains.csv`. In every variation its plan has
the best exchange there, and so have the plans that ship with jaxmoe, of which the best is chosen anew; both on batches
of the half that was tuned on. They are judged on the other half, or on another topic.

Without copies, plans are timed in the event simulator as well: on the machine of the tuning, where nodes carry out
trees, and where routers then have finite buffers. Exchanges are chosen there in the simulator.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from cases import CASES, DEEPSEEK, MIXTRAL, Case, Run
from finite_buffers import LATENCIES, ROUTERS, Simulated, simulated
from gains import MEASURED, Found, against, halves
from scoring import SEED

from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.traces import Batch, GatingTrace, read_trace, sample_batches
from jaxmoe.tune import PlacementProblem, tune
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.regions import in_regions
from jaxmoe.tune.results import Plan
from jaxmoe.tune.settings import StopSwitch

COLUMNS = ("job", "cell", "layer", "copies", "variation", "strategy", "exchange", *MEASURED)
LAYERS = {CASES[2]: 9, CASES[3]: 8, CASES[4]: 9}
COPIES = (1, 2)
CHOICE_BATCHES = 32  # on which plans and exchanges are chosen in a variation
SIMULATED_BATCHES = 2, 8  # on which exchanges are chosen in the simulator, and plans judged
FREE = ("least_congested", "corner_host_split_tree", "random_host_split_tree", "reduce_scatter", "rings")
FIXED = ("least_congested_token_home", "token_home_split_tree", "token_home_tree", "token_home")
UNICASTS = ("least_congested_unicast", "least_loaded", "fewest_hops", "reduce_scatter", "rings")
TOPICS = {DEEPSEEK: ("intent", "translation"), MIXTRAL: ("math", "coding")}


@dataclass(frozen=True)
class Variation:
    """What is other than where the plan was tuned."""

    name: str
    overrides: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = FREE
    topic: str | None = None


def charged(nanoseconds: int) -> str:
    return f"costs.deciding={{ns_per_choice: {nanoseconds}, B_per_token: 16}}"


def ports(case: Case, links: int) -> tuple[str, ...]:
    """Ports that are so many links wide."""
    return tuple(f"hardware.ports.{way}_GB_per_s={links * float(case.gbps)}" for way in ("injection", "ejection"))


def variations(case: Case) -> list[Variation]:
    """The setting of the tuning, and others."""
    return [
        Variation("as tuned"),
        Variation("hops of 0.2 µs", ("hardware.link.latency_ns=200",)),
        Variation("ports of two links", ports(case, 2)),
        Variation("ports of one link", ports(case, 1)),
        Variation("chunks of 16 KiB", ("hardware.router.chunk_B=16384",)),
        Variation("unicasts alone", exchanges=UNICASTS),
        Variation("tokens return home", exchanges=FIXED),
        *(Variation(f"{each} ns a choice", (charged(each),)) for each in (5, 20, 50)),
        *(Variation(f"topic {topic}", topic=topic) for topic in TOPICS[case.model]),
    ]


@dataclass(frozen=True)
class Simulation:
    """A machine on which plans are timed in the simulator."""

    name: str
    overrides: tuple[str, ...] = ()
    by_nodes: bool = True  # trees are carried out by nodes, not by routers


def simulations(case: Case) -> list[Simulation]:
    """The setting of the tuning, and others; ports are as fast as all links of a node."""
    return [
        Simulation("simulated", by_nodes=False),
        Simulation("simulated, nodes carry out trees", (*LATENCIES, *ports(case, 4))),
        Simulation("simulated, so with finite buffers", (*LATENCIES, *ROUTERS)),
    ]


def rows(case: Case, layer: int, copies: int, run: Run) -> Iterator[dict]:
    """All variations of a layer."""
    tuning, judging = halves(case.inputs(run, layer).trace)
    at_home = replace(placement_problem(case.inputs(run, layer)), trace=tuning)
    if copies == 1:
        solved, result = at_home, tune(at_home, run.settings)
    else:
        solved, result = in_regions(at_home, copies, SEED).tuned(lambda each: tune(each, run.settings), SEED)
    at = {"cell": case.name, "layer": layer, "copies": copies}
    for variation in variations(case):
        inputs = case.inputs(run, layer, overrides=variation.overrides)
        problem = replace(solved, model=inputs.model, exchanges=variation.exchanges)
        if variation.topic is None:
            text = judging
        else:
            path = run.shared / "traces" / case.model / f"{variation.topic}.npz"
            text = read_trace(path).select_layers([layer])
        for row in compared(problem, result.share, text, inputs, copies):
            yield at | {"variation": variation.name} | row
    for simulation in simulations(case) if copies == 1 else ():
        inputs = case.inputs(run, layer, overrides=simulation.overrides)
        problem = replace(solved, model=inputs.model, exchanges=FREE)
        for row in in_simulator(problem, result.share, judging, inputs, simulation.by_nodes):
            yield at | {"variation": simulation.name} | row


def compared(problem: PlacementProblem, plan: Plan, text: GatingTrace, inputs: Inputs, copies: int) -> Iterator[dict]:
    """The plan and the best shipped one, each under its best exchange."""
    tokens, batches = problem.batch_tokens, inputs.scenario.evaluation.batches
    judging = sample_batches(text, tokens, batches, SEED + 1)
    with StopSwitch() as stop:
        tuned = Evaluator(problem, SEED, stop, most_batches=CHOICE_BATCHES).under_best(plan, problem.gathers)
        plain = replace(problem, regions=(), served_by="home")
        rival = problem if copies == 1 else in_regions(plain, copies, SEED).shipped
        shipped = Evaluator(rival, SEED, stop, most_batches=CHOICE_BATCHES).shipped
    assert shipped is not None
    found = {"tuned": Found(problem, tuned.plan, str(tuned.exchange[0]))}
    found |= {"shipped": Found(rival, shipped.plan, str(shipped.exchange[0]))}
    times = {name: plan.judged(judging) for name, plan in found.items()}
    for name, seen in times.items():
        yield {"strategy": name, "exchange": found[name].exchange} | against(seen, times["tuned"])


def in_simulator(
    problem: PlacementProblem, plan: Plan, text: GatingTrace, inputs: Inputs, by_nodes: bool
) -> Iterator[dict]:
    """The plan and the best shipped one, each under its best exchange: under each the model chooses the plan."""

    def seen(found: Found, batches: Batch) -> Simulated:
        layer = describe(inputs, inputs.model.mode, found.exchange)
        return simulated(layer, np.asarray(found.share[0]), batches, by_nodes)

    few, many = SIMULATED_BATCHES
    choosing = sample_batches(problem.trace, problem.batch_tokens, few, SEED)
    judging = sample_batches(text, problem.batch_tokens, many, SEED + 1)
    best = {
        name: min(each, key=lambda found: seen(found, choosing).total.mean())
        for name, each in contenders(problem, plan).items()
    }
    times = {name: seen(found, judging) for name, found in best.items()}
    for name, found in best.items():
        yield {"strategy": name, "exchange": found.exchange} | against(times[name], times["tuned"])


def contenders(problem: PlacementProblem, plan: Plan) -> dict[str, list[Found]]:
    """The plan under every exchange that suits it, and under each the best shipped plan."""
    found = {"tuned": [Found(problem, plan, name) for name in problem.gathers], "shipped": []}
    with StopSwitch() as stop:
        for name in problem.exchanges:
            alone = replace(problem, exchanges=(name,))
            best = Evaluator(alone, SEED, stop, most_batches=CHOICE_BATCHES).shipped
            assert best is not None
            found["shipped"].append(Found(alone, best.plan, str(best.exchange[0])))
    return found


def jobs(run: Run) -> dict[str, Callable[[], list[dict]]]:
    """One for every layer and number of copies."""
    return {
        f"variations_{case.name}_{layer}_{copies}": lambda at=(case, layer, copies): list(rows(*at, run))
        for case, layer in LAYERS.items()
        for copies in COPIES
    }
