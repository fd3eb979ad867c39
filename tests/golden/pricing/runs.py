"""Stored decisions of each kind of run, priced layer by layer or step by step."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.compiling import UNFUSED
from jaxmoe.engine import (
    AbstractDecisions,
    AbstractLayer,
    Decisions,
    Fetches,
    FetchLayer,
    HostDecisions,
    Layer,
    LayerTime,
    Migration,
    Movement,
    RingDecisions,
    SlotDecisions,
    StreamDecisions,
    StreamTokens,
)
from jaxmoe.engine.all_to_all import AllToAllLayer
from jaxmoe.engine.fetch_layer import traffic_figures
from jaxmoe.methods.camoe.system import CAMoERun
from jaxmoe.methods.expert_streaming.loaded_experts import CirculatingRun, LoadedRun, OffloadedRun
from jaxmoe.methods.expert_streaming.system import StreamedRun
from jaxmoe.methods.expert_streaming.trajectories import carried_out, moved_tokens, ring_of
from jaxmoe.methods.moentwine.migration import moves_between
from jaxmoe.methods.moentwine.system import LayoutRun
from jaxmoe.methods.static import PlannedRun
from jaxmoe.methods.wafer_gpu.system import WaferRun
from jaxmoe.network import link_loads
from jaxmoe.placement.slots import EMPTY
from jaxmoe.traces import Batch

from ..store import Arrays
from .figures import figures_of, figures_of_run


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


def price_share(run: PlannedRun, decisions: Arrays, steps: Batch) -> Arrays:
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


def price_slots(run: LayoutRun, decisions: Arrays, steps: Batch) -> Arrays:
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
    return figures_of_run(run, _by_layer(found.__getitem__, layers))


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


def price_fetches(run: WaferRun, decisions: Arrays) -> Arrays:
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
    return figures_of_run(run, time.as_numpy())


@eqx.filter_jit(compiler_options=UNFUSED)
def _steps_of_loads(layer: AbstractLayer, decisions: AbstractDecisions, tokens: Any) -> LayerTime:
    return jax.vmap(jax.vmap(layer.time))(decisions, tokens)


def _steps_first(leaves: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), leaves)


def hosts_of(run: OffloadedRun, decisions: Arrays) -> np.ndarray:
    return np.eye(run.layer.costs.dies, dtype=np.float32)[decisions["hosts"]]


def price_hosts(run: OffloadedRun, decisions: Arrays, steps: Batch) -> Arrays:
    """Whole experts that their dies load."""
    hosts = jnp.asarray(hosts_of(run, decisions))
    count = steps.experts.shape[1]
    decided = HostDecisions(jnp.broadcast_to(hosts, (count, *hosts.shape)), run.method.prefetch)
    return _priced_run(run, decided, _steps_first(run.method.experts.joined(steps)))


def price_circulation(run: CirculatingRun, decisions: Arrays, steps: Batch) -> Arrays:
    """Slices that stay while tokens go round."""
    on_dies = jnp.asarray(decisions["tokens"], jnp.float32)
    ring = tuple(ring_of(run.layer.machine.topology).tolist())
    passing = _steps_first(steps.weight).sum(axis=-1)
    return _priced_run(run, RingDecisions(on_dies, ring, run.method.prefetch), StreamTokens(on_dies, passing))


def price_stream(run: StreamedRun, decisions: Arrays) -> Arrays:
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
        rules=carried_out(run.method.rules, run.method.everywhere),
        moved=moved,
    )
    return _priced_run(run, decided, StreamTokens(before, whole["passing"]))


# Choices of gates.


def price_gate(run: CAMoERun, decisions: Arrays, steps: Batch) -> Arrays:
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
