"""moentwine's balancers on drifting workloads: Fig. 12, 15, 16, 17, and slots tuned by gradient.

python studies/moentwine/balancing.py [balancing_loads ...] [--shared FOLDER]   all tables beside this file, or some
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from balancing_cases import (
    EVERY_TEN,
    RACK,
    ROOT,
    SCENARIOS,
    WAFER,
    WAFERS,
    WARM,
    Method,
    Place,
    figures_of,
    layout_of,
    loads_of,
    moe_of,
    peak_of_devices,
    run,
    shares_of,
    slots_in_order,
)
from balancing_moves import adding, groups, sharing, skew, tokens
from balancing_stream import simulator, stream

from jaxmoe.experiment.table import add_shared, make_tables, study_options, tables_of
from jaxmoe.placement import EMPTY
from jaxmoe.traces import read_any
from jaxmoe.traces.trace import GatingTrace, load_counts

HERE = Path(__file__).parent
ITERATIONS = 160
CASES = (("mixed", "decode"), ("mixed", "prefill"))  # scenario and phase
Row = dict[str, object]


def loads(shared: Path) -> Iterator[Row]:
    """Fig. 12: loads of 8 devices over their mean, by scenario; of presets and of recorded traces."""
    for model in ("qwen3-235b-a22b", "deepseek-v3"):
        for scenario, shares in zip(SCENARIOS, shares_of(model), strict=True):
            yield _device_loads(f"preset {model}", scenario, shares)
    files = [*(shared / "deepseek-v2-lite").glob("*.npz"), *(shared / "gpt-oss-20b").glob("[!l]*.npz")]
    for path in sorted([*files, shared / "qwen3-235b-a22b" / "load_single_prompt.npz"]):
        content = read_any(path).content
        counts = load_counts(content).counts if isinstance(content, GatingTrace) else content.counts
        yield _device_loads(f"recorded {path.parent.name}", path.stem, counts.sum(axis=0).astype(float))


def _device_loads(source: str, scenario: str, shares: np.ndarray) -> Row:
    peak = peak_of_devices(shares)
    return {"source": source, "scenario": scenario, "mean_peak": peak.mean(), "largest_peak": peak.max()}


METHODS = {
    "never": (Method("none", invasive=True),),
    "every_ten": tuple(Method(name, invasive=True, **EVERY_TEN) for name in ("eplb", "greedy", "topology_aware")),
    "always": (Method("topology_aware", invasive=False),),
    "oracle": (Method("topology_aware", invasive=False, oracle=True),),
}


def balance(shared: Path) -> Iterator[Row]:
    """Fig. 16: balancers by what triggers them, at 256 and 64 devices."""
    yield from _balanced(shared, (WAFERS, WAFER), CASES, ITERATIONS)


def scenarios(shared: Path) -> Iterator[Row]:
    """Fig. 16 for hybrid batches, and for one scenario alone."""
    yield from _balanced(shared, (WAFERS,), (("mixed", "hybrid"), ("math", "decode")), 3 * WARM)


def _balanced(
    shared: Path, places: Sequence[Place], cases: Sequence[tuple[str, str]], iterations: int
) -> Iterator[Row]:
    for place in places:
        for scenario, phase in cases:
            given = loads_of(place, scenario, phase, iterations, shared)
            for trigger, methods in METHODS.items():
                for method in methods:
                    known = {"devices": layout_of(place).num_nodes, "scenario": scenario, "phase": phase}
                    migration = "invasive" if method.invasive else "non_invasive"
                    known |= {"balancer": method.name, "migration": migration, "trigger": trigger}
                    yield known | figures_of(run(method, place, phase, given), WARM)


def traces(shared: Path) -> Iterator[Row]:
    """Fig. 15: excess over the mean iteration by iteration, mean over layers, and interruptions, s."""
    given = loads_of(WAFERS, "mixed", "decode", ITERATIONS, shared)
    methods = {
        "none": Method("none", invasive=True),
        "greedy": Method("greedy", invasive=True, **EVERY_TEN),
        "topology_aware": Method("topology_aware", invasive=True, **EVERY_TEN),
        "non_invasive": Method("topology_aware", invasive=False),
    }
    ran = {name: run(method, WAFERS, "decode", given) for name, method in methods.items()}
    for iteration in range(ITERATIONS):
        row: Row = {"iteration": iteration}
        for name, each in ran.items():
            row[f"{name}_excess"] = each.kept["excess"][iteration].mean()
            row[f"{name}_waits_us"] = 1e6 * each.time.stages["migration"][iteration].sum()
            row[f"{name}_iteration_us"] = 1e6 * each.time.total[iteration].sum()
        yield row


def parts(shared: Path) -> Iterator[Row]:
    """Fig. 17: from NVL72 to four wafers with all methods, per layer; as many tokens a device everywhere."""
    steps = [
        ("NVL72", RACK, Method("none", invasive=True)),
        ("NVL72, balanced", RACK, Method("topology_aware", invasive=False)),
        ("wafers", replace(WAFERS, layout="baseline"), Method("none", invasive=True)),
        ("ER", replace(WAFERS, layout="er"), Method("none", invasive=True)),
        ("HER", WAFERS, Method("none", invasive=True)),
        ("HER, greedy", WAFERS, Method("greedy", invasive=True, **EVERY_TEN)),
        ("HER, topology-aware", WAFERS, Method("topology_aware", invasive=True, **EVERY_TEN)),
        ("HER, non-invasive", WAFERS, Method("topology_aware", invasive=False)),
    ]
    for phase in ("prefill", "decode"):
        for name, place, method in steps:
            given = loads_of(place, "mixed", phase, ITERATIONS, shared)
            found = figures_of(run(method, place, phase, given), WARM)
            moe, nodes = moe_of(place.model), layout_of(place).num_nodes
            slots = slots_in_order(1, moe.num_experts, nodes, 0)
            held = (slots != EMPTY).sum(axis=2).mean()
            yield {"phase": phase, "step": name, "devices": nodes, "experts_per_device": held} | found


def machines(shared: Path) -> Iterator[Row]:
    """What Fig. 17 comes to by the bandwidth of a wafer's links, each way; borders keep their part of it.

    Nodes of DGX without balancing as well: their uplinks carry a vector for every choice, so they are slower here than
    with an all-to-all that sends a token once to each node.
    """
    balanced, unbalanced = Method("topology_aware", invasive=False), Method("none", invasive=True)
    switched = (("4 DGX nodes", "dgx_b200_4x8"), ("8 DGX nodes", "dgx_b200_8x8"), ("NVL72", "nvl72"))
    cases = [
        (name, Place(machine, "successive", 4), method)
        for name, machine in switched
        for method in (unbalanced, balanced)
    ]
    for link in (1, 2, 4, 8):
        wider = f":link.bandwidth_GB_per_s={1000 * link}:border.bandwidth_GB_per_s={562.5 * link}"
        cases.append((f"wafers, {link} TB/s a link", replace(WAFERS, machine=WAFERS.machine + wider), balanced))
    for phase in ("prefill", "decode"):
        for name, place, method in cases:
            given = loads_of(place, "mixed", phase, 3 * WARM, shared)
            found = figures_of(run(method, place, phase, given), WARM)
            known = {"phase": phase, "machine": name, "devices": layout_of(place).num_nodes, "balancer": method.name}
            yield known | found


# Slots by gradient. Every balancer with its triggers; those by gradient write a move off over 10 iterations or 100.

TRIED = {
    "EPLB": Method("eplb", invasive=True),
    "EPLB, packs renamed": Method("eplb", invasive=True, renamed=True),
    "greedy": Method("greedy", invasive=True),
    "topology-aware": Method("topology_aware", invasive=True),
    "gradient, loads": Method("gradient", invasive=True, objective="loads", horizon=1000.0),
    "gradient, time": Method("gradient", invasive=True, horizon=100.0),
}
INTERVALS, LONGER = (10, 20, 40), 80
SLOW_HOPS = ":link.latency_ns=200:border.latency_ns=200"


def gradient(shared: Path) -> Iterator[Row]:
    """Balance and bytes of all balancers, each every 10 to 40 iterations."""
    given = loads_of(WAFERS, "mixed", "decode", LONGER, shared)
    yield _tried("none", Method("none", invasive=True), WAFERS, "decode", 0, given)
    for name, method in TRIED.items():
        for interval in INTERVALS:
            yield _tried(name, replace(method, beta=interval - 1.0), WAFERS, "decode", 0, given)


def varied(shared: Path) -> Iterator[Row]:
    """The same every ten iterations in prefill, with other draws and arrivals' scenarios, and with slow hops."""
    for place, phase, seed in (
        (WAFERS, "prefill", 0),
        (WAFERS, "decode", 1),
        (replace(WAFERS, machine=WAFERS.machine + SLOW_HOPS), "decode", 0),
    ):
        given = loads_of(place, "mixed", phase, 3 * WARM, shared, seed)
        for name, method in TRIED.items():
            yield _tried(name, replace(method, **EVERY_TEN), place, phase, seed, given)


def _tried(name: str, method: Method, place: Place, phase: str, seed: int, given: np.ndarray) -> Row:
    """What a balancer makes of these loads, and the weights that it moves in an iteration."""
    found = figures_of(run(method, place, phase, given), WARM)
    moved = found["experts_moved"] * moe_of(place.model).expert_parameters / 1e9  # one byte each
    known = {"machine": place.machine, "phase": phase, "seed": seed, "balancer": name}
    known["every"] = "" if method.name == "none" else int(method.beta) + 1
    return known | found | {"moved_GB": moved, "moved_GB_hops": moved * found["hops_per_expert"]}


def rollout(shared: Path) -> Iterator[Row]:
    """Seconds of 1,000 iterations of 58 layers and 256 experts on 256 dies with a balancer, compiling included.

    Wall seconds, and those of processors in all, which other work on the machine does not lengthen as much.
    """
    given = loads_of(WAFERS, "mixed", "decode", 1000, shared)
    for method in (
        Method("topology_aware", invasive=False),
        Method("eplb", invasive=True, **EVERY_TEN),
        Method("gradient", invasive=True, horizon=100.0, **EVERY_TEN),
    ):
        wall, cpu = perf_counter(), process_time()
        run(method, WAFERS, "decode", given)
        migration = "invasive" if method.invasive else "non_invasive"
        known = {"balancer": method.name, "migration": migration}
        yield known | {"wall_s": perf_counter() - wall, "processor_s": process_time() - cpu}


TABLES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "loads": loads,
    "traces": traces,
    "parts": parts,
    "balance": balance,
    "scenarios": scenarios,
    "machines": machines,
    "gradient": gradient,
    "varied": varied,
    "skew": skew,
    "tokens": tokens,
    "adding": adding,
    "groups": groups,
    "sharing": sharing,
    "rollout": rollout,
    "simulator": simulator,
    "stream": stream,
}


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, ROOT.parent / "shared", "traces")
    given = parser.parse_args()
    folder = given.shared / "traces"
    made = {f"balancing_{name}": partial(rows, folder) for name, rows in TABLES.items()}
    make_tables(HERE, tables_of(made, digits=4, timed=["balancing_rollout"]), given)
