"""A system behind camoe's gate: choices are biased by what a token's paths cost before the system sees them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.latency import LayerModel
from jaxmoe.latency.gating import biased, changed_part, retained_mass
from jaxmoe.network import alpha_beta
from jaxmoe.network.pairwise import AllToAll, same_models
from jaxmoe.policies.gate import choose, standard_scores, time_proxy
from jaxmoe.systems.setting import (
    AbstractRun,
    AbstractSystem,
    Recorded,
    Rolled,
    Setting,
    TokenPaths,
    UnsuitableSystemError,
)
from jaxmoe.systems.settings.camoe import CostGateSettings
from jaxmoe.traces import Batch, GatingTrace
from jaxmoe.traces.logits import trace_with_logits

HISTORY = 8192  # tokens of the history, the last ones, that traffic is accounted on


@dataclass(frozen=True)
class Gate(CostGateSettings):
    """The bias of camoe Eq. 11 to 13 with `lambda_cost`, for tokens wherever a system has them.

    A token that a node may fetch from several holders costs the mean of their paths. An expert that several nodes share
    costs the mean of theirs.
    """

    def table(self, setting: Setting, paths: TokenPaths) -> Float[np.ndarray, "layer home expert"]:
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
        self, model: LayerModel, paths: TokenPaths, copies: Float[np.ndarray, "home node"]
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
    """A system as it is, and behind the gate."""

    inner: AbstractSystem
    gate: Gate

    def runs(self, setting: Setting) -> dict[str, AbstractRun]:
        """What the system is compared with, the system itself, and last the system behind the gate.

        Raises `UnsuitableSystemError` where its tokens have no home, or its experts no place.
        """
        made = self.inner.runs(setting)
        name, run = next(reversed(made.items()))
        paths = run.token_paths(setting.batch_tokens)
        if paths is None:
            raise UnsuitableSystemError(f"system.gate prices the paths from a token to experts, but {run.unplaced}")
        assert setting.trace is not None
        trace = trace_with_logits(setting.trace, self.gate.logits, "system.gate.logits")
        return made | {f"{name}+gate": GatedSteps(run, trace, paths, self.gate.table(setting, paths))}


@dataclass(frozen=True)
class GatedSteps(AbstractRun):
    """A run whose tokens choose by biased logits; all else is as the run has it."""

    inner: AbstractRun
    trace: GatingTrace
    paths: TokenPaths
    bias: Float[np.ndarray, "layer home expert"]

    def rollout(self, steps: Batch) -> Rolled:
        assert steps.row is not None
        assert self.trace.logits is not None
        logits = np.moveaxis(self.trace.logits[np.asarray(steps.row[0])], 2, 0)  # [layer, step, token, expert]
        home, bias = jnp.asarray(self.paths.home), jnp.asarray(self.bias)
        experts, retained, changed = _chosen(jnp.asarray(logits, jnp.float32), bias, home, steps)
        rolled = self.inner.rollout(eqx.tree_at(lambda batch: batch.experts, steps, experts))
        figures = {"retained_gate_mass": float(retained), "changed_choices": float(changed)}
        return replace(rolled, kept=(rolled.kept, np.asarray(experts, np.int32)), figures=rolled.figures | figures)

    def _inner(self, rolled: Rolled) -> Rolled:
        return replace(rolled, kept=rolled.kept[0])

    def _gated(self, rolled: Rolled, batch: Batch, step: int, row: int) -> Batch:
        return eqx.tree_at(lambda each: each.experts, batch, rolled.kept[1][row, step])

    def replay(self, rolled: Rolled, batch: Batch, step: int, row: int) -> float:
        return self.inner.replay(self._inner(rolled), self._gated(rolled, batch, step, row), step, row)

    def replay_movement(self, rolled: Rolled, step: int, row: int) -> float:
        return self.inner.replay_movement(self._inner(rolled), step, row)

    def served(self, rolled: Rolled, step: int, row: int) -> np.ndarray | None:
        return self.inner.served(self._inner(rolled), step, row)

    def record(self, rolled: Rolled, batch_at: Callable[[int, int], Batch]) -> Recorded | None:
        def gated(row: int, step: int) -> Batch:
            return self._gated(rolled, batch_at(row, step), step, row)

        return self.inner.record(self._inner(rolled), gated)

    def notes(self, rolled: Rolled) -> list[str]:
        source = self.trace.facts.get("logit_source")
        return self.inner.notes(self._inner(rolled)) + ([] if source is None else [f"logits: {source}"])


@eqx.filter_jit
def _chosen(
    logits: Float[Array, "layer step token expert"],
    bias: Float[Array, "layer home expert"],
    home: Int[Array, " token"],
    steps: Batch,
) -> tuple[Int[Array, "layer step token top_k"], Float[Array, ""], Float[Array, ""]]:
    """Biased choices, the gate mass that they retain, and the part of choices that changed, as means over steps."""

    def layer(of_layer: tuple[Array, Array, Batch]) -> tuple[Array, Array, Array]:
        logits, bias, batches = of_layer

        def step(of_step: tuple[Array, Batch]) -> tuple[Array, Array, Array]:
            logits, batch = of_step
            experts = choose(biased(logits, bias, home), batch.experts.shape[-1]).experts
            before, after = (each.choices(bias.shape[-1]) for each in (batch, replace(batch, experts=experts)))
            return experts, retained_mass(logits, after, before), changed_part(after, before)

        return jax.lax.map(step, (logits, batches))

    chosen, retained, changed = jax.lax.map(layer, (logits, bias, steps))
    return chosen, retained.mean(), changed.mean()
