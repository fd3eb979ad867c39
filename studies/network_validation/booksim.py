"""Every BookSim2 record, as the model and as the event simulator tell it, in cycles."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import build_time_model, build_topology, load_hardware
from jaxmoe.des import Fabric, fabric_of, replay_traffic
from jaxmoe.des.traffic import Order, messages_of
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import AbstractTimeModel
from jaxmoe.relax import HardMax

HARDWARE = Path(__file__).resolve().parents[2] / "configs" / "hardware"
FOUR_PORTS = ("ports.injection_GB_per_s=null", "ports.ejection_GB_per_s=null", "ports.per_node=4")
IDEAL = ("router.num_vcs=null", "router.switching=cut_through")


@dataclass(frozen=True)
class Variant:
    """A set-up that BookSim ran: the router, whether ports limit, and the order of a source's messages."""

    name: str
    hardware: str
    overrides: tuple[str, ...] = ()
    order: Order = "shuffled"


VARIANTS = (
    Variant("vc4s2_shuffle", "booksim2_s2"),
    Variant("vc4s2_wide_ni", "booksim2_s2", FOUR_PORTS),
    Variant("vc4_shuffle", "booksim2_base"),
    Variant("vc4_staggered", "booksim2_base", order="staggered"),
    Variant("vc4_by_dest", "booksim2_base", order="by_destination"),
    Variant("vc1_shuffle", "booksim2_base", ("router.num_vcs=1",)),
    Variant("vc2b8_shuffle", "booksim2_base", ("router.num_vcs=2", "router.vc_buf_size=8")),
    Variant("vc4_wide_ni", "booksim2_base", FOUR_PORTS),
)


@eqx.filter_jit
def predict(model: AbstractTimeModel, topology: AbstractTopology, traffic: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Completion of many matrices [matrix, N, N] at once, and the part of it that is load: [matrix] each."""

    def one(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        stage = model(topology, matrix)
        return stage.total(HardMax()), stage.total(HardMax()) - stage.path_delay

    return jax.vmap(one)(traffic)


def booksim_rows(folder: Path) -> Iterator[dict[str, object]]:
    """Rows of all variants, mesh shape by mesh shape: one call of the model for each."""
    shapes = defaultdict(list)
    for record in json.loads((folder / "index.json").read_text()):
        shapes[record["rows"], record["cols"]].append(record)
    with np.load(folder / "matrices.npz") as matrices:
        for variant in VARIANTS:
            for shape, records in shapes.items():
                measured = [record for record in records if variant.name in record["completion"]]
                traffic = np.stack([matrices[record["id"]] for record in measured]).astype(float)
                yield from _rows(variant, shape, measured, traffic)


def router(
    variant: Variant, shape: tuple[int, int], ideal: bool = False
) -> tuple[AbstractTopology, AbstractTimeModel, Fabric]:
    """The network, the model of its time, and the network as the simulator sees it; `ideal`: with unbounded buffers."""
    changes = [f"mesh_shape=[{shape[0]},{shape[1]}]", *variant.overrides, *(IDEAL if ideal else ())]
    hardware = load_hardware(HARDWARE / f"{variant.hardware}.yaml", changes)
    topology = build_topology(hardware)
    fabric = fabric_of(topology, float(hardware.router.chunk_B), cut_through=True)
    return topology, build_time_model(hardware, None if ideal else variant.order), fabric


def _rows(
    variant: Variant, shape: tuple[int, int], records: list[dict], traffic: np.ndarray
) -> Iterator[dict[str, object]]:
    """Shuffled orders are those of the reference: the mean over its seeds."""
    topology, model, fabric = router(variant, shape)
    plain_topology, plain, unbounded = router(variant, shape, ideal=True)
    matrices = jnp.asarray(traffic, jnp.float32)
    told, without = (predict(*each, matrices)[0].tolist() for each in ((model, topology), (plain, plain_topology)))
    load = predict(plain, plain_topology, matrices)[1].tolist()
    for row, (record, matrix) in enumerate(zip(records, traffic, strict=True)):
        measured = np.atleast_1d(record["completion"][variant.name])
        seeds = range(len(measured))
        yield {
            "reference": "booksim2",
            "variant": variant.name,
            "class": record["cls"],
            "record": record["id"],
            "measured": float(measured.mean()),
            "model": told[row],
            "congestion": without[row],
            "model_load": load[row],
            "des": _mean([replay_traffic(fabric, matrix, variant.order, seed).completion_s for seed in seeds]),
            "unbounded": replay_traffic(unbounded, matrix, variant.order).completion_s,
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# What makes the worst case: who has the busiest port, and when.

BINS = 80


def worst_case_rows(folder: Path) -> Iterator[dict[str, object]]:
    """Flits per cycle at the busiest port of the MoE record that exceeds its load most, by the link they come from.

    On the base router, with finite and with unbounded buffers.
    """
    variant = next(variant for variant in VARIANTS if variant.name == "vc4_shuffle")
    records = [r for r in json.loads((folder / "index.json").read_text()) if r["cls"] == "moe_dispatch"]
    load = [max(r["max_link_load"], r["max_inject"], r["max_eject"]) for r in records]
    number = int(np.argmax([r["completion_cycles"] / busy for r, busy in zip(records, load, strict=True)]))
    record = records[number]
    with np.load(folder / "matrices.npz") as matrices:
        traffic = matrices[record["id"]].astype(float)
    hot = int(traffic.sum(axis=0).argmax())
    bins = np.linspace(0, record["completion_cycles"], BINS + 1)
    for buffers, ideal in (("finite", False), ("unbounded", True)):
        _, _, fabric = router(variant, (record["rows"], record["cols"]), ideal)
        replay = replay_traffic(fabric, traffic, variant.order, record=True)
        source, _, size, _ = messages_of(traffic, variant.order, fabric.chunk_bytes)
        services = replay.run.services
        assert services is not None
        at = services.server == fabric.ejection + hot
        task, end = services.task[at], services.end[at]
        last = np.array([(fabric.routes[int(s), hot] or (-1,))[-1] for s in source[task]])
        for link in np.unique(last):
            flits = np.histogram(end[last == link], bins, weights=size[task][last == link])[0] / np.diff(bins)
            for when, rate in zip(bins[1:], flits, strict=True):
                yield {
                    "record": record["id"],
                    "load_cycles": load[number],
                    "booksim2_cycles": record["completion_cycles"],
                    "node": hot,
                    "buffers": buffers,
                    "from_node": int(fabric.ends[link, 0]),
                    "cycle": f"{when:.0f}",
                    "flits_per_cycle": f"{rate:.4f}",
                }
