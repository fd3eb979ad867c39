"""All systems by the name that a scenario calls them; `static` leaves the plan as it is."""

from collections.abc import Mapping
from typing import Any

from jaxmoe.systems.camoe import CAMoE
from jaxmoe.systems.expert_streaming import ExpertStreaming
from jaxmoe.systems.gated import Gate, GatedSystem
from jaxmoe.systems.hd_moe import HDMoE
from jaxmoe.systems.moentwine import Moentwine
from jaxmoe.systems.planned import Static
from jaxmoe.systems.setting import AbstractSystem, UnsuitableSystemError
from jaxmoe.systems.wafer_gpu import WaferGPU

SYSTEMS: dict[str, type[AbstractSystem]] = {
    "static": Static,
    "hd_moe": HDMoE,
    "moentwine": Moentwine,
    "camoe": CAMoE,
    "wafer_gpu": WaferGPU,
    "expert_streaming": ExpertStreaming,
}


def system_of(name: str, gate: Mapping[str, Any] | None = None, **settings: Any) -> AbstractSystem:
    """The system of this name with settings of its own, and behind a gate where one is set.

    Raises `UnsuitableSystemError` for a name that is none.
    """
    if name not in SYSTEMS:
        raise UnsuitableSystemError(f"system is {name!r}, expected one of {', '.join(SYSTEMS)}")
    system = SYSTEMS[name](**settings)
    return system if gate is None else GatedSystem(system, Gate(**gate))
