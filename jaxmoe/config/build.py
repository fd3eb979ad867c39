"""Machines, layer models and tuner settings from validated descriptions, in SI units and float32 arrays.

Numbers of a description may be traced by JAX: a machine is then a function of them that `vmap` and `grad` work on.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.config.base import ConfigError
from jaxmoe.config.dies import DieConfig, FittedGemmConfig, MeasuredGemmConfig, MemoryConfig, TiledGemmConfig
from jaxmoe.config.element_bytes import element_bytes
from jaxmoe.config.energy import build_energy, whole_machine
from jaxmoe.config.files import find_kernels
from jaxmoe.config.graph import GraphConfig, as_graph
from jaxmoe.config.machine import LinkConfig
from jaxmoe.config.model import build_model
from jaxmoe.config.networks import (
    ClustersConfig,
    HardwareConfig,
    MeshConfig,
    OwnNetworkConfig,
    TorusConfig,
    UniformConfig,
    WafersConfig,
)
from jaxmoe.config.schema import DecidingConfig, Scenario
from jaxmoe.config.tuning import TuningConfig
from jaxmoe.engine import Deciding, EvenPart, EvenParts, Layer, LayerCosts, even_attention, schedule_of
from jaxmoe.hardware import (
    AbstractTopology,
    Die,
    Machine,
    MemoryLevel,
    Mesh,
    Router,
    clusters,
    fully_connected,
    node_memory,
    ring,
    switch,
    torus,
    wafers,
)
from jaxmoe.hardware.gpu.files import KernelFileError
from jaxmoe.hardware.gpu.fused import fused_gemm
from jaxmoe.hardware.kernels import AbstractGemm, GemmError, TiledGemm, read_gemm_table
from jaxmoe.hardware.networks import link_ends
from jaxmoe.hardware.topology import filled
from jaxmoe.network import AbstractExchange, Congestion, Contention, build_exchange, passages_of
from jaxmoe.network.contention import Order
from jaxmoe.placement.exchange import ExchangeError
from jaxmoe.settings import made
from jaxmoe.tune.problem import check_exchanges, suited
from jaxmoe.tune.settings import TunerSettings
from jaxmoe.units import GIGA, NANO, TERA

UNIFORM = {"ring": ring, "switch": switch, "fully_connected": fully_connected}
Number = int | float | Float[Array, ""]  # an array where JAX traces it

FFN_FLOPS = {"2hi": 2, "6hi": 6}  # times hidden size times expert size


def build_machine(hardware: HardwareConfig, tokens: int = 1, columns: int = 1) -> Machine:
    """The network, its dies and memory: B/s, s, FLOP/s and B per link, node or channel; its energy, area and price.

    Measured products have to reach so many tokens and columns of an expert. Raises `ConfigError` where they do not,
    and without dies.
    """
    topology, die = build_topology(hardware), hardware.die
    if die is None:
        raise ConfigError(f"{hardware.name}: die is null; expected the compute and memory of a node as a mapping")
    return Machine(
        topology,
        Die(_of_dies(hardware, die, "compute_TFLOPs_per_s", TERA), _gemm(die, tokens, columns), die.overlap),
        _memory(hardware, die),
        energy=build_energy(hardware, die, topology),
        area=whole_machine(hardware, topology, "area_mm2"),
        price=whole_machine(hardware, topology, "price"),
    )


def build_topology(hardware: HardwareConfig) -> AbstractTopology:
    """The network with its ports and what its routers cost: B/s and s per link or node."""
    network, ports, router = _network(hardware), hardware.ports, hardware.router
    return replace(
        network,
        injection_bandwidth=_per_node(ports.injection_GB_per_s, GIGA, network.num_nodes),
        ejection_bandwidth=_per_node(ports.ejection_GB_per_s, GIGA, network.num_nodes),
        endpoint_latency=_number(router.endpoint_latency_ns * NANO),
        efficiency=_number(router.efficiency),
        router=_router(hardware, network),
    )


def _router(hardware: HardwareConfig, network: AbstractTopology) -> Router | None:
    """Its buffers, where they are finite."""
    router, ports = hardware.router, hardware.ports
    if router.num_vcs is None:
        return None
    flit = router.chunk_B if router.flit_B is None else router.flit_B
    assert flit is not None  # or the description would have been refused
    limited = ports.injection_GB_per_s is not None or ports.ejection_GB_per_s is not None
    most = 1 if limited else int(np.bincount(network.link_ends[:, 0])[: network.num_nodes].max())
    return Router(
        num_vcs=_number(router.num_vcs),
        vc_buf_size=_number(router.vc_buf_size),
        flit_bytes=_number(flit),
        internal_speedup=_number(router.internal_speedup),
        credit_delay=_number(router.credit_delay),
        alloc_iters=_number(router.alloc_iters),
        ports_per_node=_number(ports.per_node or most),
        priority=router.priority,
        wormhole=router.switching == "wormhole",
        dateline=router.dateline,
    )


def build_time_model(hardware: HardwareConfig, order: Order | None = None) -> Congestion:
    """The congestion model with the router's switching and chunks, its contention, and an order of messages.

    Contention is there where buffers are finite; messages are then `shuffled` where no order is given.
    """
    router = hardware.router
    chunk, cut_through = _number(0 if router.chunk_B is None else router.chunk_B), router.cuts_through
    if order is None and router.num_vcs is None:
        return Congestion(chunk, cut_through=cut_through)
    topology, known = build_topology(hardware), order or "shuffled"
    ways, ways_back = (passages_of(topology, known, back) for back in (False, True))
    return Contention(chunk, cut_through=cut_through, order=known, ways=ways, ways_back=ways_back)


def build_layer_model(scenario: Scenario, mode: Literal["sharded", "replicated"]) -> Layer:
    """The machine and what one MoE layer of the model costs on it: B and FLOP."""
    model, costs = build_model(scenario.model), scenario.costs
    widths = element_bytes(scenario)
    machine = build_machine(scenario.hardware, scenario.workload.batch_tokens, model.expert_size)
    for name in suited(scenario.tuning.exchanges, machine.topology):
        try:
            check_exchanges((name,), machine.topology, model.num_experts)
        except ExchangeError as error:
            raise ConfigError(f"tuning.exchanges is {name!r}, which does not suit the machine: {error}") from None
    return Layer(
        machine=machine,
        costs=LayerCosts.of(
            model,
            dispatch_bytes_per_element=widths.dispatch,
            combine_bytes_per_element=widths.combine,
            weight_bytes_per_element=widths.experts,
            metadata_bytes_per_choice=costs.metadata_bytes_per_choice,
            products=FFN_FLOPS[costs.ffn_flops] // 2,
            deciding=None if costs.deciding is None else _deciding(costs.deciding),
        ),
        time_model=build_time_model(scenario.hardware),
        exchange=_exchange("costs.exchange", costs.exchange, machine.topology),
        mode=mode,
        schedule=schedule_of(scenario.schedule),
    )


def _deciding(costs: DecidingConfig) -> Deciding:
    return Deciding(_number(costs.ns_per_choice * NANO), _number(costs.B_per_token))


def _exchange(key: str, name: str, topology: AbstractTopology) -> AbstractExchange:
    try:
        return build_exchange(name, topology)
    except ExchangeError as error:
        raise ConfigError(f"{key} is {name!r}, which does not suit the machine: {error}") from None


def build_even_parts(
    scenario: Scenario, context_tokens: float | None = None, cached_tokens: float | None = None
) -> EvenParts:
    """FLOPs, weight bytes and KV cache bytes of the parts that every token passes, over all layers that have them.

    The parts are attention, dense FFNs and shared experts. Raises `ModelError` where the model does not state them.

    FFNs count FLOPs as `costs.ffn_flops` says, attention as `even_attention`, over the context of the workload unless
    another one is given.
    """
    model, costs = build_model(scenario.model), scenario.costs
    context: float | int = scenario.workload.context_tokens if context_tokens is None else context_tokens
    widths = element_bytes(scenario)

    def ffn(parameters: Number) -> EvenPart:
        flops = parameters / 3 * FFN_FLOPS[costs.ffn_flops]  # a gated FFN is three matrices
        return EvenPart(_number(flops), _number(parameters * widths.dense), _number(0))

    return EvenParts(
        machine=build_machine(scenario.hardware),
        attention=even_attention(model, widths, context, cached_tokens).times(model.num_attention_layers),
        dense=ffn(model.num_dense_layers * model.dense_ffn_parameters),
        shared=ffn(len(model.moe_layer_ids) * model.shared_expert_parameters),
    )


def _gemm(die: DieConfig, tokens: int, columns: int) -> AbstractGemm | None:
    match die.gemm:
        case None:
            return None
        case MeasuredGemmConfig(path=path):
            try:
                return read_gemm_table(Path(path), float(tokens), float(columns))
            except GemmError as error:
                raise ConfigError(f"hardware.die.gemm.path: {error}") from None
        case FittedGemmConfig(path=path, backend=backend, precision=precision, kernel=kernel, sheet=sheet):
            peak, top_k = die.compute_TFLOPs_per_s * TERA, float(die.gemm.top_k)
            try:
                return fused_gemm(find_kernels(path), backend, precision, kernel, sheet, peak, top_k)
            except KernelFileError as error:
                raise ConfigError(f"hardware.die.gemm: {error}") from None
        case TiledGemmConfig(tile_tokens=rows, tile_columns=width, startup_ns=startup):
            return TiledGemm(*map(_number, (rows, width, startup * NANO)))
    model: AbstractGemm = made(die.gemm.part, die.gemm.values_of_part(), die.gemm.settings_of_part(die.gemm.part))
    return model


def _memory(hardware: HardwareConfig, die: DieConfig) -> tuple[MemoryLevel, ...]:
    """The memory levels, or the single one that the die's own keys describe."""
    if hardware.memory:
        return tuple(_level(level, hardware.num_nodes) for level in hardware.memory)
    bandwidth, capacity = (
        None if getattr(die, key) is None else _of_dies(hardware, die, key, GIGA)
        for key in ("memory_bandwidth_GB_per_s", "memory_capacity_GB")
    )
    return node_memory(bandwidth, capacity)


def _of_dies(hardware: HardwareConfig, die: DieConfig, key: str, unit: float) -> Float[Array, " node"]:
    """A number of the die of every node, with those that single ones have of their own."""
    own = {node: value * unit for node, value in hardware.own_of_dies(key).items()}
    return _with_own(filled(hardware.num_nodes, getattr(die, key) * unit), own)


def _level(level: MemoryConfig, nodes: int) -> MemoryLevel:
    channels = nodes // level.nodes_per_channel
    return MemoryLevel(
        bandwidth=filled(channels, level.bandwidth_GB_per_s * GIGA),
        latency=filled(channels, level.latency_ns * NANO),
        capacity=_per_node(level.capacity_GB, GIGA, channels),
        channel=jnp.asarray(np.arange(nodes, dtype=np.int32) // level.nodes_per_channel),
        name=level.name,
    )


def _network(hardware: HardwareConfig) -> AbstractTopology:
    """Nodes and links alone."""
    match hardware:
        case MeshConfig():
            return _mesh(hardware)
        case WafersConfig():
            numbers = (*_numbers(hardware.link), *_numbers(hardware.border))
            return replace(wafers(hardware.wafer_shape, hardware.grid, *numbers), routing=hardware.routing)
        case TorusConfig():
            return torus(hardware.mesh_shape, *_numbers(hardware.link))
        case UniformConfig():
            return UNIFORM[hardware.kind](hardware.nodes, *_numbers(hardware.link))
        case ClustersConfig():
            numbers = (*_numbers(hardware.link), *_numbers(hardware.uplink))
            return clusters(hardware.clusters, hardware.nodes_per_cluster, *numbers, hardware.spines)
        case GraphConfig():
            return as_graph(hardware)
        case OwnNetworkConfig():
            return hardware.topology()
    raise ConfigError(f"hardware.kind is {hardware.kind!r}, which no network is made of")


def _mesh(hardware: MeshConfig) -> Mesh:
    """All links alike, but for those that have numbers of their own."""
    index = {(int(a), int(b)): i for i, (a, b) in enumerate(link_ends(hardware.mesh_shape))}
    bandwidth, latency = (filled(len(index), number) for number in _numbers(hardware.link))
    own_bandwidth: dict[int, Number] = {}
    own_latency: dict[int, Number] = {}
    for link in hardware.links:
        for at in (index[ends] for ends in link.numbers(hardware.mesh_shape)):
            if link.bandwidth_GB_per_s is not None:
                own_bandwidth[at] = link.bandwidth_GB_per_s * GIGA
            if link.latency_ns is not None:
                own_latency[at] = link.latency_ns * NANO
    return Mesh(
        _with_own(bandwidth, own_bandwidth),
        _with_own(latency, own_latency),
        shape=hardware.mesh_shape,
        routing=hardware.routing,
    )


def _with_own(common: Float[Array, " each"], own: Mapping[int, Number]) -> Float[Array, " each"]:
    """The numbers of all links, or dies, with those that single ones have of their own, by index."""
    return common.at[np.array([*own])].set(jnp.asarray([*own.values()], jnp.float32)) if own else common


def _numbers(link: LinkConfig) -> tuple[Number, Number]:
    """Bandwidth in B/s and latency in s."""
    return link.bandwidth_GB_per_s * GIGA, link.latency_ns * NANO


def _per_node(value: Number | None, unit: float, count: int) -> Float[Array, " each"] | None:
    return None if value is None else filled(count, value * unit)


def _number(value: Number) -> Float[Array, ""]:
    return jnp.asarray(value, jnp.float32)


def build_tuner_settings(tuning: TuningConfig) -> TunerSettings:
    """The tuner's settings; what is annealed becomes (first, last)."""
    settings: dict[str, Any] = tuning.model_dump(exclude={"p95_weight", "exchanges", "topics", "worst_weight"})
    ends = {name: (value["start"], value["stop"]) for name, value in settings.items() if isinstance(value, dict)}
    return TunerSettings(**(settings | ends))
