"""Which system runs a plan, and its settings: a section for each, made of its statement and told by its name."""

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model, model_validator

from jaxmoe.config.base import Name, Section
from jaxmoe.config.open_section import OpenSection, named_section, setting_fields
from jaxmoe.errors import RuleError
from jaxmoe.methods.settings import METHODS, STATEMENTS, CostGateSettings, SystemSettings, statement_of
from jaxmoe.settings import Setting, SettingError, settings_of

GateConfig: Any = create_model(
    "GateConfig", __base__=Section, __doc__=CostGateSettings.__doc__, **setting_fields(settings_of(CostGateSettings))
)


class SystemConfig(OpenSection):
    """A system with its settings: a section of those below, or one of a system of the user's own."""

    tag = "name"
    tag_about = "the name of the system"
    known: ClassVar[dict[str, Any]] = {}
    registry = METHODS
    statement: ClassVar[type[SystemSettings]]

    name: str
    plan: str

    @classmethod
    def of_part(cls, name: str, part: Any) -> "type[SystemConfig]":
        return section_of(name, statement_of(part), settings_of(part), part.__doc__)

    @property
    def stated(self) -> SystemSettings:
        """The settings of the section with the facts and rules of the system."""
        names = (field.name for field in dataclasses.fields(self.statement) if field.init)
        return self.statement(**{name: getattr(self, name) for name in names})

    @property
    def keeps_requests(self) -> bool:
        """Whether successive batches are of the same requests, row by row."""
        return self.statement.keeps_requests

    @property
    def uses_plan(self) -> bool:
        return self.statement.plan is not None

    @model_validator(mode="after")
    def _settings_go_together(self) -> "SystemConfig":
        try:
            self.stated.check()
        except RuleError:
            raise
        except ValueError as error:  # of a system of the user's own
            expected = f"settings that go together ({error})"
            raise RuleError((), self.model_dump(mode="json"), expected, "Correct them") from error
        return self


def section_of(
    name: str, statement: type[SystemSettings], settings: dict[str, Setting], about: str | None
) -> type[SystemConfig]:
    """The section of a system: its plan, a gate before it where it takes one, and its settings."""
    scenario: dict[str, Any] = {"plan": _plan(statement)}
    if statement.takes_gate:
        scenario["gate"] = (GateConfig | None, _GATE)
    if taken := {"name", "gate", *scenario} & settings.keys():
        raise SettingError(
            f"{statement.__name__} has a setting {min(taken)}, which is a key of every system; rename the setting"
        )
    title = statement.__name__.removesuffix("Settings") + "Config"
    made = named_section(SystemConfig, name, title, about, **scenario, **setting_fields(settings))
    made.statement = statement
    return made


def _plan(statement: type[SystemSettings]) -> tuple[Any, Any]:
    if statement.plan is None:
        unused = "no plan is used, since all dies load all experts; leave the key out"
        return Literal["ep_balanced"], Field(default="ep_balanced", description=unused)
    about = "the strategy that places the experts, or the path of a plan.npz"
    return Name, Field(default=statement.plan, description=about, examples=["ep_balanced"])


_GATE = Field(
    default=None,
    description="the gate of camoe before it, or null for the model's own",
    examples=[{"lambda_cost": 0.2}],
)

SystemConfig.known.update(
    {
        name: section_of(name, statement, settings_of(statement), statement.__doc__)
        for name, statement in STATEMENTS.items()
    }
)
