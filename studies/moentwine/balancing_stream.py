"""Two layers in the event simulator with experts that migrate meanwhile: is regular work any later for it?"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from balancing_cases import TOKENS, Method, Place, layout_of, loads_of, machine_of, model_of
from counted_layer import counted_layer

from jaxmoe.des import LayerDescription, Memory, fabric_of
from jaxmoe.des.layers_in_turn import Migration, StreamRun, moves, run_layers, weight_transfers
from jaxmoe.placement.token_layout import links_inside_domains

PLACE, PHASE = Place("moentwine_4x4", "er", 4), "decode"
CHUNK = 65536.0  # B: smaller ones change little, and take as many times as long
LAYERS, BINS = 2, 120


@lru_cache
def _layers(shared: Path) -> tuple:
    """Phases of two layers with Algorithm 1's copies of one, the moves to those of the other, and all sizes."""
    machine, layout, model = machine_of(PLACE.machine), layout_of(PLACE), model_of(PLACE, PHASE)
    balancer = Method("topology_aware", invasive=False).balancer(PLACE, PHASE)
    loads = loads_of(PLACE, "math", PHASE, 1, shared)[0]
    after = np.asarray(balancer.rule(jnp.asarray(loads), balancer.start))
    topology, nodes = machine.topology, layout.num_nodes
    level = machine.memory[0]
    memory = Memory(np.asarray(level.bandwidth, float), np.asarray(level.latency, float), np.asarray(level.channel))
    costs = model.costs
    layer = LayerDescription(
        fabric_of(topology, CHUNK), np.asarray(machine.die.flops, float), float(costs.dispatch_bytes),
        float(costs.combine_bytes), float(costs.expert_bytes), float(costs.flops_per_token_expert), "replicated",
        memory=(memory,),
    )  # fmt: skip
    groups, start = layout.num_groups, np.asarray(balancer.start)
    attended, _ = model.before  # and its all-reduce, which `counted_layer` sends itself
    attention = np.full(nodes, float(attended.usage.seconds))
    reduced = TOKENS[PHASE] * float(costs.combine_bytes)
    phases = [
        counted_layer(layer, layout, start[row], np.tile(loads[row] / groups, (groups, 1)), attention, reduced)
        for row in range(LAYERS)
    ]
    hops = np.asarray(topology.hop_counts())
    pairs = np.array([pair for row in range(4) for pair in moves(start[row], after[row], hops)])
    weights = weight_transfers(layer.fabric, pairs[:, 0], pairs[:, 1], float(costs.expert_bytes))
    return layer.fabric, phases, weights, len(pairs)


def simulator(shared: Path) -> Iterator[dict[str, object]]:
    """When regular work and weights are done, by how weights travel."""
    fabric, phases, weights, count = _layers(shared)
    ways: dict[str, Migration | None] = {
        "none": None, "background": "background", "beside": "beside", "waited_for": "waited_for",
    }  # fmt: skip
    for name, way in ways.items():
        ran = run_layers(fabric, phases) if way is None else run_layers(fabric, phases, weights, way)
        ends = {f"layer_{row + 1}_ends_us": f"{1e6 * end:.9f}" for row, end in enumerate(ran.layer_ends)}
        moved = 0 if way is None else count
        yield {"migration": name, "experts_moved": moved} | ends | {"weights_there_us": 1e6 * ran.weights_end}


def stream(shared: Path) -> Iterator[dict[str, object]]:
    """The part of links that is busy over time, inside domains and between them, by stage."""
    fabric, phases, weights, _ = _layers(shared)
    ran = run_layers(fabric, phases, weights, record=True)
    inside = links_inside_domains(layout_of(PLACE), machine_of(PLACE.machine).topology.link_ends)
    edges = np.linspace(0, ran.layer_ends[-1] * 1.05, BINS + 1)
    for where, links in (("inside domains", inside), ("between domains", ~inside)):
        for stage in ("all_reduce", "dispatch", "combine", "migration"):
            busy = _busy(ran, np.flatnonzero(links), stage, edges)
            for begin, share in zip(edges[:-1], busy, strict=True):
                yield {"links": where, "stage": stage, "time_us": 1e6 * begin, "busy_share": share}
    for stage in ("attention", "compute"):
        tasks = np.flatnonzero(np.array(ran.stage) == stage)
        on = [task for task in tasks.tolist() if ran.run.finish[task] > ran.run.start[task]]
        for begin in edges[:-1]:
            running = any(ran.run.start[task] <= begin < ran.run.finish[task] for task in on)
            yield {"links": "dies", "stage": stage, "time_us": 1e6 * begin, "busy_share": float(running)}


def _busy(ran: StreamRun, links: np.ndarray, stage: str, edges: np.ndarray) -> np.ndarray:
    """The part of these links' time between edges that they serve a stage."""
    services = ran.run.services
    assert services is not None
    own = np.isin(services.server, links) & (np.array(ran.stage)[services.task] == stage)
    begin, end = services.begin[own], services.end[own]
    # Busy time up to every edge: all that has begun, less what is still to come of it.
    done = [np.clip(np.minimum(end, edge) - begin, 0, None).sum() for edge in edges]
    return np.diff(done) / np.diff(edges) / len(links)
