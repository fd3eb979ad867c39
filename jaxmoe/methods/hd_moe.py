"""hd_moe: before every layer a broadcast of the experts that are expected to congest a hybrid plan (IV-D).

Which experts are broadcast, in which window of time, and where their tokens then go.
"""

import abc
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine import AbstractMethod, Decisions, LayerTime, Movement
from jaxmoe.engine.rollout import State
from jaxmoe.engine.times import HIDDEN, MOVEMENTS
from jaxmoe.hardware import Machine
from jaxmoe.methods.forecast import AbstractForecast, forecast_of
from jaxmoe.methods.settings.hd_moe import HDMoESettings
from jaxmoe.methods.static import PlannedRun, Static
from jaxmoe.methods.system import (
    AbstractRun,
    AbstractSystem,
    DeploymentSetting,
    UnsuitableSystemError,
    attention_part,
)
from jaxmoe.network import PLACED, ChunkedBroadcast, kept, sharded_visits
from jaxmoe.relax import HardSupport
from jaxmoe.traces.batches import Batch
from jaxmoe.traces.trace import MISSING

# Which experts to broadcast ahead of a layer: hd_moe IV-D1.


def choose_experts(
    share: Float[Array, "expert node"],
    forecast: Float[Array, " expert"],
    seconds_each: Float[Array, " node"],
    allowed: Int[Array, ""],
    limit: int,
) -> Bool[Array, " expert"]:
    """Mark experts, one after the other: on the most congested node, the one with the highest priority (Eq. 13).

    `forecast` is in tokens, `seconds_each` what a node takes for one of them, so that 2 h IS / comp of the paper is
    one number per node. At most `allowed` experts are marked, and at most `limit`, which is static. Nodes and
    experts of lower numbers come first among equals. No expert is marked that is not expected to do any work.

    A broadcast expert is taken to add the same seconds to every node: dispatch sends its tokens where there is least
    to do, and at best makes all nodes end together. So the most congested node is that of the most work still placed.
    """
    priority = share * forecast[:, None] * seconds_each

    def mark(broadcast: Bool[Array, " expert"], turn: Int[Array, ""]) -> tuple[Bool[Array, " expert"], None]:
        placed = jnp.where(broadcast[:, None], 0, priority)
        on_busiest = placed[:, jnp.argmax(placed.sum(axis=0))]
        best = jnp.argmax(on_busiest)
        useful = (turn < allowed) & (on_busiest[best] > 0)
        return broadcast | (useful & (jnp.arange(forecast.size) == best)), None

    return jax.lax.scan(mark, jnp.zeros(forecast.shape, bool), jnp.arange(limit))[0]


# Where the tokens of broadcast experts go: the communication-efficient dispatch of hd_moe IV-D3.


def serve(
    share: Float[Array, "expert node"],
    batch: Batch,
    broadcast: Bool[Array, " expert"],
    seconds_each: Float[Array, " node"],
) -> Int[Array, "token top_k"]:
    """Node that serves each choice of a broadcast expert; -1 for all others.

    A token is served at a host of any of its experts, so it visits no node that it does not visit without the
    policy. Of these nodes the one with the least to do takes it, in seconds, the lowest-numbered of equals. At first
    nodes have the work of all experts that are not broadcast; tokens then come in their order, and each token's
    choices in theirs. `seconds_each` is what a node takes for one choice. Shares are of sharded placements; a row of
    weight w counts as w tokens served together.
    """
    moved = broadcast[batch.experts] & (batch.experts != MISSING)
    placed = sharded_visits(share, kept(batch, ~moved), HardSupport())
    candidates = sharded_visits(share, batch, HardSupport()).visited > 0
    nodes = jnp.arange(share.shape[1])

    def token(work: Float[Array, " node"], given: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        candidates, moved, weight = given

        def choice(work: Float[Array, " node"], moved: Bool[Array, ""]) -> tuple[Array, Array]:
            node = jnp.argmin(jnp.where(candidates, work * seconds_each, jnp.inf))
            return work + weight * (moved & (nodes == node)), jnp.where(moved, node, PLACED)

        return jax.lax.scan(choice, work, moved, unroll=True)

    return jax.lax.scan(token, placed.work, (candidates, moved, batch.weight))[1]


# How many experts a layer may have broadcast ahead of it: a number, or as many as the layer before leaves time for.


class AbstractAllowance(eqx.Module):
    """Limits how many experts every layer may broadcast, before each step."""

    @abc.abstractmethod
    def __call__(self, machine: Machine, last: LayerTime, limit: int) -> Int[Array, " layer"]:
        """Number of experts of every layer, at most `limit`, from the times [layer] of the step before."""


class FixedAllowance(AbstractAllowance):
    """Allows a fixed number of experts in every step: one number for all layers, or one for each [layer]."""

    experts: Int[Array, "*layer"]

    def __call__(self, machine: Machine, last: LayerTime, limit: int) -> Int[Array, " layer"]:
        return jnp.minimum(jnp.broadcast_to(self.experts, last.total.shape), limit)


class WindowAllowance(AbstractAllowance):
    """Allows as many experts as a broadcast can send during the layer before (hd_moe IV-D1, Eq. 17).

    Layer times are those of the step before. The first layer has the last layer of that step as its window, and none
    before the first step. Chunks pass the slowest link. The paper counts hidden x intermediate elements of an expert.
    A layer takes `attention` s beside its experts. On `idle` links a broadcast has what the busiest link leaves of the
    layer before, else it has the links to itself.
    """

    hidden: Float[Array, ""]
    intermediate: Float[Array, ""]
    element_bytes: Float[Array, ""]
    attention: Float[Array, ""] = eqx.field(default=0.0, converter=jnp.asarray)
    idle: bool = eqx.field(static=True, default=False)

    def __call__(self, machine: Machine, last: LayerTime, limit: int) -> Int[Array, " layer"]:
        topology = machine.topology
        broadcast = ChunkedBroadcast(
            alpha=topology.link_latency.max(),
            beta=self.element_bytes / topology.link_rate.min(),
            nodes=jnp.asarray(float(topology.num_nodes)),
            hidden=self.hidden,
            intermediate=self.intermediate,
        )
        window = last.total + self.attention - (busiest_link(last) if self.idle else 0)
        ran = last.total > 0  # not before the first step
        return experts_in_window(broadcast, jnp.roll(jnp.where(ran, window, 0), 1), limit)


def experts_in_window(
    broadcast: ChunkedBroadcast, window: Float[Array, "*windows"], limit: int
) -> Int[Array, "*windows"]:
    """The largest k, up to `limit`, whose broadcast at its best chunk size takes no longer than the window, in s."""
    seconds = jax.vmap(lambda k: replace(broadcast, iterations=k).least_time())(jnp.arange(1.0, limit + 1))
    return (seconds <= window[..., None]).sum(axis=-1)


def busiest_link(time: LayerTime) -> Float[Array, "*lead"]:
    """Seconds that the busiest link serves the stages of a layer, without movements."""
    moved = [name for block, names in time.blocks if block in (MOVEMENTS, HIDDEN) for name in names]
    busy = [each["link"] for name, each in time.busy.items() if "link" in each and name not in moved]
    return sum(busy, jnp.zeros(())).max(axis=-1) if busy else jnp.zeros_like(time.total)


# The dynamic placement of hd_moe IV-D: broadcast the experts expected to congest, serve their tokens anywhere.


class PreBroadcast(AbstractMethod):
    """Before each layer, while the one before runs, some of its experts are sent whole to all nodes.

    `share` is the sharded placement all other experts keep; a broadcast expert is dropped after its layer. Up to
    `allowance` experts are broadcast, and at most `limit`. Memory for them is taken to be there. A broadcast that is
    `hidden` has the links to itself and costs no time, as in the paper; otherwise the schedule charges it. A step
    raises `ValueError` for a batch of other layers.
    """

    share: Float[Array, "layer expert node"]
    flops_per_token_expert: Float[Array, ""]
    forecast: AbstractForecast
    allowance: AbstractAllowance
    limit: int = eqx.field(static=True)
    hidden: bool = eqx.field(static=True, default=True)

    def init(self, machine: Machine) -> State:
        return self.forecast.init()

    def step(self, machine: Machine, state: State, tokens: Batch, last: LayerTime) -> tuple[State, Decisions]:
        loads = (tokens.weight[..., None] * tokens.choices(self.share.shape[1])).sum(axis=-2)
        if loads.shape != self.share.shape[:2]:
            raise ValueError(f"the batch has {len(loads)} layers, expected those of the placement, {len(self.share)}")
        state, forecast = self.forecast.step(state, loads)
        seconds_each = self.flops_per_token_expert / machine.die.flops
        allowed = self.allowance(machine, last, self.limit)
        return state, jax.vmap(self._decide, (0, 0, 0, 0, None))(self.share, forecast, allowed, tokens, seconds_each)

    def _decide(
        self,
        share: Float[Array, "expert node"],
        forecast: Float[Array, " expert"],
        allowed: Int[Array, ""],
        tokens: Batch,
        seconds_each: Float[Array, " node"],
    ) -> Decisions:
        """Returns one layer's placement, its broadcast, and the node that serves each choice of a broadcast expert."""
        broadcast = choose_experts(share, forecast, seconds_each, allowed, self.limit)
        served = serve(share, tokens, broadcast, seconds_each)
        return Decisions(share, served=served, movements=(self._to_all(share, broadcast),))

    def _to_all(self, share: Float[Array, "expert node"], broadcast: Bool[Array, " expert"]) -> Movement:
        destination = jnp.broadcast_to(broadcast[:, None], share.shape).astype(share.dtype)
        return Movement(destination, self.hidden, self.limit)


# The system.


@dataclass(frozen=True)
class HDMoE(HDMoESettings, AbstractSystem):
    """Pre-broadcast on top of any sharded plan.

    The forecast is fitted on the history. A `hidden` broadcast costs no time, as in the paper.
    """

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        own = PlannedRun(setting, self.method(setting), hidden=self.broadcast == "hidden")
        return Static().runs(setting) | {"hd_moe": own}

    def method(self, setting: DeploymentSetting) -> AbstractMethod:
        """Returns the pre-broadcast method on the setting's plan, with its forecast fitted on the history.

        Raises `UnsuitableSystemError` where the plan is not sharded, or the schedule has micro-batches.
        """
        if setting.mode != "sharded":
            raise UnsuitableSystemError(
                f"system hd_moe broadcasts the experts of sharded plans, but the plan is {setting.mode}; "
                "use a sharded plan, or the system static"
            )
        if setting.model.schedule.micro_batches > 1:
            raise UnsuitableSystemError(
                "system hd_moe decides for whole batches, but the schedule cuts them into micro-batches; "
                "use the schedule serial, overlap or idle_links"
            )
        return PreBroadcast(
            share=jnp.asarray(setting.share, jnp.float32),
            flops_per_token_expert=setting.model.costs.flops_per_token_expert,
            forecast=forecast_of(self.forecast, setting.history, self.rate, self.prior),
            allowance=self._allowance(setting),
            limit=min(self.experts, setting.share.shape[1]),
            hidden=self.broadcast == "hidden",
        )

    def _allowance(self, setting: DeploymentSetting) -> AbstractAllowance:
        if self.window == "fixed":
            return FixedAllowance(jnp.asarray(self.experts))
        window = WindowAllowance(
            jnp.asarray(float(setting.moe.hidden_size)),
            jnp.asarray(float(setting.moe.expert_size)),
            jnp.asarray(float(setting.bytes.experts)),
        )
        if self.window == "last":
            return window
        tokens = jnp.asarray(float(setting.batch_tokens))
        needed = f"system.window is {self.window} and counts attention"
        attention = attention_part(setting, needed, "use window: last").seconds(setting.model.machine, tokens)
        return replace(window, attention=attention, idle=self.window == "idle_links")
