"""What systems have in common: the setting that they are made for, and runs over iterations that can be replayed."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des import Fabric, LayerDescription, Run
from jaxmoe.engine import Layer, LayerTime
from jaxmoe.errors import InputError
from jaxmoe.methods.settings.base import SystemSettings
from jaxmoe.models import MoEModel
from jaxmoe.network import AbstractExchange
from jaxmoe.placement.placement import Mode
from jaxmoe.relax import AbstractReduction
from jaxmoe.traces import Batch, GatingTrace


@dataclass(frozen=True)
class DeploymentSetting:
    """What a system is made for: a plan with the exchange of every layer, its model and machine, and earlier gating.

    `model` is of the plan's mode. `context_tokens` is what attention reads for a token. `build_exchange` makes an
    exchange of its name, and `describe` tells the event simulator of a layer of a mode with an exchange.
    """

    share: Float[np.ndarray, "layer expert node"]
    mode: Mode
    exchange: tuple[str, ...]
    model: Layer
    moe: MoEModel
    weight_bytes_per_element: float
    bytes_per_element: float
    batch_tokens: int
    context_tokens: int
    history: GatingTrace  # the layers of the plan, before the run
    build_exchange: Callable[[str], AbstractExchange]
    describe: Callable[[Mode, str], LayerDescription]
    wafer_shape: tuple[int, int] | None = None  # of a mesh that is made of wafers
    clusters: tuple[int, int] | None = None  # switches, and nodes of each
    trace: GatingTrace | None = None  # that of the run, whose rows the tokens of its steps name


class UnsuitableSystemError(InputError):
    """A system that is not known, or does not suit its setting. The message has the reason and the remedy."""


@dataclass(frozen=True)
class RolloutResult:
    """What a run did: NumPy times [step, layer], what replays need of it, and figures of its own by name.

    `modelled` is what the event simulator is compared with, s [step, layer]: the total where it is not given.
    """

    time: LayerTime
    kept: Any = ()  # leaves [step, layer, ...]
    figures: dict[str, float] = field(default_factory=dict)
    modelled: Float[np.ndarray, "step layer"] | None = None

    @property
    def compared(self) -> Float[np.ndarray, "step layer"]:
        return self.time.total if self.modelled is None else self.modelled


@dataclass(frozen=True)
class TokenPaths:
    """Where the tokens of a step live: the home of every token, and who holds a home's tokens for which node.

    A node fetches equal parts of them from each of the holders.
    """

    home: Int[np.ndarray, " token"]
    holders: Int[np.ndarray, "home part node"]

    @staticmethod
    def of_nodes(home: Int[np.ndarray, " token"], nodes: int) -> "TokenPaths":
        """Of tokens that live at one node each."""
        return TokenPaths(home, np.broadcast_to(np.arange(nodes)[:, None, None], (nodes, 1, nodes)))


@dataclass(frozen=True)
class SystemRecording:
    """Layers in the event simulator, recorded, with the stage of every task; `shown` says which they are."""

    run: Run
    stage: list[str]
    fabric: Fabric
    shown: str
    facts: dict[str, Any] = field(default_factory=dict)


class AbstractRun(abc.ABC):
    """One way to go through the iterations: all in the model, and any layer and step in the event simulator."""

    @abc.abstractmethod
    def rollout(self, steps: Batch) -> RolloutResult:
        """Times of all steps, whose leaves are [layer, step, token, ...]."""

    @abc.abstractmethod
    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        """Seconds of one layer of a step in the event simulator. `batch` has NumPy leaves [token, ...]."""

    def replay_movement(self, rolled: RolloutResult, step: int, row: int) -> float:
        """Seconds of weights that travel apart from the stages, 0 where none do."""
        return 0.0

    def served(self, rolled: RolloutResult, step: int, row: int) -> np.ndarray | None:
        """Where choices were computed, as in `Decisions`; `None`: as placed."""
        return None

    def token_paths(self, tokens: int) -> TokenPaths | None:
        """From where so many tokens go to their experts; `None` where they start at no place, as `unplaced` says."""
        return None

    @property
    def unplaced(self) -> str:
        """Why a run has no `token_paths`, for an error."""
        return "this system has none; leave system.gate out"

    def record(self, rolled: RolloutResult, batch_at: Callable[[int, int], Batch]) -> SystemRecording | None:
        """Layers worth a timeline, from the batch of any row and step; `None` where the run has no such record."""
        return None

    def notes(self, rolled: RolloutResult) -> list[str]:
        """What a reader of the times has to know."""
        return []


class AbstractSystem(SystemSettings, abc.ABC):
    """A method as a composition of parts, with its settings. A subclass may state facts of `SystemSettings`."""

    @abc.abstractmethod
    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        """What it is compared with, the baseline first, and then itself under its own name.

        Raises `UnsuitableSystemError` where it does not suit the setting.
        """

    def layer_times(
        self, setting: DeploymentSetting, batches: Batch, reduction: AbstractReduction | None = None
    ) -> LayerTime:
        """Times of single layers, [layer, batch], as functions of the model's numbers that JAX may trace.

        Exact without a `reduction`. Raises `UnsuitableSystemError` where steps depend on those before.
        """
        raise UnsuitableSystemError(
            f"{type(self).__name__} goes from step to step, so a layer alone has no time; name strategies instead, or "
            "the system expert_streaming"
        )
