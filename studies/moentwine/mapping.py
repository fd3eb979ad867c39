"""Mappings by gradient: against baseline, ER, HER, annealing, and on 4x4 against all partitions (line 6).

Writes `mapping.csv`, a line for each case, and `found.csv`, every device of flat mappings that are faster than what is
known: `python studies/moentwine/mapping.py`. Qwen3's sizes, 256 tokens a group; experts chosen for a token vary on 4x4.
Random starts alone on 4x4; elsewhere the layouts join the local search.
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from cases import MICRO, MODELS, TOKENS, VECTOR, hardware_of, topology_of
from layouts import balanced_counts
from mapping_bound import least_of_all_partitions
from mapping_problem import MappingProblem, exact_seconds
from mapping_search import MappingResult, anneal_mapping, tune_mapping
from study import HERE, Row

from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.experiment.table_age import code_of, record
from jaxmoe.files import write_table
from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import num_links
from jaxmoe.placement.token_layout import TokenLayout, hierarchical_layout, token_layout

MODEL = MODELS["qwen3-235b-a22b"]
WAFERS_OF_16 = "moentwine_4x8x8:wafer_shape=[4, 4]:border.bandwidth_GB_per_s=1125"  # 9 TB/s over 4 links and 2 ways
TIE = 1e-4
SWAPS = {16: 20_000, 36: 5_000, 64: 1_000}  # of a chain of annealing, about as long as the descent takes


def problem_of(machine: str, tp: int, top_k: int, congested: bool) -> MappingProblem:
    """Communication on a machine's wafers."""
    topology, chunk = topology_of(machine)
    nodes = topology.num_nodes
    counts = balanced_counts(float(TOKENS), nodes // tp, nodes, 1, MODEL.experts, top_k).node
    return MappingProblem(topology, counts, float(TOKENS), VECTOR * MODEL.hidden, chunk, congested)


def known_layouts(machine: str, tp: int) -> dict[str, TokenLayout]:
    """What the paper maps."""
    hardware = hardware_of(machine)
    shape = hardware.mesh_shape
    wafer = getattr(hardware, "wafer_shape", shape)
    names = ("baseline", "er") if wafer == shape else ("baseline", "er", "her")
    return {name: token_layout(name, shape, tp, wafer) for name in names}


def on_every_wafer(problem: MappingProblem, her: TokenLayout, seed: int) -> TokenLayout:
    """A tuned mapping of one wafer on each of them. There tokens are scattered, so only its rings matter."""
    links, nodes = num_links(her.wafer), her.wafer[0] * her.wafer[1]
    link = float(np.asarray(problem.topology.link_bandwidth).max())
    local = Mesh(jnp.full(links, link), jnp.zeros(links), shape=her.wafer)
    alone = replace(problem, topology=local, counts=jnp.zeros((nodes // her.tp, nodes)))
    return hierarchical_layout(her.shape, tune_mapping(alone, seed).layout, name="tuned_on_wafers")


def search(
    problem: MappingProblem, known: dict[str, TokenLayout], seed: int
) -> tuple[float, str, MappingResult, float]:
    """Microseconds of the best mapping, whether it is flat, the flat search, and the seconds that all took.

    It compiles for itself, as if it were the only case; most of a search is compiling, in one thread.
    """
    nodes = problem.counts.shape[1]
    few = {"restarts": 8, "rounds": 4} if nodes > 36 else {}
    starts = () if nodes == 16 else tuple(known[name] for name in ("baseline", "er"))
    jax.clear_caches()
    began = time.perf_counter()
    with ThreadPoolExecutor(max_workers=2) as pool:
        flat = pool.submit(tune_mapping, problem, seed, starts=starts, **few)
        local = pool.submit(on_every_wafer, problem, known["her"], seed) if "her" in known else None
        found = flat.result()
        best = MICRO * found.seconds, "flat"
        if local is not None:
            best = min(best, (MICRO * exact_seconds(problem, local.result()), "on every wafer"))
    return *best, found, time.perf_counter() - began


def line(machine: str, tp: int, top_k: int, congested: bool, seed: int = 0) -> tuple[Row, TokenLayout]:
    """One case: everybody's exact time, how long the search took, and the flat mapping that it found."""
    problem, known = problem_of(machine, tp, top_k, congested), known_layouts(machine, tp)
    told = {name: MICRO * exact_seconds(problem, layout) for name, layout in known.items()}
    nodes = problem.counts.shape[1]
    tuned, layout, found, wall = search(problem, known, seed)
    annealed = anneal_mapping(problem, seed, swaps=SWAPS[nodes])
    best = min(told.values())
    row: Row = {"machine": machine, "tp": tp, "top_k": top_k, "rule": "congestion" if congested else "eq_1"}
    row |= {f"{name}_us": told.get(name, "") for name in ("baseline", "er", "her")}
    row |= {"annealed_us": MICRO * annealed.seconds, "descended_us": MICRO * float(found.rounded.min())}
    row |= {"tuned_us": tuned, "tuned_layout": layout, "tuned_over_best": tuned / best, "wall_s": wall}
    bounded = nodes == 16 and tp == 4 and not congested
    return row | {"bound_us": MICRO * least_of_all_partitions(problem).seconds if bounded else ""}, found.layout


def devices(machine: str, layout: TokenLayout) -> Iterator[Row]:
    """Every device of a mapping."""
    for place, members in enumerate(layout.ring.T):
        for group, node in enumerate(members.tolist()):
            x, y = divmod(node, layout.shape[1])
            known = {"machine": machine, "layout": "tuned", "tp": layout.tp, "node": node, "x": x, "y": y}
            yield known | {"group": group, "domain": layout.domain[node], "place": place}


def cases() -> Iterator[tuple[str, int, int, bool]]:
    """Machine, TP, experts of a token, and whether under congestion."""
    for top_k in (2, 4, 6, 8):
        yield "moentwine_4x4", 4, top_k, False
    for machine, tp in (("moentwine_4x4", 4), ("moentwine_4x4", 2), ("moentwine_4x4", 8)):
        yield machine, tp, 8, True
    several = (
        ("moentwine_6x6", 4),
        ("moentwine_6x6", 9),
        ("moentwine_8x8", 4),
        ("moentwine_8x8", 16),
        (WAFERS_OF_16, 4),
    )
    for (machine, tp), congested in itertools.product(several, (False, True)):
        yield machine, tp, 8, congested


def main() -> None:
    """Write the tables, telling each line; or time the searches of the cases that are numbered, and write none."""
    parser = script_options(__doc__, writes=True)
    parser.add_argument("cases", nargs="*", type=int, metavar="NUMBER", help="cases to time, without a table")
    given = parser.parse_args()
    if given.cases:
        for number in given.cases:
            machine, tp, top_k, congested = list(cases())[number]
            tuned, layout, _, wall = search(
                problem_of(machine, tp, top_k, congested), known_layouts(machine, tp), seed=0
            )
            print(machine, tp, top_k, congested, f"{tuned:.6g} µs, {layout}, {wall:.4g} s", flush=True)
        return
    rows: list[Row] = []
    found: list[Row] = []
    for case in cases():
        row, layout = line(*case)
        print(row, flush=True)
        rows.append(row)
        if row["tuned_layout"] == "flat" and float(str(row["tuned_over_best"])) < 1 - TIE:
            found += sorted(devices(case[0], layout), key=lambda device: int(str(device["node"])))
    for name, told in (("mapping", rows), ("found", found)):
        path = folder_of_tables(HERE, given) / f"{name}.csv"
        write_table(path, told, digits=6)
        record(path, HERE, code_of(HERE), {"seed": 0}, whole=True)
    ratio = np.array([float(str(row["tuned_over_best"])) for row in rows])
    print(f"{len(rows)} cases: {(ratio < 1 - TIE).sum()} faster than the best known, {(ratio > 1 + TIE).sum()} slower")


if __name__ == "__main__":
    main()
