"""Runs whose experts are loaded in every step; baselines: dies load their own, or tokens circulate among slices."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmoe.des import layer_seconds
from jaxmoe.des.streaming_layer import circulated, offloaded
from jaxmoe.engine import HostDecisions, LayerTime, RingDecisions, StreamLayer, rollout
from jaxmoe.engine.times import ATTENTION
from jaxmoe.hardware import Machine
from jaxmoe.methods.expert_streaming.fse_dp import CirculatingTokens, Experts, LoadingMethod, OffloadedExperts
from jaxmoe.methods.expert_streaming.trajectories import ring_of
from jaxmoe.methods.system import AbstractRun, DeploymentSetting, RolloutResult, times_on
from jaxmoe.placement import expert_parallel_balanced
from jaxmoe.traces import Batch, load_counts


def hosts_of(
    setting: DeploymentSetting, experts: Experts, by_popularity: bool
) -> Float[np.ndarray, "layer expert die"]:
    """Experts by number in equal runs, or by popularity before the run; shared experts go from die to die."""
    dies, layers = setting.model.machine.num_nodes, len(setting.history.layer_ids)
    if by_popularity:
        share = expert_parallel_balanced(load_counts(setting.history).counts[0].astype(float), dies)
    else:
        number = np.broadcast_to(np.arange(experts.routed) * dies // experts.routed, (layers, experts.routed))
        share = np.eye(dies, dtype=np.float32)[number]
    shared = np.eye(dies, dtype=np.float32)[np.arange(experts.shared) % dies]
    return np.concatenate([share, np.broadcast_to(shared, (layers, *shared.shape))], axis=1)


@dataclass(frozen=True)
class LoadedRun(AbstractRun):
    """A method on a layer whose experts are loaded anew in every step."""

    times_shared = True
    setting: DeploymentSetting
    layer: StreamLayer
    method: LoadingMethod

    @staticmethod
    @abstractmethod
    def keep(decisions: Any, time: LayerTime) -> tuple[LayerTime, Any]:
        """Times of a step, and the decisions that the event simulator replays."""

    def timed(self, steps: Batch, machine: Machine) -> LayerTime:
        return times_on(machine, self.method, self.layer, steps)

    def rolled(self, steps: Batch) -> tuple[LayerTime, Any, float]:
        """NumPy times, kept decisions, and the part of the time without attention in which the mean array computes."""
        _, time, kept = rollout(self.method, self.layer, steps, keep=self.keep)
        time = time.as_numpy()
        experts = time.total - sum(time.stages[name] for name in dict(time.blocks)[ATTENTION])
        return time, kept, float(time.node_time.mean(axis=-1).sum() / experts.sum())


@dataclass(frozen=True)
class OffloadedRun(LoadedRun):
    """Expert parallelism whose dies load their own experts: dispatch, load and compute, combine."""

    method: OffloadedExperts

    @staticmethod
    def of(setting: DeploymentSetting, layer: StreamLayer, prefetch: bool, by_popularity: bool) -> "OffloadedRun":
        experts = Experts.of(setting.moe)
        hosts = jnp.asarray(hosts_of(setting, experts, by_popularity), jnp.float32)
        return OffloadedRun(setting, layer, OffloadedExperts(experts, hosts, prefetch))

    @staticmethod
    def keep(decisions: HostDecisions, time: LayerTime) -> tuple[LayerTime, Any]:
        return time, ()

    def rollout(self, steps: Batch) -> RolloutResult:
        time, _, utilisation = self.rolled(steps)
        used = float((1 + self.method.prefetch) * self.layer.machine.num_nodes * self.layer.costs.costs.expert_bytes)
        figures = {"package_memory_B": used, "utilisation": utilisation}
        served = sum(time.stages[name] for name in ("dispatch", "compute", "combine"))
        return RolloutResult(time, np.asarray(self.method.hosts), figures, modelled=served)

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        batch = jax.tree.map(np.asarray, self.method.experts.joined(batch))
        described = self.setting.describe("replicated", "token_home")
        host = rolled.kept[row]
        counts = np.bincount(batch.experts.ravel(), minlength=len(host))
        alone = replace(described, flops=np.full(host.shape[1], np.inf), memory=(), gemm=None)
        control = float(self.layer.costs.control)
        inside = offloaded(described, counts, host.argmax(axis=1), self.method.prefetch, control)
        return layer_seconds(alone, host, batch) + inside


@dataclass(frozen=True)
class CirculatingRun(LoadedRun):
    """Slices stay on the dies that load them, and the tokens of an expert circulate (Fig. 3b)."""

    method: CirculatingTokens

    @staticmethod
    def of(setting: DeploymentSetting, layer: StreamLayer, prefetch: bool) -> "CirculatingRun":
        return CirculatingRun(setting, layer, CirculatingTokens(Experts.of(setting.moe), prefetch))

    @staticmethod
    def keep(decisions: RingDecisions, time: LayerTime) -> tuple[LayerTime, Any]:
        return time, decisions.on_dies.astype(jnp.int32)

    def rollout(self, steps: Batch) -> RolloutResult:
        time, tokens, utilisation = self.rolled(steps)
        used = float((1 + self.method.prefetch) * self.layer.costs.costs.expert_bytes)
        figures = {"package_memory_B": used, "utilisation": utilisation}
        return RolloutResult(time, np.asarray(tokens), figures, modelled=time.stages["compute"])

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        described = self.setting.describe("replicated", "token_home")
        ring = ring_of(self.layer.machine.topology)
        control = float(self.layer.costs.control)
        return circulated(described, rolled.kept[step, row], ring, self.method.prefetch, control)
