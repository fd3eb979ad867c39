"""A user's own method as a system: it runs on the scenario's plan and is compared with the static plan."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.des import LayerDescription, layer_seconds, movement_seconds
from jaxmoe.engine import AbstractMethod, Decisions, LayerExchanges, LayerTime, Movement, rollout
from jaxmoe.engine.times import HIDDEN, MOVEMENTS
from jaxmoe.methods.static import Static
from jaxmoe.methods.system import AbstractRun, AbstractSystem, DeploymentSetting, RolloutResult, UnsuitableSystemError
from jaxmoe.settings import made, settings_of
from jaxmoe.traces import Batch


@dataclass(frozen=True, kw_only=True)
class MethodSystem(AbstractSystem):
    """The method of a class with settings of its own; a field `share` gets the plan."""

    called: str
    kind: type[AbstractMethod]
    values: Mapping[str, Any]

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        wants_plan = "share" in {field.name for field in fields(self.kind)}
        given = {"share": jnp.asarray(setting.share, jnp.float32)} if wants_plan else {}
        method = made(self.kind, self.values, settings_of(self.kind), **given)
        return Static().runs(setting) | {self.called: MethodRun(setting, method)}


@dataclass(frozen=True)
class MethodRun(AbstractRun):
    """A method over iterations. All that it decides is kept, and replayed layer by layer with barriers."""

    setting: DeploymentSetting
    method: AbstractMethod

    def rollout(self, steps: Batch) -> RolloutResult:
        exchanges = LayerExchanges.from_names(self.setting.exchange, self.setting.build_exchange)
        _, time, kept = rollout(self.method, self.setting.model, steps, exchanges)
        if not isinstance(kept, Decisions):
            raise UnsuitableSystemError(
                f"the method {type(self.method).__name__} decides {type(kept).__name__}, which nothing replays; "
                "return Decisions, or write an AbstractSystem with a run of its own"
            )
        time, kept = time.as_numpy(), jax.tree.map(np.asarray, kept)
        return RolloutResult(time, kept, _means(kept.facts), modelled=_stages(time))

    def _decided(self, rolled: RolloutResult, step: int, row: int) -> Decisions:
        return jax.tree.map(lambda leaf: leaf[step, row], rolled.kept)

    def _described(self, row: int, decided: Decisions) -> LayerDescription:
        exchange = self.setting.exchange[row] if decided.exchange is None else decided.exchange.name
        return self.setting.describe(self.setting.mode, exchange)

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        decided = self._decided(rolled, step, row)
        return replayed_stages(self._described(row, decided), decided, batch)

    def replay_movement(self, rolled: RolloutResult, step: int, row: int) -> float:
        decided = self._decided(rolled, step, row)
        return replayed_movements(self._described(row, decided), decided)

    def served(self, rolled: RolloutResult, step: int, row: int) -> np.ndarray | None:
        served = self._decided(rolled, step, row).served
        return None if served is None else np.asarray(served)


def replayed_stages(layer: LayerDescription, decided: Decisions, batch: Batch) -> float:
    """Seconds of one layer's whole batch in the event simulator, stage after stage; leaves are [token, ...]."""
    served = None if decided.served is None else np.asarray(decided.served)
    batch = jax.tree.map(np.asarray, decided.tokens(batch))
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


def _means(facts: Mapping[str, Any]) -> dict[str, float]:
    """Means over steps and layers of the facts that a method reports with its decisions."""
    return {name: float(np.mean(fact)) for name, fact in facts.items()}


def _stages(time: LayerTime) -> np.ndarray:
    """Seconds of all stages one after the other, without movements, [step, layer]."""
    names = [name for block, names in time.blocks if block not in (MOVEMENTS, HIDDEN) for name in names]
    return np.sum([time.stages[name] for name in names], axis=0)
