"""static: the plan as it is."""

from dataclasses import dataclass

from jaxmoe.methods.settings.base import AS_PLACED, HOMES, SPREAD, UNTIMED, SystemSettings


@dataclass(frozen=True)
class StaticSettings(SystemSettings):
    """The plan as it is, in every iteration."""

    name = "static"
    made_by = "jaxmoe.methods.static:Static"
    takes_gate = True
    schedules = "any"
    goes = {"placement": "any", "gate": HOMES}  # noqa: RUF012
    why_not = {  # noqa: RUF012
        "token layout": SPREAD,
        "attention": UNTIMED,
        "assignment": AS_PLACED,
        "movement": "no weights travel",
        "balancer": "the plan stays as it is",
    }
