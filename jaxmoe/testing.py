"""Conformance of parts of one's own: each check carries out what the package will do with a part.

    from jaxmoe.testing import check_topology

    def test_my_network():
        check_topology(Dragonfly.uniform(50e9, 1e-7, groups=4))

A check prices the part, compares its slopes with finite differences, bounds it and replays it in the event simulator,
as far as this means something for its kind. It raises `BrokenPromiseError`, which says what was promised, what came out
and what to mend, and returns what it has found.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe import api
from jaxmoe.des.exchanges import SIMULATED
from jaxmoe.engine import AbstractMethod, Decisions, Layer, LayerTime
from jaxmoe.errors import InputError
from jaxmoe.experiment.evaluation import describe_model
from jaxmoe.hardware import AbstractGemm, AbstractTopology, Mesh
from jaxmoe.models import MoEModel
from jaxmoe.network import AbstractExchange, link_loads, path_sums
from jaxmoe.placement.named import PlacementStrategy, StrategySettings
from jaxmoe.relax import SmoothMax, SoftSupport
from jaxmoe.traces import Batch, GatingTrace, load_counts, sample_batches, synthetic_trace
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.bounds import lower_bound

TOKENS, EXPERTS, TOP_K = 64, 8, 2
CLOSE = 1e-3  # of slopes against differences in double precision
REPLAYED = 0.02  # of model against simulator


class BrokenPromiseError(InputError):
    """A part that does not do what its kind promises."""


@dataclass(frozen=True)
class Report:
    """Seconds of the model and of the simulator, a lower bound, and why one of these is missing."""

    seconds: float
    simulated: float | None = None
    bound: float | None = None
    notes: tuple[str, ...] = ()


def _promise(kept: object, told: str) -> None:
    if not kept:
        raise BrokenPromiseError(told)


# What parts are tried on.


def _model() -> MoEModel:
    return MoEModel("tried", 4096, 128, EXPERTS, TOP_K, (0,), 1)


def _trace() -> GatingTrace:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K}
    return synthetic_trace(512, range(1), skew=0.5, coactivation=0.2, reuse=0.1, seed=0, **sizes)


def _layer(topology: AbstractTopology, exchange: str | AbstractExchange, gemm: AbstractGemm | None = None) -> Layer:
    machine = api.machine(topology, 1e12, memory_bandwidth=1e12, gemm=gemm)
    return api.layer(machine, _model(), exchange, cut_through=True)


def _placed(layer: Layer) -> tuple[Float[Array, "layer expert node"], Batch]:
    """Experts dealt over the nodes, half of each on the next node; and batches."""
    nodes = layer.machine.num_nodes
    share = np.zeros((1, EXPERTS, nodes), np.float32)
    expert = np.arange(EXPERTS)
    np.add.at(share[0], (expert, expert % nodes), 0.5)
    np.add.at(share[0], (expert, (expert + 1) % nodes), 0.5)
    return jnp.asarray(share), sample_batches(_trace(), TOKENS, 3, seed=1)


def _timed(layer: Layer, **options: Any) -> LayerTime:
    share, batches = _placed(layer)
    time = api.evaluate(layer, share, batches, **options)
    for name, seconds in time.stages.items():
        _promise(np.isfinite(seconds).all() and (np.asarray(seconds) >= 0).all(), f"stage {name} takes {seconds}, s")
    return time


def _check_slopes(function: Callable[[Array], Array], at: Array, what: str) -> None:
    """The slope along a random direction against a central difference, in double precision."""
    with jax.enable_x64(True):
        function = jax.jit(function)
        point = jnp.asarray(np.asarray(at), float)
        direction = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.0, point.shape)) * point
        slope = jnp.vdot(jax.grad(function)(point), direction)
        step = 1e-5
        difference = (function(point + step * direction) - function(point - step * direction)) / (2 * step)
        _promise(bool(jnp.isfinite(slope)), f"the slope with respect to {what} is {slope}; avoid 0/0 and hard choices")
        scale = max(abs(float(difference)), 1e-6 * abs(float(function(point))))
        off = abs(float(slope - difference)) / scale
        _promise(
            off < CLOSE,
            f"the slope with respect to {what} is {float(slope):.6g}, but differences give {float(difference):.6g}",
        )


def _wide(tree: object) -> Any:
    """Numbers in double precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), float) if eqx.is_inexact_array(leaf) else leaf, tree)


def _check_link_slopes(layer: Layer) -> None:
    """Slopes of a relaxed layer with respect to all bandwidths of links."""
    share, batches = _placed(layer)
    with jax.enable_x64(True):
        wide, batch = _wide(layer), jax.tree.map(lambda leaf: leaf[0, 0], _wide(batches))
        share = jnp.asarray(np.asarray(share[0]), float)
        soft = {"reduction": SmoothMax(jnp.asarray(0.1)), "support": SoftSupport(jnp.asarray(0.1))}

        def total(bandwidth: Array) -> Array:
            changed = eqx.tree_at(lambda each: each.machine.topology.link_bandwidth, wide, bandwidth)
            return changed(share, batch, **soft).total

        # Links that differ a little: a relaxed maximum has a kink where its largest values are equal.
        bandwidth = wide.machine.topology.link_bandwidth
        uneven = np.random.default_rng(1).uniform(0.95, 1.05, bandwidth.shape)
        _check_slopes(total, bandwidth * uneven, "link_bandwidth")


def _replayed(layer: Layer, time: LayerTime) -> float:
    """Mean seconds of the same batches in the event simulator, within 2 % of the model's."""
    from jaxmoe.des import fabric_of, replay_plan

    share, batches = _placed(layer)
    fabric = fabric_of(layer.machine.topology, None, cut_through=True)
    described = describe_model(layer, fabric, layer.mode, layer.exchange.described)
    (row,) = replay_plan(described, np.asarray(share), batches)
    seen = float(np.mean([each.total_s for each in row]))
    told = float(time.total.mean())
    _promise(
        abs(told / seen - 1) < REPLAYED,
        f"the model has {told:.6g} s, the event simulator {seen:.6g} s: more than {100 * REPLAYED:g} % apart",
    )
    return seen


# Checks of every kind of part.


def check_topology(topology: AbstractTopology) -> Report:
    """Links, paths and loads of a network; a layer on it priced, differentiated and replayed."""
    ends, nodes = np.asarray(topology.link_ends), topology.num_nodes
    back = np.asarray(topology.reverse_links)
    _promise((ends[back] == ends[:, ::-1]).all(), "reverse_links names links that do not run the other way")
    hops = np.asarray(topology.hop_counts())
    ones = path_sums(topology, jnp.ones(len(ends)))
    _promise(np.allclose(ones, hops), "hop_counts() and paths() differ in the length of a path")
    traffic = jnp.ones((nodes, nodes)) - jnp.eye(nodes)
    carried = float(link_loads(topology, traffic).sum())
    _promise(np.isclose(carried, hops.sum()), f"links carry {carried:g} vectors, but paths have {hops.sum()} hops")
    layer = _layer(topology, "reduce_scatter")
    time = _timed(layer)
    _check_link_slopes(layer)
    return Report(float(time.total.mean()), _replayed(layer, time))


def check_exchange(name: str, topology: AbstractTopology | None = None) -> Report:
    """A registered exchange: priced, differentiated, bounded, and replayed where the simulator can carry it out."""
    network = Mesh.uniform(50e9, 1e-7, shape=(2, 4)) if topology is None else topology
    layer = _layer(network, name)
    time, notes, simulated = _timed(layer), [], None
    _check_link_slopes(layer)
    share, batches = _placed(layer)
    problem = PlacementProblem(layer, _trace(), TOKENS, exchanges=())
    bound = float(lower_bound(problem, batches).mean())
    told = float(time.total.mean())
    _promise(
        not layer.exchange.complete or bound <= told * (1 + 1e-6),
        f"a layer takes {told:.6g} s, below the bound {bound:.6g} s of any exchange that is {_kind(layer.exchange)}; "
        "correct merges, unicast or complete",
    )
    merged = layer.merged(batches, EXPERTS)
    same = float(api.engine.evaluate(layer, share, merged).total.mean())
    _promise(np.isclose(told, same, rtol=1e-4), f"merged, tokens that are alike take {same:.6g} s, not {told:.6g}")
    if name in SIMULATED:
        simulated = _replayed(layer, time)
    else:
        notes.append(
            f"the simulator does not know how to carry out {name}; register it in jaxmoe.des.exchanges.SIMULATED"
        )
    return Report(told, simulated, bound, tuple(notes))


def _kind(exchange: AbstractExchange) -> str:
    return f"merging ({exchange.merges}), unicast ({exchange.unicast})"


def check_strategy(
    strategy: PlacementStrategy | Callable[..., Any], topology: AbstractTopology | None = None
) -> Report:
    """A placement strategy: legal shares, which a layer can be timed under."""
    network = Mesh.uniform(50e9, 1e-7, shape=(2, 4)) if topology is None else topology
    made = strategy if isinstance(strategy, PlacementStrategy) else PlacementStrategy(strategy)
    share = np.asarray(made.share(load_counts(_trace()).counts[0], network, StrategySettings(0, 2)))
    wanted = (1, EXPERTS, network.num_nodes)
    _promise(share.shape == wanted, f"shares have the shape {share.shape}, expected {wanted}, [layer, expert, node]")
    _promise((share >= 0).all(), f"shares are {share.min()} at least, expected none below 0")
    _promise(np.allclose(share.sum(axis=-1), 1, atol=1e-4), "shares of an expert do not sum to 1 over nodes")
    layer = replace(_layer(network, "lowest_host"), mode=made.mode)
    batches = sample_batches(_trace(), TOKENS, 3, seed=1)
    return Report(float(api.evaluate(layer, jnp.asarray(share, jnp.float32), batches).total.mean()))


def check_kernel_model(gemm: AbstractGemm) -> Report:
    """Seconds of products: none without tokens, never less for more of them; slopes; and replayed."""
    rows, ones, columns = jnp.arange(64.0), jnp.ones(64), jnp.asarray(128.0)
    seconds = gemm.seconds(rows, ones, jnp.minimum(rows, 1), jnp.asarray(1e9), columns, jnp.asarray(3.0))
    _promise(seconds.shape == rows.shape, f"seconds have the shape {seconds.shape}, expected {rows.shape}")
    _promise(bool(jnp.isfinite(seconds).all()), "seconds are not finite")
    _promise(
        float(seconds[0]) == 0,
        f"no tokens take {seconds[0]} s; multiply what does not depend on rows by present",
    )
    _promise(bool((jnp.diff(seconds[1:]) >= -1e-12).all()), "more tokens take less time")
    layer = _layer(Mesh.uniform(50e9, 1e-7, shape=(2, 4)), "lowest_host", gemm)
    time = _timed(layer)
    return Report(float(time.total.mean()), _replayed(layer, time))


def check_method(method: AbstractMethod, layer: Layer, steps: Batch) -> Report:
    """A method: states that keep their shapes, decisions that are priced under one scan, and a step replayed.

    Steps are [layer, step, ...], such as `jm.sample_batches` draws.
    """
    run = api.rollout(method, layer, steps)
    jax.clear_caches()  # what is drawn while JAX traces a function would be drawn but once
    again = api.rollout(method, layer, steps)
    for one, other in zip(jax.tree.leaves(run.time), jax.tree.leaves(again.time), strict=True):
        _promise(np.array_equal(one, other, equal_nan=True), "two runs differ; draw from a key in the state")
    _promise(np.isfinite(run.time.total).all(), "a step's time is not finite")
    told = float(run.time.total.mean())
    if not isinstance(run.decisions, Decisions):
        return Report(told, notes=(f"{type(run.decisions).__name__} is not replayed from here",))
    if method.differentiable:
        slope = eqx.filter_grad(lambda each: api.rollout(method, each, steps).time.total.mean())(layer)
        finite = [np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope.machine)]
        _promise(all(finite), "slopes with respect to the machine are not finite; state differentiable = False")
    seen = api.replay(run, step=0)
    simulated = float((seen.seconds + seen.movement).mean())
    stages = float(sum(np.mean(seconds[0]) for seconds in run.time.stages.values()))
    if layer.schedule.micro_batches > 1 or layer.extras:
        return Report(told, simulated, notes=("stages of micro-batches, and beside the experts, are not replayed",))
    _promise(
        abs(stages / simulated - 1) < REPLAYED,
        f"stages of step 0 take {stages:.6g} s in the model and {simulated:.6g} s in the event simulator: more than "
        f"{100 * REPLAYED:g} % apart",
    )
    return Report(told, simulated)
