"""Energy, area and price of a machine, from its description.

Area and price are linear: a part for every node, and a part for every TFLOP/s, GB/s and GB. Keys that are not stated
add nothing.
"""

from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.config.dies import DieConfig
from jaxmoe.config.graph import GraphConfig
from jaxmoe.config.networks import ClustersConfig, HardwareConfig, MeshConfig, WafersConfig
from jaxmoe.hardware import AbstractTopology, Energy
from jaxmoe.hardware.networks import border_links, link_ends, uplinks
from jaxmoe.units import GIGA, PICO

MEMORY = "memory"  # the name of the level that the die tells of
LINK_OR_LEVEL = "energy_pJ_per_B"


def build_energy(hardware: HardwareConfig, die: DieConfig, topology: AbstractTopology) -> Energy | None:
    """Energies in J/FLOP, J/B and W; `None` where nothing is stated."""
    memory = {level.name: level.energy_pJ_per_B for level in hardware.memory} or {MEMORY: die.memory_energy_pJ_per_B}
    energy = Energy(
        compute=_number(die.energy_pJ_per_FLOP, PICO),
        memory={name: jnp.asarray(each * PICO, jnp.float32) for name, each in memory.items() if each is not None},
        links={kind: each * PICO for kind, each in _per_link(hardware, topology, "energy_pJ_per_B").items()},
        idle=_number(die.idle_W, 1.0),
    )
    known = (energy.compute, energy.idle)
    return energy if energy.memory or energy.links or any(each is not None for each in known) else None


def unstated_energy(hardware: HardwareConfig) -> list[str]:
    """Keys of the machine under which an energy is not stated, and so counts nothing."""
    die = hardware.die
    stated = {f"die.{key}": getattr(die, key, None) for key in ("energy_pJ_per_FLOP", "idle_W")}
    stated |= {f"memory.{level.name}.{LINK_OR_LEVEL}": level.energy_pJ_per_B for level in hardware.memory}
    if not hardware.memory:
        stated["die.memory_energy_pJ_per_B"] = getattr(die, "memory_energy_pJ_per_B", None)
    for kind in ("link", "border", "uplink"):
        if section := getattr(hardware, kind, None):
            stated[f"{kind}.{LINK_OR_LEVEL}"] = section.energy_pJ_per_B
    unstated = [key for key, value in stated.items() if value is None]
    if isinstance(hardware, GraphConfig) and any(link.energy_pJ_per_B is None for link in hardware.links):
        unstated.append(f"links.{LINK_OR_LEVEL}")
    return unstated


def whole_machine(
    hardware: HardwareConfig, topology: AbstractTopology, amount: Literal["area_mm2", "price"]
) -> Float[Array, ""] | None:
    """Area in mm2, or price, of all nodes, memory channels and links together; `None` where nothing is stated."""
    bandwidth = topology.link_bandwidth / GIGA
    links = [each @ bandwidth for each in _per_link(hardware, topology, f"{amount}_per_GB_per_s").values()]
    others = [units * each for units, each in _rates(hardware, amount) if units is not None and each is not None]
    return jnp.asarray(sum([*links, *others]), jnp.float32) if links or others else None


def _rates(hardware: HardwareConfig, amount: str) -> Iterator[tuple[Any, Any]]:
    """Amount and area or price of a unit, of all nodes, compute and memory; `None` where not stated."""
    die, nodes = hardware.die, hardware.num_nodes
    yield nodes, getattr(die, amount)
    yield _of_all_dies(hardware, "compute_TFLOPs_per_s"), getattr(die, f"{amount}_per_TFLOPs_per_s")
    for key, unit in (("bandwidth_GB_per_s", "GB_per_s"), ("capacity_GB", "GB")):
        if not hardware.memory:
            yield _of_all_dies(hardware, f"memory_{key}"), getattr(die, f"memory_{amount}_per_{unit}")
        for level in hardware.memory:
            each = getattr(level, key)
            channels = nodes // level.nodes_per_channel
            yield None if each is None else channels * each, getattr(level, f"{amount}_per_{unit}")


def _of_all_dies(hardware: HardwareConfig, key: str) -> Any:
    """A number of dies, of all nodes together; `None` where it is not stated."""
    each, own = getattr(hardware.die, key), hardware.own_of_dies(key)
    return None if each is None else (hardware.num_nodes - len(own)) * each + sum(own.values())


def _per_link(hardware: HardwareConfig, topology: AbstractTopology, key: str) -> dict[str, Float[Array, " link"]]:
    """Stated values of a key of links, [link] by kind of link: 0 on links of other kinds."""
    found: dict[str, Float[Array, " link"]] = {}
    for kind, where, value in _stated(hardware, topology, key):
        if value is not None:
            before = found.get(kind, jnp.zeros(topology.num_links, jnp.float32))
            found[kind] = before.at[where].set(value)
    return found


def _stated(hardware: HardwareConfig, topology: AbstractTopology, key: str) -> Iterator[tuple[str, np.ndarray, Any]]:
    """Kind, indices and stated value of links; entries for single links come after those for all."""
    if isinstance(hardware, GraphConfig):
        own = [getattr(link, key) for link in hardware.links for _ in link.directions]
        known = any(value is not None for value in own)
        values = jnp.asarray([0.0 if value is None else value for value in own], jnp.float32) if known else None
        yield "link", np.arange(topology.num_links), values
        return
    special = np.zeros(topology.num_links, bool)
    if isinstance(hardware, WafersConfig):
        special = border_links(hardware.wafer_shape, hardware.grid)
        yield "border", np.flatnonzero(special), getattr(hardware.border, key)
    if isinstance(hardware, ClustersConfig):
        special = uplinks(hardware.clusters, hardware.nodes_per_cluster, hardware.spines)
        yield "uplink", np.flatnonzero(special), getattr(hardware.uplink, key)
    yield "link", np.flatnonzero(~special), getattr(hardware.link, key)  # type: ignore[attr-defined]
    if isinstance(hardware, MeshConfig):
        ends = [tuple(each) for each in link_ends(hardware.mesh_shape).tolist()]
        for link in hardware.links:
            those = set(link.numbers(hardware.mesh_shape))
            yield "link", np.flatnonzero([each in those for each in ends]), getattr(link, key, None)


def _number(value: Any, unit: float) -> Float[Array, ""] | None:
    return None if value is None else jnp.asarray(value * unit, jnp.float32)
