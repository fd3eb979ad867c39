"""Systems by the name that a scenario calls them, with their settings and a gate before them; a user's method too."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp

from jaxmoe.engine import AbstractMethod
from jaxmoe.methods.camoe.gated import Gate, GatedSystem
from jaxmoe.methods.settings import METHODS
from jaxmoe.methods.static import MethodRun, Static
from jaxmoe.methods.system import AbstractRun, AbstractSystem, DeploymentSetting
from jaxmoe.settings import made, settings_of


@dataclass(frozen=True, kw_only=True)
class MethodSystem(AbstractSystem):
    """A user's own method on the scenario's plan, compared with the static plan; its field `share` gets the plan."""

    called: str
    kind: type[AbstractMethod]
    values: Mapping[str, Any]

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        wants_plan = "share" in {field.name for field in fields(self.kind)}
        given = {"share": jnp.asarray(setting.share, jnp.float32)} if wants_plan else {}
        method = made(self.kind, self.values, settings_of(self.kind), **given)
        return Static().runs(setting) | {self.called: MethodRun(setting, method)}


def system_of(name: str, gate: Mapping[str, Any] | None = None, **settings: Any) -> AbstractSystem:
    """The system of this name with settings of its own, and behind a gate where one is set.

    Raises `UnknownPartError` for a name that is none.
    """
    kind = METHODS[name]
    if issubclass(kind, AbstractMethod):
        system: AbstractSystem = MethodSystem(called=name, kind=kind, values=settings)
    else:
        system = made(kind, settings, settings_of(kind))
    return system if gate is None else GatedSystem(system, Gate(**gate))
