"""Settings, facts and rules of every system, stated once and without JAX; and the registry of systems.

A system of a user's own is a class with settings, registered under its name:

    @METHODS.register("hottest")
    @dataclass(frozen=True)
    class Hottest(AbstractSystem):
        experts: int = setting(2, help="the number of experts that are copied", at_least=1)

or a method, a class with `init` and `step` (`jaxmoe.engine.AbstractMethod`), which decides on the plan; or named by an
entry point `jaxmoe.methods` of its package. It may state facts of `SystemSettings` as class variables.
"""

from typing import Any

from jaxmoe.methods.settings.base import FACTS, PARTS, StaticSettings, SystemSettings
from jaxmoe.methods.settings.camoe import CAMoESettings, CostGateSettings
from jaxmoe.methods.settings.expert_streaming import ExpertStreamingSettings
from jaxmoe.methods.settings.hd_moe import HDMoESettings
from jaxmoe.methods.settings.moentwine import MoentwineSettings
from jaxmoe.methods.settings.wafer_gpu import WaferGPUSettings
from jaxmoe.registry import Registry
from jaxmoe.settings import Setting, settings_of

STATEMENTS: dict[str, type[SystemSettings]] = {
    statement.name: statement
    for statement in (
        StaticSettings,
        HDMoESettings,
        MoentwineSettings,
        CAMoESettings,
        WaferGPUSettings,
        ExpertStreamingSettings,
    )
}
METHODS: Registry[Any] = Registry(
    "system", "jaxmoe.methods", {name: statement.made_by for name, statement in STATEMENTS.items()}
)


def statement_of(part: type) -> type[SystemSettings]:
    """The facts that a registered class states, the usual ones where it states none."""
    if issubclass(part, SystemSettings):
        return part
    return type(part.__name__, (SystemSettings,), {fact: getattr(part, fact) for fact in FACTS if hasattr(part, fact)})


def described(name: str) -> tuple[type[SystemSettings], dict[str, Setting]]:
    """Facts and settings of a system by its name. Raises `UnknownPartError` where there is none."""
    if name in STATEMENTS:
        return STATEMENTS[name], settings_of(STATEMENTS[name])
    return statement_of(METHODS[name]), settings_of(METHODS[name])


__all__ = ["METHODS", "PARTS", "STATEMENTS", "CostGateSettings", "SystemSettings", "described", "statement_of"]
