"""A plan that never changes, runs of a plan by a method, and the static system, which others are compared with."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.des import LayerDescription, layer_seconds, movement_seconds, served_batch
from jaxmoe.engine import AbstractMethod, Decisions, LayerExchanges, LayerTime, Movement, rollout, serving_of
from jaxmoe.engine.rollout import State, everything
from jaxmoe.engine.times import HIDDEN, MOVEMENTS, STAGES
from jaxmoe.hardware import Machine
from jaxmoe.methods.settings.base import StaticSettings
from jaxmoe.methods.system import (
    AbstractRun,
    AbstractSystem,
    DeploymentSetting,
    RolloutResult,
    TokenPaths,
    UnsuitableSystemError,
    times_on,
)
from jaxmoe.traces import Batch


class StaticPlan(AbstractMethod):
    """A placement that never changes: `share` is the part of every expert on every node.

    `source` is the node where each token lives, in place of the batch's own. With `serving`, `share` is of copies.
    """

    share: Float[Array, "layer expert node"]
    source: Any = None  # int [layer, token]
    serving: Any = None  # of copies, leaves [layer, ...]

    def init(self, machine: Machine) -> State:
        return ()

    def step(self, machine: Machine, state: State, tokens: Batch, last: LayerTime) -> tuple[State, Decisions]:
        return state, Decisions(self.share, source=self.source, serving=self.serving)


@dataclass(frozen=True)
class MethodRun(AbstractRun):
    """A method over iterations. All that it decides is kept, and replayed layer by layer with barriers."""

    setting: DeploymentSetting
    method: AbstractMethod

    def rolled(self, steps: Batch, keep: Callable[[Any, LayerTime], Any] = everything) -> tuple[LayerTime, Any]:
        """NumPy times, and what is kept of the decisions, under the exchange that the setting has for every layer."""
        _, time, kept = rollout(self.method, self.setting.model, steps, self._exchanges, keep=keep)
        if keep is everything and not isinstance(kept, Decisions):
            raise UnsuitableSystemError(
                f"the method {type(self.method).__name__} decides {type(kept).__name__}, which nothing replays; "
                "return Decisions, or write an AbstractSystem with a run of its own"
            )
        return time.as_numpy(), jax.tree.map(np.asarray, kept)

    @property
    def _exchanges(self) -> LayerExchanges:
        return LayerExchanges.from_names(self.setting.exchange, self.setting.build_exchange)

    def timed(self, steps: Batch, machine: Machine) -> LayerTime:
        return times_on(machine, self.method, self.setting.model, steps, self._exchanges)

    def rollout(self, steps: Batch) -> RolloutResult:
        time, kept = self.rolled(steps)
        facts = {name: float(np.mean(fact)) for name, fact in kept.facts.items()}
        # Of all stages one after the other, without movements.
        names = [name for block, names in time.blocks if block not in (MOVEMENTS, HIDDEN) for name in names]
        return RolloutResult(time, kept, facts, modelled=np.sum([time.stages[name] for name in names], axis=0))

    def decided(self, rolled: RolloutResult, step: int, row: int) -> Decisions:
        """The decisions of one layer and step."""
        return jax.tree.map(lambda leaf: leaf[step, row], rolled.kept)

    def _described(self, row: int, decided: Decisions) -> LayerDescription:
        exchange = self.setting.exchange[row] if decided.exchange is None else decided.exchange.described
        return self.setting.describe(self.setting.mode, exchange)

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        decided = self.decided(rolled, step, row)
        return replayed_stages(self._described(row, decided), decided, batch)

    def replay_movement(self, rolled: RolloutResult, step: int, row: int) -> float:
        decided = self.decided(rolled, step, row)
        return replayed_movements(self._described(row, decided), decided)

    def served(self, rolled: RolloutResult, step: int, row: int) -> np.ndarray | None:
        served = self.decided(rolled, step, row).served
        return None if served is None else np.asarray(served)


def replayed_stages(layer: LayerDescription, decided: Decisions, batch: Batch) -> float:
    """Seconds of one layer's whole batch in the event simulator, stage after stage; leaves are [token, ...].

    Run-time decisions are of whole batches, so micro-batches are left out.
    """
    served = None if decided.served is None else np.asarray(decided.served)
    batch = jax.tree.map(np.asarray, decided.choices(batch))
    if decided.serving is not None:  # by its rule, which the simulator carries out in its own way
        copies = decided.serving.described(np.asarray(decided.share))
        layer, batch = replace(layer, serving=copies.serving), served_batch(copies, 0, batch)
    return layer_seconds(replace(layer, micro_batches=1), np.asarray(decided.share), batch, served)


def replayed_movements(layer: LayerDescription, decided: Decisions) -> float:
    """Seconds of the weights that travel, each movement with the network to itself."""
    decided = jax.tree.map(jnp.asarray, decided)
    stored = np.asarray(decided.stored, float)
    seconds = 0.0
    for each in decided.movements:
        if not isinstance(each, Movement):
            raise UnsuitableSystemError(
                f"the movement {type(each).__name__} is not replayed; decide a Movement, whose weights are multicast"
            )
        seconds += movement_seconds(layer, stored, np.asarray(each.destination) > 0)
    return float(seconds)


def broadcast_experts(decisions: Decisions) -> Bool[Array, "*lead expert"]:
    """Marks the experts that were sent to any node; none without a movement."""
    found = jnp.zeros(decisions.share.shape[:-1], bool)
    for movement in decisions.movements:
        if isinstance(movement, Movement):
            found |= (movement.destination > 0).any(axis=-1)
    return found


def _kept(decisions: Decisions, time: LayerTime) -> tuple[LayerTime, Any]:
    return time, (broadcast_experts(decisions), decisions.served)


@dataclass(frozen=True)
class PlannedRun(MethodRun):
    """A run of a method that broadcasts experts of the setting's plan, or leaves it alone; shares are not kept."""

    hidden: bool = False  # movements are behind the layer before

    def rollout(self, steps: Batch) -> RolloutResult:
        time, kept = self.rolled(steps, _kept)
        sent, movement = kept[0].sum(axis=-1), time.stages.get("movement", np.zeros(time.total.shape))
        figures = {
            "experts_broadcast_per_layer": float(sent.mean()),
            "broadcasts_longer_than_the_layer_before": late(time.total, movement, sent),
        }
        return RolloutResult(time, kept, figures, modelled=np.sum([time.stages[name] for name in STAGES], axis=0))

    def decided(self, rolled: RolloutResult, step: int, row: int) -> Decisions:
        sent, served = jax.tree.map(lambda leaf: jnp.asarray(leaf[step, row]), rolled.kept)
        share, copies = jnp.asarray(self.setting.share[row]), self.setting.copies
        serving = None if copies is None else jax.tree.map(lambda leaf: leaf[0], serving_of(copies.rows([row])))
        movement = Movement(jnp.broadcast_to(sent[:, None], share.shape).astype(share.dtype))
        return Decisions(share, served=served, movements=(movement,), serving=serving)

    def token_paths(self, tokens: int) -> TokenPaths | None:
        if not all(self.setting.build_exchange(name).returns_home for name in self.setting.exchange):
            return None
        nodes = self.setting.share.shape[2]
        return TokenPaths.of_nodes(np.arange(tokens, dtype=np.int32) * nodes // tokens, nodes)

    @property
    def unplaced(self) -> str:
        names = " and ".join(
            dict.fromkeys(each if isinstance(each, str) else each.name for each in self.setting.exchange)
        )
        return f"tokens have no home under the exchange {names}; set costs.exchange to token_home or token_home_tree"

    def notes(self, rolled: RolloutResult) -> list[str]:
        part = rolled.figures["broadcasts_longer_than_the_layer_before"]
        if not (self.hidden and part > 0):
            return []
        return [
            f"{100 * part:.3g} % of the broadcasts take longer than the layer before, so they could not be hidden "
            "behind it; with system.window: last only those that fit Eq. 17 are made"
        ]


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
        serving = None if setting.copies is None else serving_of(setting.copies)
        return {"static": PlannedRun(setting, StaticPlan(jnp.asarray(setting.share, jnp.float32), serving=serving))}
