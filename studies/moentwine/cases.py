"""One layer's communication under a token layout: a case, and what it takes by Eq. 1, under congestion and simulated.

Balanced gating (moentwine VI-B): every expert is as likely as any other, and every device has as many. FP16 everywhere.
"""

# Units keep their case in names: GB and gb differ.
# ruff: noqa: N815

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from layouts import balanced_counts, token_communication

from jaxmoe.config import HardwareConfig, load_hardware
from jaxmoe.config.build import build_topology
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import (
    Congestion,
    Counts,
    OneByOne,
    Uncongested,
)
from jaxmoe.network.collectives import price_rounds
from jaxmoe.network.token_communication import SlicedExchange, num_homes, scaled
from jaxmoe.placement.token_layout import TokenLayout, hierarchical_layout, successive_layout, token_layout
from jaxmoe.relax import HardMax

HARDWARE = Path(__file__).resolve().parents[2] / "configs" / "hardware"
MICRO = 1e6
STAGES = ("all_reduce", "dispatch", "combine")
VECTOR = 2.0  # bytes of an element: FP16 (VI-A1)
TOKENS = 256  # of a group, as TP grows (VI-B1)


@dataclass(frozen=True)
class Model:
    """What communication knows of a model: Table I and the models' own hidden sizes."""

    experts: int
    top_k: int
    hidden: int


MODELS = {
    "deepseek-v3": Model(256, 8, 7168),
    "qwen3-235b-a22b": Model(128, 8, 4096),
    "deepseek-v2": Model(160, 6, 5120),
    "dbrx": Model(16, 4, 6144),
    "mixtral-8x22b": Model(8, 2, 6144),
}


@dataclass(frozen=True)
class Case:
    """A layout on a machine, with a model and tokens of a group. `rule` is the time model of wafers.

    On switches Eq. 1 knows no shared link, so congestion prices these always.
    """

    machine: str
    layout: str
    model: str = "qwen3-235b-a22b"
    tp: int = 4
    tokens: int = TOKENS
    fetch: str = "domain"
    all_gather: bool | None = None
    rule: str = "eq_1"
    link_GB_per_s: float | None = None  # each way; None: the machine's own
    latency_ns: float = 0.0
    both_ways: bool = True


def hardware_of(machine: str) -> HardwareConfig:
    """A shipped machine, with a change to one of its numbers after a colon where there is one."""
    name, *changes = machine.split(":")
    return load_hardware(HARDWARE / f"{name}.yaml", changes)


@lru_cache
def topology_of(
    machine: str, link_GB_per_s: float | None = None, latency_ns: float = 0.0
) -> tuple[AbstractTopology, float]:
    """A machine's network, and the chunk of its messages, B. A border's bandwidth keeps its part of a link's."""
    hardware = hardware_of(machine)
    topology = build_topology(hardware)
    if topology.grid is not None:
        scale = 1.0 if link_GB_per_s is None else link_GB_per_s / hardware.link.bandwidth_GB_per_s
        topology = replace(
            topology,
            link_bandwidth=topology.link_bandwidth * scale,
            link_latency=jnp.full_like(topology.link_latency, latency_ns * 1e-9),
        )
    return topology, float(hardware.router.chunk_B)


@lru_cache
def layout_of(case: Case) -> TokenLayout:
    """The token layout of a case; on switches groups of successive devices.

    The baseline may slice experts over tiles of neighbours (`baseline_esp`), over its own domains, which have all
    tokens but are wide (`domain_esp`), or over its groups (`group_esp`).
    """
    hardware = hardware_of(case.machine)
    if case.layout == "successive":
        return successive_layout(*clusters_of(case.machine), case.tp)
    shape = hardware.mesh_shape
    wafer = getattr(hardware, "wafer_shape", shape)
    if case.layout == "her_blocks":
        return hierarchical_layout(shape, token_layout("baseline", wafer, case.tp), name="her_blocks")
    if case.layout == "domain_esp":
        return replace(token_layout("baseline", shape, case.tp, wafer), name="esp")
    name = "baseline" if case.layout == "group_esp" else case.layout
    return token_layout(name, shape, case.tp, wafer, case.fetch, case.all_gather)


def clusters_of(machine: str) -> tuple[int, int]:
    """Clusters of a network of switches, and devices of each."""
    hardware = hardware_of(machine)
    return (hardware.clusters, hardware.nodes_per_cluster) if hardware.kind == "clusters" else (1, hardware.num_nodes)


def counts_of(layout: TokenLayout, model: Model, tokens: float, hosts: int | None = None) -> Counts:
    """Vectors that devices get. `hosts` are sets of devices that share sliced experts: a token visits all of a set."""
    clusters = layout.shape[0] if layout.name == "successive" else 1
    homes, nodes = num_homes(layout), layout.num_nodes
    each = tokens * layout.num_groups / homes
    hosts = hosts or (layout.tp if layout.sliced else nodes)
    counts = balanced_counts(each, homes, hosts, clusters, model.experts, model.top_k)
    return Counts(jnp.broadcast_to(counts.node[:, :1], (homes, nodes)), counts.cluster)


@eqx.filter_jit
def _price(communication, topology, counts, tokens, vector):
    """Every stage; of sliced experts also what dispatch fetches before the ring, one all-to-all."""
    stages = communication(topology, counts, tokens, vector, HardMax())
    if isinstance(communication.exchange, SlicedExchange):
        fetched = scaled(communication.exchange.fetched(counts), vector)
        stages["fetch"] = price_rounds(communication.exchanging, topology, fetched, HardMax(), mirrored=True)
    return stages


@lru_cache
def priced(case: Case) -> dict[str, dict[str, np.ndarray]]:
    """Seconds of every stage, and what its links carry, by name."""
    topology, chunk = topology_of(case.machine, case.link_GB_per_s, case.latency_ns)
    layout, model = layout_of(case), MODELS[case.model]
    congestion = Congestion(jnp.asarray(chunk), cut_through=topology.grid is None)
    eq_1 = case.rule == "eq_1" and topology.grid is not None
    models = (OneByOne(), Uncongested()) if eq_1 else (congestion, congestion)
    communication = token_communication(layout, topology, *models, case.both_ways)
    hosts = clusters_of(case.machine)[0] if case.layout == "successive" and case.fetch == "sliced" else None
    if case.layout == "group_esp":
        portion = jnp.full((layout.num_groups, layout.num_nodes), 1 / layout.tp)
        slices = SlicedExchange(communication.exchange, portion, jnp.asarray(layout.ring, jnp.int32))
        communication, hosts = replace(communication, exchange=slices), layout.num_groups
    counts = counts_of(layout, model, float(case.tokens), hosts)
    sizes = (jnp.asarray(float(case.tokens)), jnp.asarray(VECTOR * model.hidden))
    stages = _price(communication, topology, counts, *sizes)
    return {
        name: {"seconds": float(stage.seconds), "link_time": np.asarray(stage.link_time, float),
               "link_bytes": np.asarray(stage.link_bytes, float)}
        for name, stage in stages.items()
    }  # fmt: skip


def microseconds(case: Case) -> dict[str, float]:
    """All-reduce, dispatch, combine and their total, and the closing all-reduce, which the total leaves out."""
    stages = {name: MICRO * float(stage["seconds"]) for name, stage in priced(case).items()}
    return stages | {"total": sum(stages[name] for name in STAGES)}


def best_fetch(case: Case) -> Case:
    """The case with whichever way to fetch is faster: every layout at its own best."""
    if case.layout not in ("baseline", "er", "baseline_esp", "group_esp") or case.all_gather is False:
        return case
    return min(
        (replace(case, fetch=fetch) for fetch in ("domain", "nearest")), key=lambda one: microseconds(one)["total"]
    )


def total(case: Case) -> float:
    """Microseconds of a case at its best way to fetch."""
    return microseconds(best_fetch(case))["total"]


def gain(new: float, old: float) -> float:
    """The part of the old time that is saved."""
    return 1 - new / old
