"""What streamed experts are compared with: experts that dies load for themselves, and slices that tokens go round."""

from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.des import layer_seconds
from jaxmoe.des.circulation import circulated
from jaxmoe.des.offloading import offloaded
from jaxmoe.engine import Decisions
from jaxmoe.engine.circulation import circulating_seconds
from jaxmoe.engine.offloading import offloaded_seconds
from jaxmoe.engine.streaming import StreamCosts
from jaxmoe.placement import expert_parallel_balanced
from jaxmoe.policies.streaming import ring_of, tokens_on_dies
from jaxmoe.systems.setting import AbstractRun, Rolled
from jaxmoe.systems.streamed_layer import StreamedLayer, over_layers, utilisation
from jaxmoe.traces import Batch, load_counts


@dataclass(frozen=True)
class OffloadedRun(AbstractRun):
    """Expert parallelism whose dies load their own experts: dispatch, load and compute, combine."""

    layer: StreamedLayer
    prefetch: bool
    by_popularity: bool

    def hosts(self) -> Float[np.ndarray, "layer expert die"]:
        """Experts by number in equal runs, or by popularity before the run; shared experts go from die to die."""
        setting, dies = self.layer.setting, self.layer.costs.dies
        layers = len(setting.history.layer_ids)
        if self.by_popularity:
            share = expert_parallel_balanced(load_counts(setting.history).counts[0].astype(float), dies)
        else:
            experts = setting.moe.num_experts
            number = np.broadcast_to(np.arange(experts) * dies // experts, (layers, experts))
            share = np.eye(dies, dtype=np.float32)[number]
        shared = np.eye(dies, dtype=np.float32)[np.arange(self.layer.shared) % dies]
        return np.concatenate([share, np.broadcast_to(shared, (layers, *shared.shape))], axis=1)

    def rollout(self, steps: Batch) -> Rolled:
        layer, setting = self.layer, self.layer.setting
        model = replace(setting.model, mode="replicated", exchange=setting.build_exchange("token_home"))

        @eqx.filter_jit
        def one(batch: Batch, host: Array, costs: StreamCosts) -> tuple[dict[str, Array], Array]:
            counts = (batch.choices(layer.experts) * batch.weight[:, None]).sum(axis=0)
            around = model.time(Decisions(host), batch)
            seconds, busy = offloaded_seconds(costs, counts, host, self.prefetch)
            stages = {"dispatch": around.dispatch, "compute": seconds, "combine": around.combine}
            return {"attention": layer.attention_seconds(batch.weight.sum())} | stages, busy

        hosts = self.hosts()
        stages, busy = over_layers(
            lambda batch, row: one(batch, row, layer.costs), layer.with_shared(steps), jnp.asarray(hosts)
        )
        time = layer.time(stages, busy)
        used = float((1 + self.prefetch) * layer.costs.dies * layer.costs.costs.expert_bytes)
        figures = {"package_memory_B": used, "utilisation": utilisation(time)}
        return Rolled(time, hosts, figures, modelled=time.total - time.stages["attention"])

    def replay(self, rolled: Rolled, batch: Batch, step: int, row: int) -> float:
        layer, setting = self.layer, self.layer.setting
        batch = jax.tree.map(np.asarray, layer.with_shared(batch))
        described = setting.describe("replicated", "token_home")
        host = rolled.kept[row]
        counts = np.bincount(batch.experts.ravel(), minlength=layer.experts)
        alone = replace(described, flops=np.full(layer.costs.dies, np.inf), memory=(), gemm=None)
        inside = offloaded(described, counts, host.argmax(axis=1), self.prefetch, float(layer.costs.control))
        return layer_seconds(alone, host, batch) + inside


@dataclass(frozen=True)
class CirculatingRun(AbstractRun):
    """Slices stay on the dies that load them, and the tokens of an expert go round (Fig. 3b)."""

    layer: StreamedLayer
    prefetch: bool

    def rollout(self, steps: Batch) -> Rolled:
        layer, ring = self.layer, ring_of(self.layer.costs.machine.topology)

        @eqx.filter_jit
        def one(batch: Batch, costs: StreamCosts) -> tuple[dict[str, Array], Array, Array]:
            tokens = tokens_on_dies(batch, layer.experts, costs.dies)
            seconds, busy = circulating_seconds(costs, tokens, ring, self.prefetch)
            stages = {"attention": layer.attention_seconds(batch.weight.sum()), "compute": seconds}
            return stages, busy, tokens.astype(jnp.int32)

        rows = jnp.zeros(steps.experts.shape[0])
        stages, busy, tokens = over_layers(lambda batch, _: one(batch, layer.costs), layer.with_shared(steps), rows)
        time = layer.time(stages, busy)
        used = float((1 + self.prefetch) * layer.costs.costs.expert_bytes)
        figures = {"package_memory_B": used, "utilisation": utilisation(time)}
        return Rolled(time, np.asarray(tokens), figures, modelled=time.stages["compute"])

    def replay(self, rolled: Rolled, batch: Batch, step: int, row: int) -> float:
        described = self.layer.setting.describe("replicated", "token_home")
        ring = ring_of(self.layer.costs.machine.topology)
        return circulated(described, rolled.kept[step, row], ring, self.prefetch, float(self.layer.costs.control))
