"""Keys of a scenario and ranges of numbers that a study may vary, and a scenario file with other values at some."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, get_args

import numpy as np
from jaxtyping import Float
from pydantic import Field, model_validator

from jaxmoe.config.base import ConfigError, RuleError, Section
from jaxmoe.config.explain import ConfigSource
from jaxmoe.config.loader import load_scenario_with, resolved
from jaxmoe.config.schema import Scenario

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
# Strict mode would refuse the list that YAML gives; the entries stay strict.
Texts = Annotated[tuple[str, ...], Field(strict=False)]

PLAN, SYSTEM = "plan", "system"  # keys short for system.plan, and for system with its name alone
METHOD = ("strategy", "exchange")  # keys of studies that no scenario has: they say what is timed on the machine


def is_of_system(key: str) -> bool:
    """Whether a key says which system runs, how, or on which plan."""
    return key == PLAN or key.split(".")[0] == SYSTEM


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_parameter(key: str) -> bool:
    """Whether a key may be a variable of a study's own: no dots, and nothing that a scenario has."""
    return "." not in key and key not in Scenario.model_fields and key not in METHOD and key != PLAN


def takes_whole_numbers(section: Section, key: str) -> bool:
    """Whether the field at a dotted key of a scenario is a whole number."""
    *path, last = key.split(".")
    node: Any = section
    for part in path:
        node = getattr(node, part, None)
    stated = type(node).model_fields.get(last) if isinstance(node, Section) else None
    if stated is None:
        return False
    kinds = {stated.annotation, *get_args(stated.annotation)}
    kinds |= {part for kind in kinds for part in get_args(kind)}  # inside Annotated
    return int in kinds and float not in kinds


def spelled_out(key: str, value: object) -> tuple[str, object]:
    """A key and value as a scenario has them: `plan` is that of the system, a system's name a mapping with it."""
    if key == PLAN:
        return f"{SYSTEM}.{PLAN}", value
    return key, {"name": value} if key == SYSTEM and isinstance(value, str) else value


@dataclass
class ScenarioFile:
    """A scenario file with fixed values, by dotted key, in place of its own. `source` is where these were written."""

    path: Path
    source: ConfigSource
    fixed: Mapping[str, Any]
    _loaded: dict[str, dict[str, Any]] = field(default_factory=dict)

    def at(self, values: Mapping[str, Any]) -> Scenario:
        """The scenario with further values. Raises `ConfigError`."""
        whole = dict(spelled_out(key, value) for key, value in {**self.fixed, **values}.items())
        if any(map(is_of_system, whole)) and SYSTEM not in whole:
            whole = {f"{SYSTEM}.name": self._own_system} | whole  # where the scenario leaves it to the default
        return load_scenario_with(self.path, whole, self.source)

    def value(self, key: str, values: Mapping[str, Any], names: Iterable[str]) -> Any:
        """The value at a key of the scenario with further values.

        Raises `ConfigError` for an unknown key, with the nearest of `names` or of the keys of its section.
        """
        cached = json.dumps(dict(values), sort_keys=True, default=str)
        node: Any = self._loaded.get(cached) or self._loaded.setdefault(cached, resolved(self.at(values)))
        for part in key.split("."):
            if isinstance(node, list):
                node = {entry.get("name"): entry for entry in node if isinstance(entry, dict)}
            if not isinstance(node, dict) or part not in node:
                known = [*names, *(node if isinstance(node, dict) else ())]
                close = get_close_matches(key, known, n=1) or get_close_matches(part, known, n=1)
                guess = f"did you mean {close[0]}? " if close else ""
                raise ConfigError(
                    f"{self.source.label}: {key!r} in an expression is no axis and no key; {guess}correct it"
                )
            node = node[part]
        return node

    @cached_property
    def _own_system(self) -> str:
        return load_scenario_with(self.path, {}, self.source).system.name


class RangeConfig(Section):
    """Numbers from one end to the other."""

    start: float = Field(alias="from", description="the first number", examples=[10])
    stop: float = Field(alias="to", description="the last number", examples=[100])
    points: Count | None = Field(default=None, description="how many numbers a grid has", examples=[5])
    scale: Literal["linear", "log"] = Field(
        default="linear", description="whether equal steps are differences or ratios", examples=["log"]
    )

    @model_validator(mode="after")
    def _has_a_logarithm(self) -> "RangeConfig":
        if self.scale == "log" and min(self.start, self.stop) <= 0:
            raise RuleError(("scale",), self.scale, "linear where an end is not above 0", "Raise the end")
        return self

    def at(self, part: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
        """The numbers at these fractions of the range, 0 to 1, on a linear or logarithmic scale."""
        if self.scale == "log":
            values = self.start * (self.stop / self.start) ** part
        else:
            values = self.start + (self.stop - self.start) * part
        ends = np.where(part == 0, self.start, np.where(part == 1, self.stop, values))  # as written, not rounded
        return ends.astype(float)

    def parts(self, numbers: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
        """The fractions of the range at which numbers lie, 0 to 1; all 0 where both ends are equal."""
        ends = np.array([self.start, self.stop])
        if self.scale == "log":
            ends, numbers = np.log(ends), np.log(numbers)
        return (numbers - ends[0]) / ((ends[1] - ends[0]) or 1.0)
