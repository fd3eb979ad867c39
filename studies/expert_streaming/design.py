"""The chiplet's own design space: Fig. 16 and 17, and the best machine under Eq. 1 and 2 by gradient.

Writes `grid.csv`, `slices.csv` and `machine.csv`: `python studies/expert_streaming/design.py`.
Qwen3-30B-A3B with 64 tokens on 2x2; points are timed by the model, all at once.
"""

import argparse
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from agreement import CONTROL, TILE, Drawn, costs_of, machine_of, tokens_of, write
from jaxtyping import Array, Float

from jaxmoe.latency.streaming import StreamCosts, asked_of, grouped, stream_time
from jaxmoe.policies.streaming import group_members, groups_in_order, loading_dies, ring_of, trajectories

MODEL, TOKENS, DIES, BATCHES, SEED = "qwen3-30b-a3b", 64, 4, 4, 3
BASE = Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 8e6, 8)

# Eq. 1 and 2. The paper gives the sum of its die alone: 12.7 mm2 with 2048 MACs and 288 GB/s, 2.19 W at most.
UCIE_RATE, UCIE_AREA = 192e9, 1.0  # B/s of a x32 module (VI-D); mm2, of published 5 nm modules' order (ours)
SRAM_AREA = 0.32  # mm2 for each MB: 25 Mb/mm2 of macros in 5 nm (ours)
COMPUTE_AREA = 12.7 - 2 * UCIE_AREA - 8 * SRAM_AREA  # mm2 of 2048 MACs and the rest: what the die leaves (Table I)
COMPUTE_W = 2.187  # a die at 0.9 V (Table I)
D2D_PJ, DDR_PJ = 0.52, 20.0  # pJ for each bit: UCIe-S of the paper's reference 67; DDR3 with its interface (ours)
AREA_LIMIT, POWER_LIMIT = 30.0, 60.0  # mm2 of a die, W of the package


class Point(NamedTuple):
    """Numbers of one die: B/s, B/s, B, and MACs as a part of 2048."""

    ddr: Any
    d2d: Any
    sram: Any
    macs: Any


def area(point: Point, whole: bool = True) -> Array:
    """Left side of Eq. 1, mm2; relaxed, parts of UCIe modules count."""
    modules = point.d2d / UCIE_RATE
    return (
        (jnp.ceil(modules - 1e-6) if whole else modules) * UCIE_AREA
        + COMPUTE_AREA * point.macs
        + (SRAM_AREA * point.sram / 1e6)
    )


def power(point: Point) -> Array:
    """Left side of Eq. 2, W: the peaks of all dies."""
    moved = 8e-12 * (D2D_PJ * point.d2d + DDR_PJ * point.ddr)
    return DIES * (COMPUTE_W * point.macs + moved)


def batches(tile: float = TILE) -> tuple[StreamCosts, Array]:
    """The base machine with tiles of so many tokens, and tokens of some layers, [batch, expert, die]."""
    rng = np.random.default_rng(SEED)
    machine = machine_of(BASE)
    machine = eqx.tree_at(lambda m: m.die.gemm.tile_rows, machine, jnp.asarray(tile))
    costs = StreamCosts(
        machine,
        costs_of(MODEL),
        jnp.asarray(float(BASE.micro_slices)),
        jnp.full(DIES, BASE.sram, jnp.float32),
        jnp.asarray(CONTROL),
    )
    return costs, jnp.asarray(np.stack([tokens_of(MODEL, TOKENS, DIES, rng) for _ in range(BATCHES)]), jnp.float32)


def at(costs: StreamCosts, point: Point) -> StreamCosts:
    """The machine with these numbers."""
    port = jnp.full(DIES, 1.0) * point.d2d
    machine = costs.machine
    where = lambda c: (  # noqa: E731
        c.machine.memory[-1].bandwidth,
        c.machine.topology.link_bandwidth,
        c.machine.topology.injection_bandwidth,
        c.machine.topology.ejection_bandwidth,
        c.machine.die.flops,
        c.buffer_bytes,
    )
    link = jnp.full(machine.topology.link_bandwidth.shape, 1.0) * point.d2d
    flops = machine.die.flops * point.macs
    return eqx.tree_at(
        where, costs, (jnp.full(DIES, 1.0) * point.ddr, link, port, port, flops, jnp.full(DIES, 1.0) * point.sram)
    )


def timed(costs: StreamCosts, tokens: Array) -> tuple[Array, Array]:
    """Mean seconds of a layer under paired load, and the mean part of the time that arrays are busy."""
    ring = ring_of(costs.machine.topology)

    def one(counts: Array) -> tuple[Array, Array]:
        needed, following = trajectories(counts, ring)
        asked = asked_of(costs, counts, needed, following, loading_dies(needed, True))
        members = group_members(groups_in_order(counts, True), counts.shape[0])
        found = stream_time(costs, grouped(asked, members), matched=True)
        return found.seconds, found.compute.mean()

    seconds, busy = jax.vmap(one)(tokens)
    return seconds.mean(), busy.sum() / seconds.sum()


@eqx.filter_jit
def all_points(costs: StreamCosts, tokens: Array, points: Point) -> tuple[Array, Array]:
    return jax.lax.map(lambda point: timed(at(costs, point), tokens), points, batch_size=256)


def grid() -> None:
    """Fig. 16: SRAM over DDR at 288 GB/s, and D2D over DDR at 14 MB, with and without a tile floor."""
    ddr = np.array([12.8, 19.2, 25.6, 32, 40, 48, 56, 64, 80, 102.4]) * 1e9
    sram = np.array([4, 6, 8, 10, 12, 14, 16, 20, 24, 32]) * 1e6
    d2d = np.array([48, 96, 144, 192, 288, 384, 512, 576, 768]) * 1e9
    rows: list[dict[str, Any]] = []
    for tile in (1.0, TILE, 32.0):
        costs, tokens = batches(tile)
        for panel, mesh in (("a", np.meshgrid(ddr, [288e9], sram)), ("b", np.meshgrid(ddr, d2d, [14e6]))):
            points = Point(*(jnp.asarray(axis.ravel(), jnp.float32) for axis in mesh), jnp.ones(mesh[0].size))
            seconds, busy = all_points(costs, tokens, points)
            macs = float(tokens.sum(axis=(1, 2)).mean() * costs.costs.flops_per_token_expert / DIES / BASE.flops)
            fits = (area(points) <= AREA_LIMIT) & (power(points) <= POWER_LIMIT)
            columns = (*points, seconds, busy, area(points), power(points), fits)
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
    write("grid", rows)
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


def slices() -> None:
    """Fig. 17: seconds of a layer over the buffer and the micro-slices of a die's slice."""
    rows = []
    for model in ("phi-3.5-moe", MODEL):
        rng = np.random.default_rng(SEED)
        tokens = jnp.asarray(np.stack([tokens_of(model, 256, DIES, rng) for _ in range(BATCHES)]), jnp.float32)
        run = eqx.filter_jit(timed)
        for sram in (4e6, 6e6, 8e6, 12e6, 16e6, 32e6):
            for cut in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32):
                costs = StreamCosts(
                    machine_of(BASE),
                    costs_of(model),
                    jnp.asarray(float(cut)),
                    jnp.full(DIES, sram),
                    jnp.asarray(CONTROL),
                )
                if float(costs.slots) >= DIES:  # else buffers are too small for any trajectory
                    row = {"model": model, "sram_MB": sram / 1e6, "micro_slices": cut}
                    rows.append(row | {"layer_s": float(run(costs, tokens)[0])})
    write("slices", rows)


BOUNDS = Point(*map(np.asarray, ((12.8e9, 102.4e9), (48e9, 768e9), (4e6, 32e6), (0.5, 2.0))))


def machine() -> None:
    """The fastest machine under Eq. 1 and 2: a grid of 10,000, and descent from eight starts; modules are whole."""
    costs, tokens = batches()
    axes = [np.geomspace(*bounds, 10) for bounds in BOUNDS]
    points = Point(*(jnp.asarray(axis.ravel(), jnp.float32) for axis in np.meshgrid(*axes)))
    all_points(costs, tokens[:1], jax.tree.map(lambda leaf: leaf[:256], points))
    started = time.perf_counter()
    seconds, _ = jax.block_until_ready(all_points(costs, tokens[:1], points))
    grid_wall = time.perf_counter() - started
    legal = np.asarray((area(points) <= AREA_LIMIT) & (power(points) <= POWER_LIMIT))
    best = np.where(legal, np.asarray(seconds), np.inf).argmin()
    for seed in (1, 0):  # the first compiles
        starts = jnp.asarray(np.random.default_rng(seed).uniform(0, 1, (8, 4)), jnp.float32)
        started = time.perf_counter()
        found = polished(costs, tokens[:1], np.asarray(descended(costs, tokens[:1], starts)))
        wall = time.perf_counter() - started
    rows = []
    for name, point, s, w in (
        ("grid of 10,000", Point(*(leaf[best] for leaf in points)), float(seconds[best]), grid_wall),
        ("descent", found[0], found[1], wall),
    ):
        row = {
            "method": name,
            "layer_s": s,
            "wall_s": w,
            "die_mm2": float(area(point)),
            "package_W": float(power(point)),
        }
        names = ("ddr_B_per_s", "d2d_B_per_s", "sram_B", "macs_of_2048")
        rows.append(row | {key: float(value) for key, value in zip(names, point, strict=True)})
    write("machine", rows)
    print(f"{len(seconds) / grid_wall * 60:,.0f} design points a minute")
    print(f"descent takes {rows[1]['layer_s'] / rows[0]['layer_s']:.4f} of the grid's best time of a layer")


def point_at(place: Float[Array, "4"]) -> Point:
    """From 0 to 1 between the bounds, by equal ratios."""
    return Point(*(low * (high / low) ** part for (low, high), part in zip(BOUNDS, jnp.clip(place, 0, 1), strict=True)))


@eqx.filter_jit
def descended(costs: StreamCosts, tokens: Array, starts: Float[Array, "start 4"]) -> Float[Array, "start 4"]:
    """Adam on log seconds with a growing penalty for what Eq. 1, its ceiling relaxed, and Eq. 2 exceed."""
    optimiser = optax.adam(0.03)

    def loss(place: Array, weight: Array) -> Array:
        point = point_at(place)
        over = jnp.maximum(area(point, whole=False) / AREA_LIMIT - 1, 0) + jnp.maximum(
            power(point) / POWER_LIMIT - 1, 0
        )
        return jnp.log(timed(at(costs, point), tokens)[0]) + weight * over

    def step(state, weight):
        places, moments = state
        slope = jnp.nan_to_num(jax.vmap(jax.grad(loss), (0, None))(places, weight))
        change, moments = optimiser.update(slope, moments)
        return (jnp.clip(optax.apply_updates(places, change), 0, 1), moments), None

    (places, _), _ = jax.lax.scan(step, (starts, optimiser.init(starts)), jnp.geomspace(1.0, 30.0, 80))
    return places


def polished(costs: StreamCosts, tokens: Array, places: Float[np.ndarray, "start 4"]) -> tuple[Point, float]:
    """The best legal point near where descent ended: D2D as it is or of whole modules, MACs a little more or less, and
    DDR and SRAM as far as the limits let them.
    """
    candidates = []
    for place in places:
        end = point_at(jnp.asarray(place))
        for rate in (float(end.d2d), *(modules * UCIE_RATE for modules in range(1, 5))):
            for factor in (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5):
                mac = float(np.clip(float(end.macs) * factor, *BOUNDS.macs))
                fixed = area(Point(0.0, rate, 0.0, mac))
                sram = np.clip((AREA_LIMIT - float(fixed)) / SRAM_AREA * 1e6, *BOUNDS.sram)
                left = POWER_LIMIT - float(power(Point(0.0, rate, 0.0, mac)))
                ddr = np.clip(left / (DIES * 8e-12 * DDR_PJ), *BOUNDS.ddr)
                candidates.append((float(ddr) * (1 - 1e-6), rate, float(sram) * (1 - 1e-6), mac))
    points = Point(*(jnp.asarray(column, jnp.float32) for column in zip(*candidates, strict=True)))
    seconds = np.asarray(all_points(costs, tokens, points)[0])
    legal = np.asarray((area(points) <= AREA_LIMIT) & (power(points) <= POWER_LIMIT))
    best = np.where(legal, seconds, np.inf).argmin()
    return Point(*(leaf[best] for leaf in points)), float(seconds[best])


PARTS = {"grid": grid, "slices": slices, "machine": machine}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(PARTS)}; all by default")
    for table in parser.parse_args().tables or PARTS:
        if table not in PARTS:
            parser.error(f"no table is called {table}; choose from {', '.join(PARTS)}")
        PARTS[table]()
