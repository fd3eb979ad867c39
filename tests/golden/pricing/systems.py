"""Runs that a system names: what they decide, and stored decisions priced and replayed."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.engine import LayerTime
from jaxmoe.methods import RolloutResult, system_of
from jaxmoe.methods.camoe.gated import GatedRun
from jaxmoe.methods.camoe.system import CAMoERun
from jaxmoe.methods.expert_streaming.loaded_experts import CirculatingRun, OffloadedRun
from jaxmoe.methods.expert_streaming.system import StreamedRun
from jaxmoe.methods.moentwine.system import LayoutRun
from jaxmoe.methods.static import PlannedRun
from jaxmoe.methods.wafer_gpu.system import WaferRun
from jaxmoe.traces import Batch

from ..store import Arrays, named, under
from .figures import figures_of_run
from .runs import (
    hosts_of,
    price_circulation,
    price_fetches,
    price_gate,
    price_hosts,
    price_share,
    price_slots,
    price_stream,
)

Run = Any  # one way to go through iterations


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
    return _frozen(run, rolled.kept, steps, rolled.time), figures_of_run(run, rolled.time) | own


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
            return price_share(run, decisions, steps)
        case LayoutRun():
            return price_slots(run, decisions, steps)
        case WaferRun():
            return price_fetches(run, decisions)
        case OffloadedRun():
            return price_hosts(run, decisions, steps)
        case CirculatingRun():
            return price_circulation(run, decisions, steps)
        case StreamedRun():
            return price_stream(run, decisions)
        case CAMoERun():
            return price_gate(run, decisions, steps)
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
            return hosts_of(run, decisions)
        case CirculatingRun():
            return decisions["tokens"].astype(np.int32)
        case StreamedRun():
            wide = {name: array if array.dtype == bool else array.astype(np.int32) for name, array in decisions.items()}
            return tuple(wide[name] for name in ("tokens", "groups", "following", "loaders", "held"))
        case CAMoERun():
            return decisions["experts"]
    raise TypeError(f"{type(run).__name__} is not known to golden tests")
