"""The dynamic placement of hd_moe IV-D: broadcast the experts expected to congest, serve their tokens anywhere."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from jaxmoe.policies.dispatch import serve
from jaxmoe.policies.forecast import AbstractForecast
from jaxmoe.policies.policy import AbstractPolicy, Decision, State
from jaxmoe.policies.priority import choose_experts
from jaxmoe.traces.batches import Batch


class PreBroadcast(AbstractPolicy):
    """Before each layer, while the one before runs, up to `allowed` of its experts are sent whole to all nodes.

    `share` is the sharded placement all other experts keep; a broadcast expert is dropped after its layer.
    `allowed` is what the time of the layer before has room for (`experts_in_window`), at most `limit`. Memory for
    the broadcast experts is taken to be there. A step raises `ValueError` for a batch of other layers.
    """

    share: Float[Array, "layer expert node"]
    seconds_each: Float[Array, " node"]  # for one choice of one token
    forecast: AbstractForecast
    allowed: Int[Array, " layer"]
    limit: int = eqx.field(static=True)

    def init(self) -> State:
        return self.forecast.init()

    def step(self, state: State, batch: Batch) -> tuple[State, Decision]:
        loads = (batch.weight[..., None] * batch.choices(self.share.shape[1])).sum(axis=-2)
        if loads.shape != self.share.shape[:2]:
            raise ValueError(f"the batch has {len(loads)} layers, expected those of the placement, {len(self.share)}")
        state, forecast = self.forecast.step(state, loads)
        return state, jax.vmap(self._decide)(self.share, forecast, self.allowed, batch)

    def _decide(
        self,
        share: Float[Array, "expert node"],
        forecast: Float[Array, " expert"],
        allowed: Int[Array, ""],
        batch: Batch,
    ) -> Decision:
        broadcast = choose_experts(share, forecast, self.seconds_each, allowed, self.limit)
        return Decision(broadcast, serve(share, batch, broadcast, self.seconds_each))
