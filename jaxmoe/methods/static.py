"""Runs of a plan by a method, and the system that keeps the plan static, which other systems are compared with."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des import layer_seconds, movement_seconds
from jaxmoe.engine import AbstractMethod, Decisions, LayerExchanges, LayerTime, StaticPlan, rollout
from jaxmoe.engine.times import STAGES
from jaxmoe.methods import broadcast_experts
from jaxmoe.methods.settings.static import StaticSettings
from jaxmoe.methods.system import AbstractRun, AbstractSystem, DeploymentSetting, RolloutResult, TokenPaths
from jaxmoe.traces import Batch


def _kept(decisions: Decisions, time: LayerTime) -> tuple[LayerTime, Any]:
    return time, (broadcast_experts(decisions), decisions.served)


@dataclass(frozen=True)
class PlannedRun(AbstractRun):
    """A run of a method on the setting's plan. Replays take whole batches stage by stage, and movements separately."""

    setting: DeploymentSetting
    method: AbstractMethod
    hidden: bool = False  # movements are behind the layer before

    def rollout(self, steps: Batch) -> RolloutResult:
        exchanges = LayerExchanges.from_names(self.setting.exchange, self.setting.build_exchange)
        _, time, kept = rollout(self.method, self.setting.model, steps, exchanges, keep=_kept)
        time, kept = time.as_numpy(), jax.tree.map(np.asarray, kept)
        sent = kept[0]
        figures = {
            "experts_broadcast_per_layer": float(sent.sum(axis=-1).mean()),
            "broadcasts_longer_than_the_layer_before": late(time.total, _movement(time), sent.sum(axis=-1)),
        }
        return RolloutResult(time, kept, figures, modelled=np.sum([time.stages[name] for name in STAGES], axis=0))

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        # Stages are compared one after the other: run-time decisions are of whole batches.
        layer = replace(self.setting.describe(self.setting.mode, self.setting.exchange[row]), micro_batches=1)
        return layer_seconds(layer, self.setting.share[row], batch, self.served(rolled, step, row))

    def replay_movement(self, rolled: RolloutResult, step: int, row: int) -> float:
        sent = rolled.kept[0][step, row]
        if not sent.any():
            return 0.0
        layer = self.setting.describe(self.setting.mode, self.setting.exchange[row])
        everywhere = np.repeat(sent[:, None], layer.num_nodes, axis=1)
        return movement_seconds(layer, self.setting.share[row].astype(float), everywhere)

    def served(self, rolled: RolloutResult, step: int, row: int) -> np.ndarray | None:
        served = rolled.kept[1]
        return None if served is None else served[step, row]

    def token_paths(self, tokens: int) -> TokenPaths | None:
        if not all(self.setting.build_exchange(name).returns_home for name in self.setting.exchange):
            return None
        nodes = self.setting.share.shape[2]
        return TokenPaths.of_nodes(np.arange(tokens, dtype=np.int32) * nodes // tokens, nodes)

    @property
    def unplaced(self) -> str:
        names = " and ".join(dict.fromkeys(self.setting.exchange))
        return f"tokens have no home under the exchange {names}; set costs.exchange to token_home or token_home_tree"

    def notes(self, rolled: RolloutResult) -> list[str]:
        part = rolled.figures["broadcasts_longer_than_the_layer_before"]
        if not (self.hidden and part > 0):
            return []
        return [
            f"{100 * part:.0f} % of the broadcasts take longer than the layer before, so they could not be hidden "
            "behind it; with system.window: last only those that fit Eq. 17 are made"
        ]


def _movement(time: Any) -> Float[np.ndarray, "step layer"]:
    return time.stages.get("movement", np.zeros(time.total.shape))


def late(
    total: Float[np.ndarray, "step layer"],
    movement: Float[np.ndarray, "step layer"],
    moved: Int[np.ndarray, "step layer"],
) -> float:
    """The part of all movements that take longer than the layer before."""
    before = np.concatenate([np.zeros(1), total.ravel()[:-1]]).reshape(total.shape)
    sent = moved > 0
    return float((movement > before)[sent].mean()) if sent.any() else 0.0


@dataclass(frozen=True)
class Static(StaticSettings, AbstractSystem):
    """Makes no decisions at run time: the baseline of other systems."""

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        return {"static": PlannedRun(setting, StaticPlan(jnp.asarray(setting.share, jnp.float32)))}
