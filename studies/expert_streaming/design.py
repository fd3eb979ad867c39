"""The chiplet's own design space: Fig. 16 and 17, and the best machine under Eq. 1 and 2 by gradient.

Writes `grid.csv`, `slices.csv` and `machine.csv`: `python studies/expert_streaming/design.py`.
Qwen3-30B-A3B with 64 tokens on 2x2; points are timed by the model, all at once.
"""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from agreement import HERE, TILE, Drawn, machine_of, slices_of, tokens_of
from jaxtyping import Array

from jaxmoe.compiling import UNFUSED
from jaxmoe.config.expressions import Expression, in_order
from jaxmoe.config.hardware_space import read_constraint, read_space
from jaxmoe.engine import LoadRules, SliceCosts, StreamPipeline, StreamTokens
from jaxmoe.experiment.codesign.problem import hardware_problem
from jaxmoe.experiment.codesign.search import tune_hardware
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.hardware import Machine
from jaxmoe.methods.expert_streaming.trajectories import streams
from jaxmoe.relax import HardMax

MODEL, TOKENS, DIES, BATCHES, SEED = "qwen3-30b-a3b", 64, 4, 4, 3
BASE = Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 8e6, 8)

# Eq. 1 and 2, with every constant's source, are those of the space that `jaxmoe tune --hardware` takes.
SCENARIO = HERE.parents[1] / "configs" / "scenarios" / "expert_streaming" / "qwen3-30b-a3b_2x2.yaml"
FILE = read_space(HERE / "chiplet_space.yaml")
DDR, D2D = "hardware.memory.ddr.bandwidth_GB_per_s", "hardware.link.bandwidth_GB_per_s"
SRAM, RATE = "hardware.memory.sram.capacity_GB", "hardware.die.compute_TFLOPs_per_s"
MODULES, UCIE_RATE = "ucie_modules", float(FILE.space.derived["module_GB_per_s"]) * 1e9  # B/s
CHOSEN = {"system.strategy": "fse_paired", "system.attention": False, "evaluation.batches": 1}


class Point(NamedTuple):
    """Numbers of one die: B/s, B/s, B, and MACs as a part of 2048."""

    ddr: Any
    d2d: Any
    sram: Any
    macs: Any


def limited(point: Point) -> dict[str, Any]:
    """Both left sides, `die_mm2` and `package_W`, and what they are made of, by key of the space; modules are whole."""
    known: dict[str, Any] = {
        DDR: point.ddr / 1e9,
        D2D: point.d2d / 1e9,
        SRAM: point.sram / 1e9,
        RATE: BASE.flops / 1e12 * point.macs,
        MODULES: jnp.ceil(point.d2d / UCIE_RATE - 1e-6),
    }
    for key in in_order(FILE.space.derived):
        known[key] = Expression(str(FILE.space.derived[key]))(known)
    return known


def fits(known: dict[str, Any]) -> Array:
    """Whether all constraints hold, up to the rounding of float32."""
    sides = [(each.left(known), each.right(known)) for each in map(read_constraint, FILE.space.constraints)]
    return jnp.stack([left <= right * (1 + 1e-6) for left, right in sides]).all(axis=0)


Case = tuple[Machine, SliceCosts]


def batches(tile: float = TILE) -> tuple[Case, Array]:
    """The base machine with tiles of so many tokens, and tokens of some layers, [batch, expert, die]."""
    rng = np.random.default_rng(SEED)
    machine = machine_of(BASE)
    machine = eqx.tree_at(lambda m: m.die.gemm.tile_rows, machine, jnp.asarray(tile))
    case = machine, slices_of(MODEL, BASE.micro_slices, BASE.sram, DIES)
    return case, jnp.asarray(np.stack([tokens_of(MODEL, TOKENS, DIES, rng) for _ in range(BATCHES)]), jnp.float32)


def at(case: Case, point: Point) -> Case:
    """The machine with these numbers."""
    port = jnp.full(DIES, 1.0) * point.d2d
    machine, _ = case
    where = lambda c: (  # noqa: E731
        c[0].memory[-1].bandwidth,
        c[0].topology.link_bandwidth,
        c[0].topology.injection_bandwidth,
        c[0].topology.ejection_bandwidth,
        c[0].die.flops,
        c[1].buffer_bytes,
    )
    link = jnp.full(machine.topology.link_bandwidth.shape, 1.0) * point.d2d
    flops = machine.die.flops * point.macs
    return eqx.tree_at(
        where, case, (jnp.full(DIES, 1.0) * point.ddr, link, port, port, flops, jnp.full(DIES, 1.0) * point.sram)
    )


def timed(case: Case, tokens: Array) -> tuple[Array, Array]:
    """Mean seconds of a layer under paired load, and the mean part of the time that arrays are busy."""
    machine, costs = case

    def one(counts: Array) -> tuple[Array, Array]:
        decided = streams(machine.topology, StreamTokens(counts, counts.sum()), LoadRules())
        usage = StreamPipeline(costs, decided).usage(machine, HardMax())
        return usage.seconds, usage.busy["compute"].mean()

    seconds, busy = jax.vmap(one)(tokens)
    return seconds.mean(), busy.sum() / seconds.sum()


@eqx.filter_jit
def all_points(case: Case, tokens: Array, points: Point) -> tuple[Array, Array]:
    return jax.lax.map(lambda point: timed(at(case, point), tokens), points, batch_size=256)


def grid() -> list[dict[str, Any]]:
    """Fig. 16: SRAM over DDR at 288 GB/s, and D2D over DDR at 14 MB, with and without a tile floor."""
    ddr = np.array([12.8, 19.2, 25.6, 32, 40, 48, 56, 64, 80, 102.4]) * 1e9
    sram = np.array([4, 6, 8, 10, 12, 14, 16, 20, 24, 32]) * 1e6
    d2d = np.array([48, 96, 144, 192, 288, 384, 512, 576, 768]) * 1e9
    rows: list[dict[str, Any]] = []
    for tile in (1.0, TILE, 32.0):
        case, tokens = batches(tile)
        for panel, mesh in (("a", np.meshgrid(ddr, [288e9], sram)), ("b", np.meshgrid(ddr, d2d, [14e6]))):
            points = Point(*(jnp.asarray(axis.ravel(), jnp.float32) for axis in mesh), jnp.ones(mesh[0].size))
            seconds, busy = all_points(case, tokens, points)
            macs = float(tokens.sum(axis=(1, 2)).mean() * case[1].costs.flops_per_token_expert / DIES / BASE.flops)
            known = limited(points)
            columns = (*points, seconds, busy, known["die_mm2"], known["package_W"], fits(known))
            for ddr_at, d2d_at, sram_at, _, s, u, mm2, w, ok in zip(*map(np.asarray, columns), strict=True):
                rows.append(
                    {
                        "panel": panel,
                        "tile": tile,
                        "ddr_GB_per_s": float(ddr_at) / 1e9,
                        "d2d_GB_per_s": float(d2d_at) / 1e9,
                        "sram_MB": float(sram_at) / 1e6,
                        "layer_s": float(s),
                        "utilisation": float(u),
                        "mac_utilisation": macs / float(s),
                        "die_mm2": float(mm2),
                        "package_W": float(w),
                        "fits": bool(ok),
                    }
                )
    for tile in (1.0, TILE, 32.0):
        here = [
            row for row in rows if row["tile"] == tile and row["panel"] == "a" and abs(row["ddr_GB_per_s"] - 48) < 0.1
        ]
        print(
            f"tile {tile:g}, 48 GB/s: "
            + ", ".join(
                f"{r['sram_MB']:g} MB {r['utilisation']:.2f} ({r['mac_utilisation']:.3f} of MACs)" for r in here
            )
        )
    return rows


def slices() -> list[dict[str, Any]]:
    """Fig. 17: seconds of a layer over the buffer and the micro-slices of a die's slice."""
    rows = []
    for model in ("phi-3.5-moe", MODEL):
        rng = np.random.default_rng(SEED)
        tokens = jnp.asarray(np.stack([tokens_of(model, 256, DIES, rng) for _ in range(BATCHES)]), jnp.float32)
        run = eqx.filter_jit(timed)
        for sram in (4e6, 6e6, 8e6, 12e6, 16e6, 32e6):
            for cut in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32):
                costs = slices_of(model, cut, sram, DIES)
                if float(costs.slots) >= DIES:  # else buffers are too small for any trajectory
                    row = {"model": model, "sram_MB": sram / 1e6, "micro_slices": cut}
                    rows.append(row | {"layer_s": float(run((machine_of(BASE), costs), tokens)[0])})
    return rows


def machine() -> list[dict[str, Any]]:
    """The fastest machine under Eq. 1 and 2: a grid of 10,000, and `tune --hardware` on the same space and batches."""
    problem = hardware_problem(FILE, SCENARIO, CHOSEN, [0])
    axes = [np.linspace(0, 1, 10)] * (len(problem.keys) - 1)  # modules follow from D2D
    places = np.stack([axis.ravel() for axis in np.meshgrid(*axes)], axis=1)
    (group,) = problem.groups
    given = tuple(tuple(each._replace(share=each.share[0]) for each in parts) for parts in group.arguments)

    @partial(jax.jit, compiler_options=UNFUSED)  # as the search is
    def timed_at(positions: Array) -> Array:
        return jax.lax.map(lambda at: problem.objective(group.static, given, at, None), positions, batch_size=256)

    bounds = problem.space.variables
    d2d = bounds[D2D].at(places[:, problem.keys.index(D2D)])
    modules = bounds[MODULES].parts(np.ceil(d2d / UCIE_RATE * 1e9 - 1e-6))
    positions = np.concatenate([places, modules[:, None]], axis=1)
    legal = problem.excess_and_slope(positions)[0].max(axis=1) <= 1e-6
    with StageTimer() as clock:
        with clock.stage("grid"):
            found = np.asarray(timed_at(jnp.asarray(positions, jnp.float32)))
        result = tune_hardware(problem, lambda *_: None, clock)
    best = np.where(legal, found, np.inf).argmin()
    walls: Any = clock.report()["stages"]
    rows = []
    for name, numbers, layer_s, points, stages in (
        ("grid", problem.numbers(positions[best].tolist()), problem.metric(found[best]), len(found), ("grid",)),
        (
            "tune --hardware",
            result.best.numbers,
            result.best.metric,
            sum(result.evaluations.values()),
            ("descend", "trust region"),  # what is reported is read and scored once more after that
        ),
    ):
        row = {"method": name, "layer_s": layer_s, "points_timed": points}
        row |= {key: sum(walls[stage][key] for stage in stages) for key in ("compile_s", "run_s")}
        shown = (DDR, D2D, SRAM, RATE, MODULES, "die_mm2", "package_W")
        rows.append(row | {key.removeprefix("hardware."): float(numbers[key]) for key in shown})
    for row in rows:
        print(", ".join(f"{key} {value:.5g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    print("seconds by stage:", walls)
    print(f"{len(found) / rows[0]['run_s'] * 60:,.0f} design points a minute, compiled before")
    return rows


TABLES = {"grid": grid, "slices": slices, "machine": machine}

if __name__ == "__main__":
    make_tables(HERE, tables_of(TABLES, digits=6, timed=["machine"]), study_options(__doc__).parse_args())
