"""hd_moe: a hybrid plan, and before every layer a broadcast of the experts that are expected to congest (IV-D)."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxmoe.engine import AbstractMethod
from jaxmoe.methods import (
    AbstractAllowance,
    FixedAllowance,
    PreBroadcast,
    WindowAllowance,
)
from jaxmoe.methods.forecast import forecast_of
from jaxmoe.methods.settings.hd_moe import HDMoESettings
from jaxmoe.methods.static import PlannedRun, Static
from jaxmoe.methods.system import AbstractRun, AbstractSystem, DeploymentSetting, UnsuitableSystemError


@dataclass(frozen=True)
class HDMoE(HDMoESettings, AbstractSystem):
    """Pre-broadcast on top of any sharded plan.

    `forecast` is fitted on the history; that of `cross_layer` has `prior` choices by the frequencies added to every
    row, and a moving average for the first layer. `rate` is of the moving average. In every iteration and layer
    `experts` are broadcast, or with the window `last` as many of them as fit the time of the layer before (Eq. 17).
    A `hidden` broadcast costs no time, as in the paper; a `charged` one goes by the schedule of the layer.
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
        sizes = (setting.moe.hidden_size, setting.moe.expert_size, setting.weight_bytes_per_element)
        return WindowAllowance(*(jnp.asarray(float(size)) for size in sizes))
