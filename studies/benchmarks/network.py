"""How fast the network model and the event simulator are, beside plain loops; see README.md.

Traffic is all-to-all for the simulator and random matrices for the model. Compilation is timed apart; runs are
warmed up and block until ready, the best of several is taken, baselines are timed in between.

Takes a minute of one core.
"""

import heapq
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from throughput import compiled, machine, rate

from jaxmoe.des import Fabric, GraphBuilder, TaskGraph, fabric_of, simulate
from jaxmoe.des.event_loop import run_on
from jaxmoe.des.tasks import add_transfers, messages, no_rows
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.hardware import Mesh, Router
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import Congestion
from jaxmoe.relax import HardMax

HERE = Path(__file__).resolve().parent
MESHES = {(3, 8): 61, (4, 4): 79, (4, 8): 79, (5, 5): 61, (8, 8): 124}  # shapes, and matrices at once
CHUNK = 8.0
SIMULATED = ((8, 8), (16, 16))


def mesh_of(shape: tuple[int, int]) -> Mesh:
    """A mesh with ports, of one byte a second everywhere."""
    links, nodes = num_links(shape), shape[0] * shape[1]
    return Mesh(jnp.ones(links), jnp.full(links, 3.0), jnp.ones(nodes), jnp.ones(nodes), shape=shape)


@eqx.filter_jit
def completions(topology: Mesh, traffic: jax.Array) -> jax.Array:
    """The model's completion of every matrix."""
    model = Congestion(jnp.asarray(CHUNK), cut_through=True)
    return jax.vmap(lambda matrix: model(topology, matrix).total(HardMax()))(traffic)


class NumpyModel:
    """The same completion, one matrix after the other, with a dense path matrix."""

    def __init__(self, topology: Mesh) -> None:
        self.nodes = topology.num_nodes
        self.paths = np.zeros((self.nodes**2, topology.num_links), np.float32)
        for source, row in enumerate(topology.paths()):
            for destination, path in enumerate(row):
                self.paths[source * self.nodes + destination, list(path)] = 1
        self.hops = self.paths.sum(axis=1)

    def __call__(self, traffic: np.ndarray) -> float:
        away = traffic * (1 - np.eye(self.nodes, dtype=np.float32))
        load = max((away.ravel() @ self.paths).max(), away.sum(axis=0).max(), away.sum(axis=1).max())
        return float(load + 3.0 * self.hops[away.ravel() > 0].max(initial=0))


def model_row(shape: tuple[int, int], count: int) -> dict[str, object]:
    """Matrices per second of one shape."""
    topology, rng = mesh_of(shape), np.random.default_rng(0)
    nodes = topology.num_nodes
    traffic = (rng.integers(0, 500, (count, nodes, nodes)) * (rng.random((count, nodes, nodes)) < 0.5)).astype("f4")
    numpy_model = NumpyModel(topology)
    run, compile_s = compiled(completions, topology, jnp.asarray(traffic))
    np.testing.assert_allclose(run(), [numpy_model(matrix) for matrix in traffic], rtol=1e-5)
    baseline = rate(lambda: [numpy_model(matrix) for matrix in traffic], count)
    return row("model", shape, f"{count} matrices at once", rate(run, count), baseline, "matrices/s", compile_s)


def simulator_row(shape: tuple[int, int], cut_through: bool) -> dict[str, object]:
    """Chunk-hops per second of an all-to-all of two chunks a pair."""
    links = num_links(shape)
    mesh = Mesh(jnp.ones(links), jnp.full(links, 3.0), shape=shape)
    fabric = fabric_of(mesh, CHUNK, cut_through)
    begun = time.perf_counter()
    graph = all_to_all(fabric)
    building = time.perf_counter() - begun
    begun = time.perf_counter()
    run = simulate(graph, fabric.rate, fabric.latency, cut_through=cut_through)
    first = time.perf_counter() - begun
    fast = rate(lambda: simulate(graph, fabric.rate, fabric.latency, cut_through=cut_through), graph.chunk_hops)
    begun = time.perf_counter()
    plain = plain_loop(graph, fabric, cut_through)
    baseline = graph.chunk_hops / (time.perf_counter() - begun)
    np.testing.assert_allclose(plain, run.makespan)
    what = f"all-to-all, {int(graph.chunks.sum())} chunks, {'cut-through' if cut_through else 'store-and-forward'}"
    seconds = {"run_ms": f"{1e3 * graph.chunk_hops / fast:.2f}", "build_ms": f"{1e3 * building:.1f}"}
    return row("simulator", shape, what, fast, baseline, "chunk-hops/s", first) | seconds


def router_row(shape: tuple[int, int]) -> dict[str, object]:
    """The same all-to-all with finite buffers, a flit a cycle; its baseline is the one with unbounded buffers."""
    links, nodes = num_links(shape), shape[0] * shape[1]
    mesh = Mesh(jnp.ones(links), jnp.full(links, 4.0), jnp.ones(nodes), jnp.ones(nodes), shape=shape)
    mesh = replace(mesh, endpoint_latency=jnp.asarray(5.0))
    ideal, real = fabric_of(mesh, CHUNK, True), fabric_of(replace(mesh, router=Router(4, 32, 1.0)), CHUNK, True)
    begun = time.perf_counter()
    graph = all_to_all(real)
    building = time.perf_counter() - begun
    begun = time.perf_counter()
    run_on(real, graph)
    first = time.perf_counter() - begun
    fast = rate(lambda: run_on(real, graph), graph.chunk_hops)
    baseline = rate(lambda: run_on(ideal, graph), graph.chunk_hops)
    what = f"all-to-all, {int(graph.chunks.sum())} chunks of 8 flits, finite buffers"
    seconds = {"run_ms": f"{1e3 * graph.chunk_hops / fast:.2f}", "build_ms": f"{1e3 * building:.1f}"}
    return row("simulator", shape, what, fast, baseline, "chunk-hops/s", first) | seconds


def all_to_all(fabric: Fabric) -> TaskGraph:
    """Two chunks from every node to every other, to the next first."""
    builder, nodes = GraphBuilder(len(fabric.rate), 0, fabric.chunk_bytes), fabric.num_nodes
    source, step = np.divmod(np.arange(nodes * (nodes - 1)), nodes - 1)
    sent = messages(fabric.paths, source, (source + step + 1) % nodes, np.full(len(source), 2.0 * CHUNK))
    add_transfers(builder, sent, no_rows(nodes))
    return builder.build()


def plain_loop(graph: TaskGraph, fabric: Fabric, cut_through: bool) -> float:
    """The baseline: the same first-come-first-served servers with Python's heap, for messages without dependencies."""
    free, last = [0.0] * len(fabric.rate), 0.0
    rates, latencies = fabric.rate.tolist(), fabric.latency.tolist()
    events = [(0.0, task, chunk, 0, 0.0) for task, count in enumerate(graph.chunks.tolist()) for chunk in range(count)]
    heapq.heapify(events)
    starts, path = graph.path_start.tolist(), graph.path.tolist()
    while events:
        now, task, chunk, hop, tail = heapq.heappop(events)
        server = path[starts[task] + hop]
        begin = max(now, free[server])
        free[server] = leave = max(begin + CHUNK / rates[server], tail)
        if starts[task] + hop + 1 < starts[task + 1]:
            there = (begin if cut_through else leave) + latencies[server]
            heapq.heappush(events, (there, task, chunk, hop + 1, leave + latencies[server] if cut_through else 0.0))
        else:
            last = max(last, leave + latencies[server])
    return last


def row(
    what: str, shape: tuple[int, int], case: str, fast: float, baseline: float, unit: str, first_s: float
) -> dict[str, object]:
    """A row of the table."""
    rates = {"per_s": round(fast), "baseline_per_s": round(baseline), "unit": unit, "ratio": f"{fast / baseline:.1f}"}
    mesh = f"{shape[0]}x{shape[1]}"
    return {"what": what, "mesh": mesh, "case": case} | rates | {"compile_or_first_s": f"{first_s:.2f}"}


def rows() -> Iterator[dict[str, object]]:
    """All rows: the model, the simulator, and the simulator with finite buffers."""
    for shape, count in MESHES.items():
        yield model_row(shape, count)
    for shape in SIMULATED:
        for cut_through in (False, True):
            yield simulator_row(shape, cut_through)
    yield router_row(SIMULATED[0])


def told() -> list[dict[str, object]]:
    return [row | {"machine": machine()} for row in rows()]


COLUMNS = ["what", "mesh", "case", "per_s", "unit", "baseline_per_s", "ratio", "run_ms", "build_ms"]
TABLE = Table("network", told, columns=[*COLUMNS, "compile_or_first_s", "machine"], timed=True)

if __name__ == "__main__":
    make_tables(HERE, [TABLE], study_options(__doc__).parse_args())
