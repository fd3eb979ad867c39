"""camoe: the gate's logits get a bias by what the path from a token's node to an expert's costs (3.4)."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmoe.des import replay_traffic
from jaxmoe.des.description import node_seconds, plan_tokens
from jaxmoe.engine import Layer, LayerTime
from jaxmoe.engine.all_to_all import AllToAllLayer
from jaxmoe.hardware import Machine
from jaxmoe.methods.camoe.bias_descent import GateLimits, GateSettings, start, tuned_bias
from jaxmoe.methods.camoe.gate import (
    GateProblem,
    capacity_of,
    evaluate_gate,
    gate_bias,
    on_experts,
    standard_scores,
    time_proxy,
    unbiased_copies,
)
from jaxmoe.methods.camoe.gated import GatedSteps, gated_steps
from jaxmoe.methods.settings.camoe import CAMoESettings
from jaxmoe.methods.static import StaticPlan
from jaxmoe.methods.system import (
    AbstractRun,
    AbstractSystem,
    DeploymentSetting,
    RolloutResult,
    UnsuitableSystemError,
    times_on,
)
from jaxmoe.network import alpha_beta
from jaxmoe.network.pairwise import STAGES, AllToAll, read_profile, same_models
from jaxmoe.traces import Batch, GatingTrace
from jaxmoe.traces.batches import expert_counts
from jaxmoe.traces.logits import recorded_logits, trace_with_logits
from jaxmoe.traces.statistics.concentration import avg_layer_cv, avg_layer_kl, global_cv, global_kl

COUNT_BYTES = 4.0  # B of a count of tokens for one expert in the metadata: not stated
PARTS, STEPS = 4, 80  # of the history that a bias by gradient is tuned on, and its steps


@dataclass(frozen=True)
class CAMoE(CAMoESettings, AbstractSystem):
    """A biased gate on a plan of whole experts, compared with the unbiased gate.

    Traffic is accounted on the history, without bias. The bias is that of Eq. 13, or by gradient. Times are by alpha
    and beta of hops (Eq. 9) or by the machine's congestion model, of copies for every expert chosen (Eq. 8) or node.
    """

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        _check(setting)
        traces = (setting.trace, setting.history)
        trace, history = (trace_with_logits(each, self.logits, "system.logits") for each in traces)
        table = self._table(setting, history)
        run = partial(CAMoERun, setting, self, trace)
        return {"unbiased": run(np.zeros_like(table)), "camoe": run(table)}

    def exchange(self, model: Layer, experts: int) -> AllToAll:
        """Returns the all-to-all of metadata, dispatch and combine under the system's time model.

        Metadata has one count of tokens for each of the `experts` of a layer.
        """
        times = alpha_beta(model.machine.topology) if self.time_model == "alpha_beta" else model.time_model
        sizes = (jnp.asarray(experts * COUNT_BYTES), model.costs.dispatch_bytes, model.costs.combine_bytes)
        return AllToAll(same_models(times), *sizes)

    def _by_pairs(self, model: Layer, experts: int) -> AllToAll:
        """The all-to-all by alpha and beta of pairs, which the rule needs: the machine's, or measured ones."""
        exchange = replace(self, time_model="alpha_beta").exchange(model, experts)
        if self.profile is None:
            return exchange
        found, nodes = read_profile(Path(self.profile)), model.machine.num_nodes
        if found.num_nodes != nodes:
            raise UnsuitableSystemError(
                f"system.profile {self.profile} is of {found.num_nodes} nodes, but the machine has {nodes}; profile it"
            )
        return replace(exchange, models={stage: found.model(stage) for stage in STAGES})

    def _table(self, setting: DeploymentSetting, history: GatingTrace) -> Float[np.ndarray, "layer node expert"]:
        """The bias of every layer, source and expert."""
        problems = [self._problem(setting, history, part) for part in range(PARTS)]
        copies = jnp.mean(jnp.stack([unbiased_copies(problem) for problem in problems]), axis=0)
        share, exchange = problems[0].share, self._by_pairs(setting.model, problems[0].share.shape[1])
        if self.bias == "rule" or self.lambda_cost == 0:
            made = jax.vmap(lambda copies, share: gate_bias(exchange, copies, share, self.lambda_cost, self.own_node))
            return np.asarray(made(copies, share))
        scores = jax.vmap(lambda copies: standard_scores(time_proxy(exchange, copies), self.own_node))(copies)
        begin = start("table", scores, self.lambda_cost)
        rule = on_experts(begin.nodes(), share)
        lost = [1 - float(evaluate_gate(problem, rule).retained.mean()) for problem in problems]
        settings = GateSettings(steps=STEPS)
        found = tuned_bias(problems[:-1], problems[-1:], GateLimits(float(np.mean(lost))), settings, begin)
        return np.asarray(on_experts(jnp.asarray(found.bias), share))

    def _problem(self, setting: DeploymentSetting, history: GatingTrace, part: int) -> GateProblem:
        """Returns part number `part` of the last tokens of the history, weighted to stand for a batch."""
        nodes, batch = setting.model.machine.num_nodes, setting.batch_tokens
        seen = min(history.num_tokens, batch)
        size = max(seen // PARTS, 1)
        first = min(history.num_tokens - seen + part * size, history.num_tokens - size)  # few tokens are in several
        logits = np.moveaxis(recorded_logits(history)[first : first + size], 1, 0)
        return GateProblem(
            exchange=(self.exchange if self.profile is None else self._by_pairs)(setting.model, logits.shape[2]),
            topology=setting.model.machine.topology,
            logits=jnp.asarray(logits, jnp.float32),
            source=jnp.asarray(np.arange(size) * nodes // size, jnp.int32),
            share=jnp.asarray(setting.share, jnp.float32),
            weight=jnp.asarray(batch / size, jnp.float32),
            top_k=history.top_k,
            capacity=capacity_of(self.capacity_factor, size, history.top_k, logits.shape[2]),
        )


def _check(setting: DeploymentSetting) -> None:
    if not np.isin(setting.share, (0, 1)).all():
        raise UnsuitableSystemError(
            "system camoe needs whole experts, one node each, but the plan shares some among nodes; use plan: ep"
        )
    if setting.model.schedule.micro_batches > 1:
        raise UnsuitableSystemError(
            "system camoe gates whole batches, but the schedule cuts them into micro-batches; use schedule: serial"
        )


@dataclass(frozen=True)
class CAMoERun(AbstractRun):
    """A run of the gate with a bias [layer, source, expert]; replays have its choices, stage by stage."""

    setting: DeploymentSetting
    system: CAMoE
    trace: GatingTrace
    bias: Float[np.ndarray, "layer node expert"]

    def _gated(self, steps: Batch) -> GatedSteps:
        return gated_steps(self.trace, self.bias, steps, capacity_factor=self.system.capacity_factor)

    def _timed(self, gated: Batch, model: Layer) -> LayerTime:
        exchange = self.system.exchange(model, self.trace.num_experts)
        layer = AllToAllLayer(model.machine, model.costs, exchange, model.schedule, self.system.copies)
        return times_on(model.machine, StaticPlan(jnp.asarray(self.setting.share, jnp.float32)), layer, gated)

    def timed(self, steps: Batch, machine: Machine) -> LayerTime:
        return self._timed(self._gated(steps).steps, replace(self.setting.model, machine=machine))

    def rollout(self, steps: Batch) -> RolloutResult:
        gated, trace = self._gated(steps), self.trace
        time = self._timed(gated.steps, self.setting.model)
        chosen = np.swapaxes(np.asarray(gated.steps.experts, np.int16), 0, 1)
        base, after = (expert_counts(each, trace.num_experts).sum(axis=1) for each in (steps, gated.steps))
        # How far expert loads changed; none of these is accuracy.
        spread = {
            "kl": global_kl(base, after),
            "avg_layer_kl": avg_layer_kl(base, after),
            "cv": global_cv(after),
            "avg_layer_cv": avg_layer_cv(after),
        }
        return RolloutResult(time.as_numpy(), chosen, gated.figures() | spread)

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        share = self.setting.share[row]
        layer = replace(self.setting.describe(self.setting.mode, self.setting.exchange[row]), micro_batches=1)
        # Leaves are of NumPy here.
        batch = eqx.tree_at(lambda b: b.experts, batch, rolled.kept[step, row].astype(np.int32))
        nodes = len(layer.flops)
        source, to = np.asarray(batch.sources(nodes)), share.argmax(axis=1)[batch.experts]
        sent = np.zeros((nodes, nodes))
        if self.system.copies == "node":
            visited = (to[..., None] == np.arange(nodes)).any(axis=1)
            np.add.at(sent, source, visited.astype(float))
        else:
            np.add.at(sent, (source[:, None], to), 1.0)
        metadata = np.full((nodes, nodes), self.trace.num_experts * COUNT_BYTES)
        np.fill_diagonal(metadata, 0)
        matrices = (metadata, sent * layer.dispatch_bytes, sent.T * layer.combine_bytes)
        network = sum(replay_traffic(layer.fabric, matrix).completion_s for matrix in matrices)
        return network + float(node_seconds(layer, plan_tokens(layer, share, batch), batch).max())

    def notes(self, rolled: RolloutResult) -> list[str]:
        source = self.trace.facts.get("logit_source")
        return [] if source is None else [f"logits: {source}"]
