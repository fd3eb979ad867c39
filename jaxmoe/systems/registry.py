"""All systems by the name that a scenario calls them; `static` leaves the plan as it is."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxmoe.policies import AbstractMethod, StaticPlan
from jaxmoe.systems.hd_moe import HDMoE
from jaxmoe.systems.setting import AbstractSystem, Setting, UnsuitableSystemError

# The plan as it is, in every iteration: what other systems are compared with.


@dataclass(frozen=True)
class Static(AbstractSystem):
    """Decides nothing at run time."""

    def method(self, setting: Setting) -> AbstractMethod:
        return StaticPlan(jnp.asarray(setting.share, jnp.float32))


SYSTEMS: dict[str, type[AbstractSystem]] = {"static": Static, "hd_moe": HDMoE}


def system_of(name: str, **settings: Any) -> AbstractSystem:
    """The system of this name with settings of its own. Raises `UnsuitableSystemError` for a name that is none."""
    if name not in SYSTEMS:
        raise UnsuitableSystemError(f"system is {name!r}, expected one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name](**settings)
