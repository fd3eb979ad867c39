"""A system behind camoe's gate: the communication time of a token's paths biases its choices before the system runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.engine import Layer, LayerTime
from jaxmoe.engine.gating import biased, changed_part, retained_mass
from jaxmoe.hardware import Machine
from jaxmoe.methods.camoe.gate import capacity_of, choose, standard_scores, time_proxy
from jaxmoe.methods.settings.camoe import CostGateSettings
from jaxmoe.methods.system import (
    AbstractRun,
    AbstractSystem,
    DeploymentSetting,
    RolloutResult,
    SystemRecording,
    TokenPaths,
    UnsuitableSystemError,
)
from jaxmoe.network import alpha_beta
from jaxmoe.network.pairwise import AllToAll, same_models
from jaxmoe.traces import Batch, GatingTrace
from jaxmoe.traces.logits import recorded_logits, trace_with_logits

# Choices of a biased gate, in all layers and steps.


class GatedSteps(NamedTuple):
    """Steps whose tokens chose by biased logits; the gate mass that is retained and the part of choices changed."""

    steps: Batch  # leaves [layer, step, ...]
    retained: Float[Array, "layer step"]
    changed: Float[Array, "layer step"]

    def figures(self) -> dict[str, float]:
        """Means over layers and steps."""
        return {"retained_gate_mass": float(self.retained.mean()), "changed_choices": float(self.changed.mean())}


def gated_steps(
    trace: GatingTrace,
    bias: Float[np.ndarray, "layer home expert"],
    steps: Batch,
    home: Int[np.ndarray, " token"] | None = None,
    capacity_factor: float | None = None,
) -> GatedSteps:
    """The choices that a biased gate makes of the logits of a trace, whose rows the tokens of the steps name.

    `home` is the row of the bias of each token of a step; by default the node where it lives. An expert takes
    `capacity_factor` times the mean of a step at most.
    """
    if steps.row is None:
        raise ValueError("tokens of the steps do not name their rows of the trace; draw them with numbered=True")
    row = np.asarray(steps.row[0])
    used, place = np.unique(row, return_inverse=True)
    table = jnp.asarray(np.moveaxis(recorded_logits(trace)[used], 1, 0), jnp.float32)
    if home is None:
        home = np.asarray(jax.tree.map(lambda leaf: leaf[0, 0], steps).sources(bias.shape[1]))
    given = (jnp.asarray(bias, jnp.float32), jnp.asarray(home), jnp.asarray(place.reshape(row.shape)))
    capacity = capacity_of(capacity_factor, row.shape[1], steps.experts.shape[-1], bias.shape[2])
    experts, retained, changed = _chosen(table, *given, steps.experts, capacity)
    return GatedSteps(eqx.tree_at(lambda batch: batch.experts, steps, experts), retained, changed)


@eqx.filter_jit
def _chosen(
    table: Float[Array, "layer row expert"],
    bias: Float[Array, "layer home expert"],
    home: Int[Array, " token"],
    place: Int[Array, "step token"],
    experts: Int[Array, "layer step token top_k"],
    capacity: int | None,
) -> tuple[Int[Array, "layer step token top_k"], Float[Array, "layer step"], Float[Array, "layer step"]]:
    """Rows of logits are gathered step by step: those of all steps together would be large."""
    count, top_k = bias.shape[-1], experts.shape[-1]

    def ones(choices: Int[Array, "token top_k"]) -> Float[Array, "token expert"]:
        return jax.nn.one_hot(choices, count).sum(axis=1)

    def layer(of_layer: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        table, bias, experts = of_layer

        def step(of_step: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            place, experts = of_step
            logits = table[place]
            chosen = choose(biased(logits, bias, home), top_k, capacity).experts
            before, after = ones(experts), ones(chosen)
            return chosen, retained_mass(logits, after, before), changed_part(after, before)

        return jax.lax.map(step, (place, experts))

    return jax.lax.map(layer, (table, bias, experts))


# What the bias is made of.

HISTORY = 8192  # tokens of the history, the last ones, that traffic is accounted on


@dataclass(frozen=True)
class Gate(CostGateSettings):
    """The bias of camoe Eq. 11 to 13 with `lambda_cost`, for tokens wherever a system has them.

    A token that a node may fetch from several holders costs the mean of their paths. An expert that several nodes share
    costs the mean of theirs.
    """

    def table(self, setting: DeploymentSetting, paths: TokenPaths) -> Float[np.ndarray, "layer home expert"]:
        """The bias of every layer, home and expert, from the traffic of the history without bias."""
        last = np.arange(max(0, setting.history.num_tokens - HISTORY), setting.history.num_tokens)
        history = setting.history.select_tokens(last)
        homes = len(paths.holders)
        home = np.arange(history.num_tokens) * homes // history.num_tokens  # as successive tokens of a batch live
        each = setting.batch_tokens / history.num_tokens
        share = setting.share / setting.share.sum(axis=2, keepdims=True)
        made = []
        for row in range(len(share)):
            counts = np.zeros((homes, share.shape[1]))
            np.add.at(counts, (home[:, None], history.experts[:, row]), each)
            made.append(self._scored(setting.model, paths, counts @ (share[row] > 0)) @ share[row].T)
        return np.stack(made).astype(np.float32)

    def _scored(
        self, model: Layer, paths: TokenPaths, copies: Float[np.ndarray, "home node"]
    ) -> Float[np.ndarray, "home node"]:
        """-lambda times the scores of Eq. 12, of a home in place of a source."""
        holders, (homes, nodes) = paths.holders, copies.shape
        parts, to = holders.shape[1], np.arange(nodes)
        moved = np.zeros((nodes, nodes))
        for part in range(parts):
            np.add.at(moved, (holders[:, part], to), copies / parts)
        sizes = (jnp.zeros(()), model.costs.dispatch_bytes, model.costs.combine_bytes)
        exchange = AllToAll(same_models(alpha_beta(model.machine.topology)), *sizes)
        seconds = np.asarray(time_proxy(exchange, jnp.asarray(moved, jnp.float32)))
        cost = np.stack([seconds[holders[:, part], to] for part in range(parts)]).mean(axis=0)
        square = np.resize(cost, (nodes, nodes))  # scores are of rows, one for each node; there are fewer homes
        return -self.lambda_cost * np.asarray(standard_scores(jnp.asarray(square)))[:homes]


@dataclass(frozen=True)
class GatedSystem(AbstractSystem):
    """A system in two versions: with the router's own choices, and with choices by a biased gate."""

    inner: AbstractSystem
    gate: Gate

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        """Runs by name: those of the inner system, baselines first, and last the inner system behind the biased gate.

        Raises `UnsuitableSystemError` where tokens have no home node, or experts no fixed place.
        """
        made = self.inner.runs(setting)
        name, run = next(reversed(made.items()))
        paths = run.token_paths(setting.batch_tokens)
        if paths is None:
            raise UnsuitableSystemError(f"system.gate prices the paths from a token to experts, but {run.unplaced}")
        trace = trace_with_logits(setting.trace, self.gate.logits, "system.gate.logits")
        return made | {f"{name}+gate": GatedRun(run, trace, paths, self.gate.table(setting, paths))}


@dataclass(frozen=True)
class GatedRun(AbstractRun):
    """A run whose tokens choose experts by biased logits. The `inner` run does everything else."""

    inner: AbstractRun
    trace: GatingTrace
    paths: TokenPaths
    bias: Float[np.ndarray, "layer home expert"]

    def timed(self, steps: Batch, machine: Machine) -> LayerTime:
        return self.inner.timed(gated_steps(self.trace, self.bias, steps, self.paths.home).steps, machine)

    def rollout(self, steps: Batch) -> RolloutResult:
        gated = gated_steps(self.trace, self.bias, steps, self.paths.home)
        rolled = self.inner.rollout(gated.steps)
        kept = (rolled.kept, np.asarray(gated.steps.experts, np.int32))
        return replace(rolled, kept=kept, figures=rolled.figures | gated.figures())

    def _inner(self, rolled: RolloutResult) -> RolloutResult:
        return replace(rolled, kept=rolled.kept[0])

    def _gated(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> Batch:
        return eqx.tree_at(lambda each: each.experts, batch, rolled.kept[1][row, step])

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        return self.inner.replay(self._inner(rolled), self._gated(rolled, batch, step, row), step, row)

    def replay_movement(self, rolled: RolloutResult, step: int, row: int) -> float:
        return self.inner.replay_movement(self._inner(rolled), step, row)

    def served(self, rolled: RolloutResult, step: int, row: int) -> np.ndarray | None:
        return self.inner.served(self._inner(rolled), step, row)

    def record(self, rolled: RolloutResult, batch_at: Callable[[int, int], Batch]) -> SystemRecording | None:
        def gated(row: int, step: int) -> Batch:
            return self._gated(rolled, batch_at(row, step), step, row)

        return self.inner.record(self._inner(rolled), gated)

    def notes(self, rolled: RolloutResult) -> list[str]:
        source = self.trace.facts.get("logit_source")
        return self.inner.notes(self._inner(rolled)) + ([] if source is None else [f"logits: {source}"])
