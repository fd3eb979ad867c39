"""The wafer-scale GPU: tasks allocated by where data is, and copies of remote experts in local HBM (IV).

The plan says which die is home to an expert. Compared with it are the study's base, tasks dealt round the dies, and
expert parallelism, every expert computed at its home; neither copies anything. Only MoE layers in decode are counted,
and of what moves only weights, as in the paper.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des import FetchedSliceCosts, SliceWork, replay_slices
from jaxmoe.engine import FetchCosts, Fetches, FetchLayer, HostLink, LayerTime, rollout, traffic_figures
from jaxmoe.hardware import Machine
from jaxmoe.methods import (
    AllocationCosts,
    AtHome,
    CrossToken,
    Dealt,
    GreedyAllocation,
    LLCPrefetch,
    WaferPolicy,
    copies_that_fit,
    widest,
)
from jaxmoe.methods.settings.wafer_gpu import AllocationName, WaferGPUSettings
from jaxmoe.methods.system import (
    AbstractRun,
    AbstractSystem,
    DeploymentSetting,
    RolloutResult,
    UnsuitableSystemError,
    times_on,
)
from jaxmoe.methods.wafer_gpu.descended_allocation import AssignmentProgram, GradientAllocation, LinearAllocation
from jaxmoe.methods.wafer_gpu.task_allocation import Allocation, AllocationTask
from jaxmoe.traces import Batch
from jaxmoe.traces.statistics.counting import count_pairs


def allocation_of(name: AllocationName, layer: FetchLayer, **settings: Any) -> Allocation:
    """Returns the allocation of requests to dies of this name.

    `settings` are `block` and `split` of `base`, or those of `GreedyAllocation`. The machine of `layer` is concrete,
    not traced. Call it in double precision, in which the costs of `allo` are exact.
    """
    machine = layer.machine
    match name:
        case "base":
            return Dealt(**settings)
        case "home":
            return AtHome()
        case "allo":
            hops = jnp.asarray(machine.topology.hop_counts())
            return GreedyAllocation(hops, AllocationCosts.of(machine, layer.costs), **settings)
        case "gradient":
            return GradientAllocation(layer, jax.random.key(0))
        case "linear_program":
            return LinearAllocation(layer, AssignmentProgram(layer))


@dataclass(frozen=True)
class WaferRun(AbstractRun):
    """Iterations of a wafer policy on the machine of its layer model."""

    policy: WaferPolicy
    layer: FetchLayer
    bound: bool = False

    def timed(self, steps: Batch, machine: Machine) -> LayerTime:
        return times_on(machine, self.policy, self.layer, steps)

    def rollout(self, steps: Batch) -> RolloutResult:
        state, time, fetches = rollout(self.policy, self.layer, steps)
        with jax.enable_x64(True):  # as the fetches are
            traffic = traffic_figures(self.layer, fetches)
        kept = _compact(fetches)
        figures = {name: float(np.asarray(values).sum()) for name, values in traffic.items()}
        figures |= {"most_copies_of_a_die": float(np.asarray(state.most).max())}
        if self.bound:
            figures |= {"bound_s": self._bound(kept)}
        return RolloutResult(time.as_numpy(), kept, figures)

    def _bound(self, kept: dict[str, np.ndarray]) -> float:
        """Seconds in all that no allocation can beat with the copies that there were, by the assignment LP."""
        program = AssignmentProgram(self.layer)
        every = (kept["requests"].sum(axis=-1), kept["home"], kept["local"])
        layers = zip(*(each.reshape(-1, *each.shape[2:]) for each in every), strict=True)
        return sum(program.solve(AllocationTask(*layer))[1] for layer in layers)

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        known = {name: leaf[step, row] for name, leaf in rolled.kept.items()}
        work = SliceWork(**known)
        waiting = rolled.time.stages["host"][step, row] if self.layer.host is not None else 0.0
        costs, machine, cut_through = self._slice_costs(), self.layer.machine, self.layer.switching == "cut_through"
        replay = replay_slices(machine, work, costs, outstanding=self.layer.outstanding, cut_through=cut_through)
        return replay.seconds + float(waiting)

    def _slice_costs(self) -> FetchedSliceCosts:
        costs = self.layer.costs
        numbers = (costs.request_bytes, costs.hit, costs.miss, costs.write)
        sizes = float(costs.expert_bytes), float(costs.flops_per_request)
        return FetchedSliceCosts(*sizes, int(costs.slices), *map(float, numbers))


def _compact(fetches: Fetches) -> dict[str, np.ndarray]:
    """Returns the fields of fetches that the event simulator reads, as NumPy arrays of small types."""
    hits = np.zeros(fetches.local.shape) if fetches.hits is None else fetches.hits
    return {
        "requests": np.asarray(fetches.requests).astype(np.int32),
        "home": np.asarray(fetches.home),
        "local": np.asarray(fetches.local) > 0,
        "copied": np.asarray(fetches.copied) > 0,
        "hits": np.asarray(hits, np.float32),
    }


@dataclass(frozen=True)
class WaferGPU(WaferGPUSettings, AbstractSystem):
    """Allocation, prediction and eviction by name; latencies of Table I in ns.

    The heat map starts from the history, such as the prefill's (Insight 1). So do `popular_copies` (Insight 4) and what
    `llc_prefetch` reads (Insight 2).
    """

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        own = self._run(setting)

        def plain(name: AllocationName, **settings: Any) -> WaferRun:
            allocation = allocation_of(name, own.layer, **settings)
            policy = replace(own.policy, allocation=allocation, prediction="none", start=None, llc=None)
            return replace(own, policy=policy, layer=replace(own.layer, host=None), bound=False)

        with jax.enable_x64(True):
            dealt, home = plain("base", block=self.block, split=self.split), plain("home")
        return {"base": dealt, "expert_parallelism": home, "wafer_gpu": own}

    def _run(self, setting: DeploymentSetting) -> WaferRun:
        machine = setting.model.machine
        self._check(setting)
        home = homes(setting.share)
        pairs = count_pairs(setting.history)
        with jax.enable_x64(True):
            layer = FetchLayer(
                machine,
                self._costs(setting),
                schedule=setting.model.schedule,
                outstanding=self.outstanding,
                switching=self.switching,
            )
            room = copies_that_fit(
                np.full(machine.num_nodes, np.inf) if machine.capacity is None else np.asarray(machine.capacity, float),
                home,
                float(layer.costs.expert_bytes),
                len(home),
            )
            held = popular_copies(pairs.load, home, room, self.popular_copies)
            alone = self.prediction == "none" and not held.any()
            settings: dict[str, Any] = {"base": {"block": self.block, "split": self.split}}.get(self.allocation, {})
            if self.allocation == "allo":
                neighbours = widest(np.asarray(machine.topology.hop_counts())) if alone else None
                settings = {"block": self.block, "spare": self.spare, "neighbours": neighbours}
            policy = WaferPolicy(
                home=jnp.asarray(home),
                capacity=jnp.asarray(np.full(room.shape, np.inf) if self.unlimited else room),
                allocation=allocation_of(self.allocation, layer, **settings),
                start=jnp.asarray(held) if held.any() else None,
                llc=LLCPrefetch(layer, jnp.asarray(pairs.layer_pairs, jnp.float32)) if self.llc_prefetch else None,
                heatmap=CrossToken(jnp.asarray(pairs.token_pairs, jnp.float32), min(self.top, len(home[0]))),
                prediction=self.prediction,
                eviction=self.eviction,
            )
            if self.host_link_GB_per_s is not None:
                link = jnp.asarray(self.host_link_GB_per_s * 1e9), jnp.asarray(self.host_fixed_us * 1e-6)
                layer = replace(layer, host=HostLink(*link))
        return WaferRun(policy, layer, self.bound)

    def _check(self, setting: DeploymentSetting) -> None:
        machine = setting.model.machine
        if len(machine.memory) < 2:
            raise UnsuitableSystemError(
                f"system wafer_gpu reads experts through an LLC and HBM, but the machine states {len(machine.memory)} "
                "levels of memory; name both at hardware.memory, or use the system static"
            )
        if self.outstanding is None and self.switching != "cut_through":
            raise UnsuitableSystemError(
                f"system.switching is {self.switching}, but dies read in a stream, for system.outstanding is null; set "
                "system.outstanding to 1 or more, or system.switching to cut_through"
            )
        if setting.moe.expert_size % self.slices:
            raise UnsuitableSystemError(
                f"system.slices is {self.slices}, expected a divisor of the {setting.moe.expert_size} columns of an "
                "expert; use 1 or 2"
            )

    def _costs(self, setting: DeploymentSetting) -> FetchCosts:
        known = setting.model.costs
        numbers = (known.expert_bytes, known.flops_per_token_expert, self.slices, self.request_bytes)
        latencies = (self.llc_hit_ns, self.llc_miss_ns, self.llc_write_ns)
        seconds = (jnp.asarray(1e-9 * ns) for ns in latencies)
        return FetchCosts(*(jnp.asarray(number, float) for number in numbers), *seconds)


def homes(share: Float[np.ndarray, "layer expert node"]) -> Int[np.ndarray, "layer expert"]:
    """The home die of every expert. Raises `UnsuitableSystemError` for a plan that splits or copies experts."""
    whole = ((share > 0).sum(axis=-1) == 1) & (share.max(axis=-1) > 0)
    for layer, expert in np.argwhere(~whole)[:1]:
        raise UnsuitableSystemError(
            f"system wafer_gpu has whole experts on one home die each, but the plan has expert {expert} of its layer "
            f"{layer} on {(share[layer, expert] > 0).sum()} nodes; use a plan such as ep_random or ep_balanced"
        )
    return share.argmax(axis=-1)


def popular_copies(
    load: Int[np.ndarray, "layer expert"],
    home: Int[np.ndarray, "layer expert"],
    room: Float[np.ndarray, " die"],
    each: int,
) -> np.ndarray:
    """Copies to begin with, bool [layer, expert, die]: of the `each` most popular experts of a layer, as many as fit
    in even parts of the layers (Insight 4)."""
    each = min(each, int(min(np.floor(room.min() / len(load)), load.shape[1])))  # the room may have no end
    popular = np.zeros(load.shape, bool)
    np.put_along_axis(popular, np.argsort(-load, axis=1, kind="stable")[:, :each], True, axis=1)
    return popular[..., None] & (home[..., None] != np.arange(len(room)))
