"""The dynamic placement of hd_moe IV-D: broadcast the experts expected to congest, serve their tokens anywhere."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.hardware import Machine
from jaxmoe.latency import Decisions, LayerTime, Movement
from jaxmoe.policies.dispatch import serve
from jaxmoe.policies.forecast import AbstractForecast
from jaxmoe.policies.method import AbstractMethod, State
from jaxmoe.policies.priority import choose_experts
from jaxmoe.policies.window import AbstractAllowance
from jaxmoe.traces.batches import Batch


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
        """What is decided for one layer."""
        broadcast = choose_experts(share, forecast, seconds_each, allowed, self.limit)
        served = serve(share, tokens, broadcast, seconds_each)
        return Decisions(share, served=served, movement=self._to_all(share, broadcast))

    def _to_all(self, share: Float[Array, "expert node"], broadcast: Bool[Array, " expert"]) -> Movement:
        destination = jnp.broadcast_to(broadcast[:, None], share.shape).astype(share.dtype)
        return Movement(destination, self.hidden, self.limit)


def broadcast_experts(decisions: Decisions) -> Bool[Array, "*lead expert"]:
    """Which experts were sent anywhere; none without a movement."""
    if decisions.movement is None:
        return jnp.zeros(decisions.share.shape[:-1], bool)
    return (decisions.movement.destination > 0).any(axis=-1)
