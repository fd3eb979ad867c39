"""The one place where golden tests touch pricing and methods: small adapters from arrays to figures.

Decisions and figures are plain arrays by name. When code moves, adapt this module alone; the golden files stay.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from oracles.stages import known_attention

from jaxmoe.compiling import UNFUSED
from jaxmoe.config import build_layer_model
from jaxmoe.config.build import build_even_parts
from jaxmoe.engine import (
    AbstractDecisions,
    AbstractLayer,
    Decisions,
    Fetches,
    FetchLayer,
    HostDecisions,
    Layer,
    LayerCosts,
    LayerTime,
    Metadata,
    Migration,
    Movement,
    RingDecisions,
    SlotDecisions,
    StreamDecisions,
    StreamTokens,
    evaluate,
    grouped_attention,
    rollout,
    schedule_of,
)
from jaxmoe.engine.all_to_all import AllToAllLayer
from jaxmoe.engine.copies import replica_model
from jaxmoe.engine.counts import CountModel, paths_of
from jaxmoe.engine.fetch import traffic_figures
from jaxmoe.hardware import Die, Machine, node_memory
from jaxmoe.hardware.networks import wafers
from jaxmoe.methods import RolloutResult, system_of
from jaxmoe.methods.camoe.gated import GatedRun
from jaxmoe.methods.camoe.system import CAMoERun
from jaxmoe.methods.expert_streaming.loaded_experts import CirculatingRun, LoadedRun, OffloadedRun
from jaxmoe.methods.expert_streaming.system import StreamedRun
from jaxmoe.methods.expert_streaming.trajectories import moved_tokens, ring_of
from jaxmoe.methods.forecast import MovingAverage
from jaxmoe.methods.moentwine.balancing import Balancer, Eplb, KeepSlots, ShadowSlots, facts_alone, first_slots
from jaxmoe.methods.moentwine.gradient_slots import GradientSlots, hop_price
from jaxmoe.methods.moentwine.migration import Windows, moves_between
from jaxmoe.methods.moentwine.system import LayoutRun
from jaxmoe.methods.static import PlannedRun
from jaxmoe.methods.wafer_gpu.system import WaferRun
from jaxmoe.network import link_loads
from jaxmoe.network.token_communication import all_reduce_rounds, closing_rounds
from jaxmoe.placement.slots import EMPTY, copies_of_slots
from jaxmoe.placement.token_layout import links_inside_domains, token_layout
from jaxmoe.relax import SmoothMax, SoftSupport
from jaxmoe.traces import Batch
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.bounds import lower_bound

from .store import Arrays, named, under

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "placement_tuning"))
from exchange_bound import exchange_bound

sys.path.pop(0)

Run = Any  # one way to go through iterations


def figures_of(time: LayerTime) -> Arrays:
    """Seconds of stages, of busy resources and in all, and energy, by name."""
    found = {f"stages/{name}": seconds for name, seconds in time.stages.items()}
    for stage, kinds in time.busy.items():
        found |= {f"busy/{stage}/{kind}": seconds for kind, seconds in kinds.items() if seconds is not None}
    found |= {"total": time.total} | {f"energy/{name}": joules for name, joules in time.energy.items()}
    return {name: np.asarray(value) for name, value in found.items()}


# Systems.


def runs_of(scenario: Any, setting: Any) -> dict[str, Run]:
    """The runs that a scenario's system names."""
    section = scenario.system
    settings = section.model_dump(exclude={"name", "plan"})
    return system_of(section.name, **settings).runs(setting)


def with_plan(setting: Any, share: np.ndarray) -> Any:
    """The setting with a stored plan in place of its own."""
    return replace(setting, share=share.astype(np.float32))


def decide(run: Run, steps: Batch) -> tuple[Arrays, Arrays]:
    """What a run decides for steps [layer, step, ...]; and the figures of its own roll-out."""
    rolled = run.rollout(steps)
    own = {f"own/{name}": np.asarray(value) for name, value in rolled.figures.items()}
    return _frozen(run, rolled.kept, steps, rolled.time), _figures_of_run(run, rolled.time) | own


def _figures_of_run(run: Run, time: LayerTime) -> Arrays:
    """Figures of a run, as they were recorded: streams by names of their own, energy without weights that migrate."""
    found = figures_of(time)
    match run:
        case StreamedRun():
            memory = run.layer.machine.memory[-1].name
            busy = {kind: found.pop(f"busy/stream/{kind}") for kind in ("node", "port", "link")}
            found["busy/compute/node"], found["channels"] = busy["node"], found.pop(f"busy/stream/{memory}")
            found["moves"] = np.concatenate([busy["port"], busy["link"]], axis=-1)
        case LayoutRun() if time.energy and "migration" in time.busy:
            machine = run.model.machine
            carried = time.busy["migration"]["link"] * np.asarray(machine.topology.link_rate, float)
            for kind, each in machine.energy.links.items():
                found[f"energy/{kind}"] = found[f"energy/{kind}"] - carried @ np.asarray(each, float)
    return found


def _frozen(run: Run, kept: Any, steps: Batch, time: LayerTime) -> Arrays:
    """What a roll-out kept, by name."""
    match run:
        case GatedRun():
            return {"experts": np.asarray(kept[1])} | named(_frozen(run.inner, kept[0], steps, time), "inner/")
        case PlannedRun():
            found = {"broadcast": kept[0]}
            return found if kept[1] is None else found | {"served": kept[1]}
        case LayoutRun():
            if run.sliced is not None:
                return {"slices": run.sliced, "homes": run.homes}
            found = {name: kept[name] for name in ("slots", "target", "experts_moved", "expert_hops")}
            waited = {"seconds": time.stages["migration"].sum(axis=1), "triggered": kept["triggered"][:, 0]}
            return found | waited | {"homes": run.homes}
        case WaferRun():
            return dict(kept)
        case OffloadedRun():
            return {"hosts": np.asarray(kept).argmax(axis=-1)}
        case CirculatingRun():
            return {"tokens": kept}
        case StreamedRun():
            return _streams(run, kept, steps)
        case CAMoERun():
            return {"experts": kept, "bias": run.bias}
    raise TypeError(f"{type(run).__name__} is not known to golden tests")


def _streams(run: StreamedRun, kept: Any, steps: Batch) -> Arrays:
    passing = run.method.prepare(run.layer, steps)[1]
    found = dict(zip(("tokens", "groups", "following", "loaders", "held"), kept, strict=True))
    found |= {"passing": np.asarray(passing.count).T}
    if run.method.redistribute:
        found |= {"before": np.swapaxes(np.asarray(passing.on_dies), 0, 1).astype(int)}
    return found


def price(run: Run, decisions: Arrays, steps: Batch) -> Arrays:
    """Figures [step, layer, ...] of stored decisions for steps [layer, step, ...]."""
    match run:
        case GatedRun():
            chosen = jnp.asarray(decisions["experts"], jnp.int32)
            return price(run.inner, under(decisions, "inner/"), replace(steps, experts=chosen))
        case PlannedRun():
            return _price_share(run, decisions, steps)
        case LayoutRun():
            return _price_slots(run, decisions, steps)
        case WaferRun():
            return _price_fetches(run, decisions)
        case OffloadedRun():
            return _price_hosts(run, decisions, steps)
        case CirculatingRun():
            return _price_circulation(run, decisions, steps)
        case StreamedRun():
            return _price_stream(run, decisions)
        case CAMoERun():
            return _price_gate(run, decisions, steps)
    raise TypeError(f"{type(run).__name__} is not known to golden tests")


def replay(run: Run, decisions: Arrays, batch: Batch, step: int, row: int) -> Arrays:
    """Seconds of one layer and step in the event simulator, and of weights that travel apart."""
    nothing = LayerTime({}, {}, np.zeros(()))
    rolled = RolloutResult(nothing, _kept(run, decisions))
    if isinstance(run, WaferRun):
        run = replace(run, layer=replace(run.layer, host=None))  # a constant, which the model's figures have
    seconds = {
        "replay": run.replay(rolled, batch, step, row),
        "replay_movement": run.replay_movement(rolled, step, row),
    }
    return {name: np.asarray(value) for name, value in seconds.items()}


def _kept(run: Run, decisions: Arrays) -> Any:
    """Stored decisions as a roll-out would have kept them."""
    match run:
        case GatedRun():
            return _kept(run.inner, under(decisions, "inner/")), decisions["experts"].astype(np.int32)
        case PlannedRun():
            served = decisions.get("served")
            return decisions["broadcast"], None if served is None else served.astype(np.int32)
        case LayoutRun():
            return {"slots": decisions["slots"].astype(np.int32)} if "slots" in decisions else ()
        case WaferRun():
            return decisions | {"requests": decisions["requests"].astype(np.int32)}
        case OffloadedRun():
            return _hosts(run, decisions)
        case CirculatingRun():
            return decisions["tokens"].astype(np.int32)
        case StreamedRun():
            wide = {name: array if array.dtype == bool else array.astype(np.int32) for name, array in decisions.items()}
            return tuple(wide[name] for name in ("tokens", "groups", "following", "loaders", "held"))
        case CAMoERun():
            return decisions["experts"]
    raise TypeError(f"{type(run).__name__} is not known to golden tests")


def _by_layer(of_layer: Callable[[int], LayerTime], layers: int) -> LayerTime:
    """Times [step, layer] from those of the steps of every layer."""
    found = [of_layer(row).as_numpy() for row in range(layers)]
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *found)


def _layer(steps: Batch, row: int) -> Batch:
    return jax.tree.map(lambda leaf: leaf[row], steps)


@eqx.filter_jit
def _steps_of_share(
    model: Layer, share: Any, batches: Batch, exchange: Any, sent: Any, served: Any, hidden: bool, most: int
) -> LayerTime:
    """Times of one layer's steps under one plan, and what is sent and served in each."""

    def step(batch: Batch, sent: Any, served: Any) -> LayerTime:
        movements: tuple[Movement, ...] = ()
        if served is not None:
            destination = jnp.broadcast_to(sent[:, None], share.shape).astype(share.dtype)
            movements = (Movement(destination, hidden, most),)
        return model.time(Decisions(share, exchange, served, movements=movements), batch)

    return jax.vmap(step)(batches, sent, served)


def _price_share(run: PlannedRun, decisions: Arrays, steps: Batch) -> Arrays:
    """A plan, with broadcasts and the nodes that serve choices where a method decides them."""
    setting, served = run.setting, decisions.get("served")
    hidden, most = getattr(run.method, "hidden", False), getattr(run.method, "limit", 0)

    def of_layer(row: int) -> LayerTime:
        exchange = setting.build_exchange(setting.exchange[row])
        serving = None if served is None else jnp.asarray(served[:, row], jnp.int32)
        sent = jnp.asarray(decisions["broadcast"][:, row])
        share = jnp.asarray(setting.share[row], jnp.float32)
        return _steps_of_share(setting.model, share, _layer(steps, row), exchange, sent, serving, hidden, most)

    return figures_of(_by_layer(of_layer, len(setting.share)))


@eqx.filter_jit
def _steps_of_decisions(model: AbstractLayer, decisions: AbstractDecisions, batches: Batch) -> LayerTime:
    """Times of one layer's steps under what was decided in each."""
    return jax.vmap(model.time)(decisions, batches)


def _price_slots(run: LayoutRun, decisions: Arrays, steps: Batch) -> Arrays:
    """Tokens at homes, experts in slots or slices; and the experts that move where inference waits for them."""
    layers, count = steps.experts.shape[:2]
    homes = jnp.asarray(np.broadcast_to(decisions["homes"], (count, *decisions["homes"].shape)), jnp.int32)

    def decided(row: int) -> AbstractDecisions:
        if run.sliced is not None:
            share = np.broadcast_to(decisions["slices"], (count, *decisions["slices"].shape))
            return Decisions(jnp.asarray(share, jnp.float32), source=homes)
        slots = jnp.asarray(decisions["slots"][:, row], jnp.int32)
        migration = Migration(jnp.asarray(carried), jnp.asarray(part[:, row]))
        return SlotDecisions(slots, run.setting.moe.num_experts, homes, migration)

    if run.sliced is None:
        carried, part = _waited_for(run, decisions)
    found = [_steps_of_decisions(run.model, decided(row), _layer(steps, row)) for row in range(layers)]
    return _figures_of_run(run, _by_layer(found.__getitem__, layers))


def _waited_for(run: LayoutRun, decisions: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Experts that every link carries while inference waits, [step, link], and each layer's part of them."""
    topology, balancer, slots = run.model.machine.topology, run.balancer, decisions["slots"].astype(np.int32)
    carried = np.zeros((len(slots), topology.num_links), np.float32)
    part = np.zeros(slots.shape[:2], np.float32)
    if balancer.windows is not None:  # weights travel on idle links
        return carried, part
    moved = jax.jit(lambda before, after: moves_between(before, after, balancer.distance, balancer.entry))
    held = np.asarray(balancer.start)
    for step in np.flatnonzero(decisions["triggered"]):
        moves = moved(held, slots[step])
        carried[step] = link_loads(topology, moves.traffic)
        part[step] = np.asarray(moves.per_layer) / max(float(moves.per_layer.sum()), 1)
        held = np.where(slots[step] == EMPTY, held, slots[step])
    return carried, part


@eqx.filter_jit
def _fetched(layer: FetchLayer, fetches: Fetches) -> LayerTime:
    return jax.vmap(jax.vmap(layer.time))(fetches)


def _price_fetches(run: WaferRun, decisions: Arrays) -> Arrays:
    """Who computes what and reads it from where, in double precision; and a host that is asked."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(array, float) for name, array in decisions.items() if name != "home"}
        fetches = Fetches(home=jnp.asarray(decisions["home"], jnp.int32), **wide)
        time, traffic = _fetched(run.layer, fetches), traffic_figures(run.layer, fetches)
    return figures_of(time.as_numpy()) | {f"traffic/{name}": np.asarray(value) for name, value in traffic.items()}


# Experts that are loaded anew in every step.


def _priced_run(run: LoadedRun, decisions: AbstractDecisions, tokens: Any) -> Arrays:
    """Figures of decisions and tokens [step, layer, ...]."""
    time = _steps_of_loads(run.layer, decisions, tokens)
    return _figures_of_run(run, time.as_numpy())


@eqx.filter_jit(compiler_options=UNFUSED)
def _steps_of_loads(layer: AbstractLayer, decisions: AbstractDecisions, tokens: Any) -> LayerTime:
    return jax.vmap(jax.vmap(layer.time))(decisions, tokens)


def _steps_first(leaves: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), leaves)


def _hosts(run: OffloadedRun, decisions: Arrays) -> np.ndarray:
    return np.eye(run.layer.costs.dies, dtype=np.float32)[decisions["hosts"]]


def _price_hosts(run: OffloadedRun, decisions: Arrays, steps: Batch) -> Arrays:
    """Whole experts that their dies load."""
    hosts = jnp.asarray(_hosts(run, decisions))
    count = steps.experts.shape[1]
    decided = HostDecisions(jnp.broadcast_to(hosts, (count, *hosts.shape)), run.method.prefetch)
    return _priced_run(run, decided, _steps_first(run.method.experts.joined(steps)))


def _price_circulation(run: CirculatingRun, decisions: Arrays, steps: Batch) -> Arrays:
    """Slices that stay while tokens go round."""
    on_dies = jnp.asarray(decisions["tokens"], jnp.float32)
    ring = tuple(ring_of(run.layer.machine.topology).tolist())
    passing = _steps_first(steps.weight).sum(axis=-1)
    return _priced_run(run, RingDecisions(on_dies, ring, run.method.prefetch), StreamTokens(on_dies, passing))


def _price_stream(run: StreamedRun, decisions: Arrays) -> Arrays:
    """Micro-slices that go round along trajectories, in the order of groups."""
    whole = {name: jnp.asarray(array, jnp.float32) for name, array in decisions.items() if name != "groups"}
    on_dies, loaders = whole["tokens"], whole["loaders"]
    before = whole.get("before", on_dies)
    moved = jax.vmap(jax.vmap(moved_tokens))(before, on_dies) if run.method.redistribute else None
    decided = StreamDecisions(
        on_dies=on_dies,
        needed=(on_dies > 0).astype(jnp.float32),
        following=jax.nn.one_hot(whole["following"].astype(jnp.int32), run.costs.dies),
        loaders=loaders / jnp.maximum(loaders.sum(axis=-1, keepdims=True), 1),
        held=whole["held"],
        groups=jnp.asarray(decisions["groups"], jnp.int32),
        rules=run.method.rules,
        moved=moved,
    )
    return _priced_run(run, decided, StreamTokens(before, whole["passing"]))


# Choices of gates.


def _price_gate(run: CAMoERun, decisions: Arrays, steps: Batch) -> Arrays:
    """The choices of a gate [step, layer, token, k], whose tokens go to whole experts."""
    model = run.setting.model
    exchange = run.system.exchange(model, run.trace.num_experts)
    layer = AllToAllLayer(model.machine, model.costs, exchange, model.schedule, run.system.copies)

    def of_layer(row: int) -> LayerTime:
        chosen = jnp.asarray(decisions["experts"][:, row], jnp.int32)
        share = jnp.asarray(run.setting.share[row], jnp.float32)
        decided = Decisions(jnp.broadcast_to(share, (len(chosen), *share.shape)), experts=chosen)
        return _steps_of_decisions(layer, decided, _layer(steps, row))

    return figures_of(_by_layer(of_layer, len(run.setting.share)))


# Layers and plans without a system.


def price_plans(model: Layer, shares: np.ndarray, exchange: Any, batches: Batch) -> Arrays:
    """Plans [plan, layer, expert, node] under one exchange, on batches [layer, batch, ...] whose equal tokens merge."""
    plans, layers, experts, _ = shares.shape
    merged = model.merged(batches, experts, exchange)
    many = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * plans), merged)
    rows = jnp.asarray(shares.reshape(plans * layers, *shares.shape[2:]), jnp.float32)
    time = evaluate(model, rows, many, exchange).as_numpy()
    return figures_of(jax.tree.map(lambda leaf: leaf.reshape(plans, layers, *leaf.shape[1:]), time))


@eqx.filter_jit
def _with_movements(model: Layer, share: Any, batch: Batch, destination: Any) -> dict[str, LayerTime]:
    moved = {"alone": (), "hidden": (Movement(destination, True),), "charged": (Movement(destination),)}
    return {name: model.time(Decisions(share, movements=each), batch) for name, each in moved.items()}


def price_schedules(ready: Any, names: tuple[str, ...], share: np.ndarray, destination: np.ndarray, batch: Batch):
    """One layer with attention, its all-reduce and metadata beside its experts, by schedule and movement."""
    model, scenario = ready.inputs.model, ready.inputs.scenario
    layout = token_layout("er", model.machine.topology.shape, 4)
    attention = grouped_attention(
        ready.inputs.moe,
        layout.tp,
        layout.num_groups,
        float(scenario.workload.context_tokens),
        all_reduce_rounds(layout, True),
        bytes_per_element=2.0,
        weight_bytes_per_element=1.0,
        closing=closing_rounds(layout, True),
    )
    given = tuple(jnp.asarray(each, jnp.float32) for each in (share, destination))
    found: Arrays = {}
    for name in names:
        extras = (attention, Metadata(jnp.asarray(64.0)))
        own = replace(model, schedule=schedule_of(name), extras=extras)
        for kind, time in _with_movements(own, given[0], batch, given[1]).items():
            found |= named(figures_of(time), f"{name}/{kind}/")
    return found


def slopes(model: Layer, share: np.ndarray, batch: Batch) -> Arrays:
    """The total of a relaxed layer, and its derivatives by links, dies and shares, in double precision."""
    with jax.enable_x64(True):
        wide = partial(
            jax.tree.map, lambda leaf: jnp.asarray(leaf, float) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        )
        numbers, rest = eqx.partition((model, batch), eqx.is_array)
        model, batch = eqx.combine(wide(numbers), rest)

        @jax.jit
        def total(bandwidth: Any, flops: Any, share: Any) -> Any:
            places = (model.machine.topology.link_bandwidth, model.machine.die.flops)
            assert places[0].shape == bandwidth.shape
            changed = eqx.tree_at(
                lambda m: (m.machine.topology.link_bandwidth, m.machine.die.flops), model, (bandwidth, flops)
            )
            return changed(share, batch, None, SmoothMax(0.05), SoftSupport(0.1)).total

        at = (model.machine.topology.link_bandwidth, model.machine.die.flops, jnp.asarray(share, float))
        value, each = jax.value_and_grad(total, argnums=(0, 1, 2))(*at)
    return {"total": np.asarray(value)} | dict(zip(("bandwidth", "flops", "share"), map(np.asarray, each), strict=True))


def even_parts(ready: Any, tokens: tuple[float, ...]) -> Arrays:
    """Seconds beside routed experts of a step of so many tokens."""
    parts = build_even_parts(ready.inputs.scenario)
    seconds = [parts(jnp.asarray(count)) for count in tokens]
    return {name: np.array([float(getattr(each, name)) for each in seconds]) for name in seconds[0]._fields}


def bounds(ready: Any, share: np.ndarray, batches: Batch) -> Arrays:
    """Times that nothing beats: of any plan, and of any exchange of this one."""
    inputs = ready.inputs
    problem = PlacementProblem(inputs.model, inputs.trace, inputs.scenario.workload.batch_tokens)
    of_layer = [jax.tree.map(lambda leaf, at=row: leaf[at], batches) for row in range(len(share))]
    exchange = [exchange_bound(inputs.model, plan, each) for plan, each in zip(share, of_layer, strict=True)]
    return {"any_plan": lower_bound(problem, batches), "any_exchange": np.stack(exchange)}


# Copies of experts, from loads.


def copies_model(scenario: Any, choice: str) -> Any:
    """The model of copies on a scenario's machine, whose tokens live on all ranks alike."""
    return replica_model(build_layer_model(scenario, "sharded"), choice)


def price_copies(model: Any, slots: np.ndarray, before: np.ndarray, loads: np.ndarray) -> Arrays:
    """Slots [layer, slot] for loads [layer, batch, expert], and moving to them from those before."""
    nodes, experts = model.layer.machine.num_nodes, loads.shape[2]
    held, first = (jnp.asarray(copies_of_slots(each, experts, nodes), jnp.float32) for each in (slots, before))

    @eqx.filter_jit
    def layers(held: Any, first: Any, loads: Any) -> tuple[LayerTime, Any]:
        return jax.lax.map(
            lambda given: (model(given[0], given[2]), model.moving(given[0], given[1])), (held, first, loads)
        )

    time, moving = layers(held, first, jnp.asarray(loads, jnp.float32))
    return figures_of(time) | {"moving": np.asarray(moving)}


# Slots on counts.

WAFER, DIES, LAYERS = (4, 4), 16, 3


def count_model(schedule: str) -> CountModel:
    """A small wafer with entwined rings, whose links are slow beside its dies."""
    topology = wafers(WAFER, (1, 1), 1e9, 1e-8, 1e9, 1e-8)
    memory = node_memory(jnp.full(DIES, 1e10), jnp.full(DIES, 1e6))
    machine = Machine(topology, Die(jnp.full(DIES, 1e12)), memory)
    costs = LayerCosts(*(jnp.asarray(value) for value in (64.0, 32.0, 5e3, 1e6, 128.0, 3.0)))
    parts = token_layout("er", WAFER, 4).parts
    before = known_attention(jnp.asarray(1e-5), jnp.asarray(2e-6), jnp.full(topology.num_links, 1e-6))
    paths = paths_of(topology, parts)
    return CountModel(machine, costs, jnp.asarray(parts), paths, before, schedule_of(schedule))


def price_counts(schedule: str, slots: np.ndarray, loads: np.ndarray) -> Arrays:
    """Slots [case, node, slot] for loads [case, expert], of all groups alike, or [case, group, expert]."""
    model = count_model(schedule)
    time = jax.jit(jax.vmap(model))(jnp.asarray(slots, jnp.int32), jnp.asarray(loads, jnp.float32))
    return figures_of(time)


def balance(name: str, invasive: bool, loads: np.ndarray) -> Arrays:
    """A balancer over loads [step, layer, expert]: times, moves, imbalance."""
    model = count_model("serial")
    distance = jnp.asarray(model.machine.topology.hop_counts(), jnp.float32)
    price = hop_price(model.machine, model.costs.expert_bytes)
    rules = {
        "none": KeepSlots,
        "eplb": Eplb,
        "greedy": lambda: ShadowSlots(distance, 1, "coldest"),
        "topology_aware": lambda: ShadowSlots(distance, 1, "nearest"),
        "gradient": lambda: GradientSlots(model, distance, jnp.asarray(10.0), price * (1.0 if invasive else 0.1), 1),
    }
    inside = links_inside_domains(token_layout("er", WAFER, 4), model.machine.topology.link_ends)
    balancer = Balancer(
        rule=rules[name](),
        forecast=MovingAverage(jnp.full((LAYERS, DIES), 1 / DIES), jnp.asarray(0.5)),
        start=jnp.asarray(first_slots(np.broadcast_to(np.eye(DIES), (LAYERS, DIES, DIES)), 1)),
        distance=distance,
        alpha=jnp.asarray(np.inf if name == "none" else 0.1, jnp.float32),
        beta=jnp.asarray(1.0),
        windows=None if invasive else Windows.alternating(inside),
        expert_bytes=model.costs.expert_bytes,
        experts=DIES,
    )
    ran = rollout(balancer, model, jnp.swapaxes(jnp.asarray(loads, jnp.float32), 0, 1), keep=facts_alone)
    facts = {name: np.asarray(fact) for name, fact in ran.kept.items()}
    whole = {name: facts.pop(name)[:, 0] for name in ("imbalance", "triggered", "needed")}  # of all layers
    waited = np.asarray(ran.time.stages["migration"]).sum(axis=1)
    return figures_of(ran.time) | facts | whole | {"seconds": waited}
