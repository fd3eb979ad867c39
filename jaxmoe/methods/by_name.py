"""Systems by the name that a scenario calls them, with their settings and a gate before them."""

from collections.abc import Mapping
from typing import Any

from jaxmoe.engine import AbstractMethod
from jaxmoe.methods.camoe.gated import Gate, GatedSystem
from jaxmoe.methods.own_method import MethodSystem
from jaxmoe.methods.settings import METHODS
from jaxmoe.methods.system import AbstractSystem
from jaxmoe.settings import made, settings_of


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
