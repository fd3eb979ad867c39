"""Interfaces of systems: the deployment that a system is built for, and runs over iterations that can be replayed."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int, PyTree

from jaxmoe.des import Fabric, LayerDescription, SimulatedRun
from jaxmoe.engine import AbstractMethod, Layer, LayerExchanges, LayerTime, even_attention, rollout
from jaxmoe.engine.attention import EvenPart
from jaxmoe.engine.layer import AbstractLayer
from jaxmoe.errors import InputError
from jaxmoe.hardware import Machine
from jaxmoe.methods.settings.base import SystemSettings
from jaxmoe.models import ElementBytes, MoEModel
from jaxmoe.network import AbstractExchange
from jaxmoe.placement.copies import Copies
from jaxmoe.placement.exchange import Exchange
from jaxmoe.placement.placement import Mode
from jaxmoe.relax import AbstractReduction
from jaxmoe.traces import Batch, GatingTrace


@dataclass(frozen=True)
class DeploymentSetting:
    """Inputs of a system: a plan, the exchange of every layer, model and machine, and gating from before the run.

    Where the plan has `copies`, `share` is theirs. `model` is of the mode of the shares. `context_tokens` is the length
    of the context that attention has for a token; keys and values of so many `cached_tokens` are read from memory for
    it, by default of as many.
    `build_exchange` returns an exchange or that of a name. `describe` returns the event simulator's description of a
    layer from a mode and an exchange or the name of one.
    """

    share: Float[np.ndarray, "layer expert node"]
    mode: Mode
    exchange: tuple[Exchange | str, ...]
    model: Layer
    moe: MoEModel
    bytes: ElementBytes
    batch_tokens: int
    context_tokens: float | int
    trace: GatingTrace  # that of the run, whose rows the tokens of its steps name
    history: GatingTrace  # the layers of the plan, before the run
    build_exchange: Callable[[Exchange | str], AbstractExchange]
    describe: Callable[[Mode, Exchange | str], LayerDescription]
    wafer_shape: tuple[int, int] | None = None  # of a mesh that is made of wafers
    clusters: tuple[int, int] | None = None  # switches, and nodes of each
    copies: Copies | None = None
    cached_tokens: float | None = None


class UnsuitableSystemError(InputError):
    """A system that is not known, or does not suit its setting. The message has the reason and the remedy."""


def attention_part(setting: DeploymentSetting, needed: str, remedy: str) -> EvenPart:
    """Attention of one layer, all nodes alike: its FLOPs, its weights and the keys and values of its context.

    Raises `UnsuitableSystemError` where the model gives none; `needed` says what needs it, `remedy` how to do without.
    """
    if setting.moe.attention is None:
        raise UnsuitableSystemError(f"{needed}, which the model does not give; {remedy}")
    return even_attention(setting.moe, setting.bytes, setting.context_tokens, setting.cached_tokens)


def times_on(
    machine: Machine,
    method: AbstractMethod,
    layer: AbstractLayer,
    steps: Batch,
    exchanges: LayerExchanges | None = None,
) -> LayerTime:
    """Times [step, layer] of a method whose layer is on another machine of the same form, which JAX may trace."""
    return rollout(method, replace(layer, machine=machine), steps, exchanges, keep=lambda _, time: (time, ())).time


@dataclass(frozen=True)
class RolloutResult:
    """Results of a run: NumPy times [step, layer], the decisions that replays need, and figures of the run by name.

    `modelled` are the seconds that a replay in the event simulator is compared with; by default the total time.
    """

    time: LayerTime
    kept: PyTree = ()  # leaves [step, layer, ...]
    figures: dict[str, float] = field(default_factory=dict)
    modelled: Float[np.ndarray, "step layer"] | None = None

    @property
    def compared(self) -> Float[np.ndarray, "step layer"]:
        return self.time.total if self.modelled is None else self.modelled


@dataclass(frozen=True)
class TokenPaths:
    """Homes of the tokens of a step, and the nodes that hold a home's tokens for each node that fetches them.

    A node fetches equal parts of them from each of the holders.
    """

    home: Int[np.ndarray, " token"]
    holders: Int[np.ndarray, "home part node"]

    @staticmethod
    def of_nodes(home: Int[np.ndarray, " token"], nodes: int) -> "TokenPaths":
        """Returns the paths of tokens that live at one node each: `home` names it."""
        return TokenPaths(home, np.broadcast_to(np.arange(nodes)[:, None, None], (nodes, 1, nodes)))


@dataclass(frozen=True)
class SystemRecording:
    """Some layers of a run, recorded in the event simulator, with the stage of every task; `shown` names the layers."""

    run: SimulatedRun
    stage: list[str]
    fabric: Fabric
    shown: str
    facts: dict[str, Any] = field(default_factory=dict)


class AbstractRun(abc.ABC):
    """Times of a system's iterations: all of them by the analytic model, any layer and step by the event simulator.

    Where `times_shared`, its layers have the shared experts too.
    """

    times_shared: ClassVar[bool] = False

    @abc.abstractmethod
    def rollout(self, steps: Batch) -> RolloutResult:
        """Times of all steps, whose leaves are [layer, step, token, ...]."""

    def timed(self, steps: Batch, machine: Machine) -> LayerTime:
        """Times [step, layer] on another machine of the same form, as functions of its numbers that JAX may trace.

        Raises `UnsuitableSystemError` for a run whose times have no derivatives.
        """
        raise UnsuitableSystemError(f"times of {type(self).__name__} have no derivatives by numbers of the machine")

    @abc.abstractmethod
    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        """Seconds of one layer of a step in the event simulator. `batch` has NumPy leaves [token, ...]."""

    def replay_movement(self, rolled: RolloutResult, step: int, row: int) -> float:
        """Seconds of weights that travel apart from the stages, 0 where none do."""
        return 0.0

    def served(self, rolled: RolloutResult, step: int, row: int) -> np.ndarray | None:
        """Node that computed each choice, as in `Decisions`; `None` where all were computed as placed."""
        return None

    def token_paths(self, tokens: int) -> TokenPaths | None:
        """Homes of so many tokens of a step; `None` where tokens have no home, for the reason in `unplaced`."""
        return None

    @property
    def unplaced(self) -> str:
        """Reason why a run has no `token_paths`, for an error message."""
        return "this system has none; leave system.gate out"

    def record(self, rolled: RolloutResult, batch_at: Callable[[int, int], Batch]) -> SystemRecording | None:
        """Records some layers in the event simulator for a timeline; `None` where the run has no such record.

        `batch_at` returns the batch of a row and a step.
        """
        return None

    def notes(self, rolled: RolloutResult) -> list[str]:
        """Notes for readers of the times, such as broadcasts too long to be hidden; none by default."""
        return []


class AbstractSystem(SystemSettings, abc.ABC):
    """A method as a composition of parts, with its settings. A subclass may state facts of `SystemSettings`."""

    @abc.abstractmethod
    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        """Runs by name: the baselines first, and last the system itself under its own name.

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
