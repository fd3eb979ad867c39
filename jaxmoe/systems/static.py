"""The plan as it is, in every iteration: what other systems are compared with."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxmoe.policies import AbstractMethod, StaticPlan
from jaxmoe.systems.setting import AbstractSystem, Setting


@dataclass(frozen=True)
class Static(AbstractSystem):
    """Decides nothing at run time."""

    def method(self, setting: Setting) -> AbstractMethod:
        return StaticPlan(jnp.asarray(setting.share, jnp.float32))
