"""A study as a user describes it: a scenario, axes over anything in it, how to sample them, and what to measure."""

import json
from dataclasses import dataclass
from graphlib import CycleError
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from jaxmoe.config import ConfigError, RuleError, Section, load_section
from jaxmoe.config.expressions import check_expression, in_order
from jaxmoe.config.files import read_mapping, shipped_names
from jaxmoe.config.keys import PLAN, SYSTEM, Count, RangeConfig, Seed, Texts, is_of_system
from jaxmoe.extras import check_parquet
from jaxmoe.registry import METRICS

# Metrics that a study may ask for beside those of `METRICS`. The file is read before JAX is.
SEARCHED = ("bound", "tuned")  # computed where a study names them: they take a search for every machine
ALWAYS = ("total", "p95", "dispatch", "compute", "combine", "utilisation", "communication_share", "busiest")


def known_metrics() -> tuple[str, ...]:
    """The names of all metrics."""
    return (*METRICS, *SEARCHED)


class SampleConfig(Section):
    """How points are picked: a grid of all values, or so many numbers at once from all ranges."""

    latin_hypercube: Count | None = Field(
        default=None, description="how many points of a Latin hypercube to draw from the ranges", examples=[1000]
    )
    sobol: Count | None = Field(
        default=None,
        description="how many points of a scrambled Sobol sequence to draw from the ranges",
        examples=[1024],
    )
    seed: Seed = Field(default=0, description="the seed of what is drawn", examples=[0])

    @model_validator(mode="before")
    @classmethod
    def _grid_is_no_drawing(cls, value: object) -> object:
        if value == "grid":
            return {}
        if isinstance(value, str):
            raise RuleError((), value, "grid, {latin_hypercube: N} or {sobol: N}", "Write one of them")
        return value

    @model_validator(mode="after")
    def _one_of_them(self) -> "SampleConfig":
        if self.latin_hypercube and self.sobol:
            raise RuleError(("sobol",), self.sobol, "no value beside latin_hypercube", "Keep one of the two")
        return self

    @property
    def count(self) -> int | None:
        """Points drawn from the ranges; `None` for a grid."""
        return self.latin_hypercube or self.sobol


class StudyConfig(Section):
    """The content of a study file."""

    name: str = Field(default="unnamed", description="a name for tables", examples=["mesh_machines"])
    scenario: str = Field(
        min_length=1,
        description="the base scenario: its path from the study file, or the name of a shipped one",
        examples=["quickstart"],
    )
    layers: Annotated[tuple[int, ...], Field(strict=False)] | None = Field(
        default=None, description="the layers to time, as numbered in the full model, or null for all", examples=[[3]]
    )
    iterations: Count = Field(default=4, description="the iterations that systems are rolled out over", examples=[8])
    set: dict[str, Any] = Field(default={}, description="fixed values by dotted key of the scenario as a mapping")
    axes: dict[str, Any] = Field(
        description="the values of every axis, by dotted key of the scenario, strategy, exchange, system or plan, as a "
        "mapping; each "
        "a list or {from: .., to: .., points: .., scale: linear|log}"
    )
    sample: SampleConfig = Field(
        default=SampleConfig(),
        description="how points are picked: grid, {latin_hypercube: N, seed: 0} or {sobol: N, seed: 0}; ranges are "
        "drawn, lists stay a grid",
    )
    zip: Annotated[tuple[Texts, ...], Field(strict=False)] = Field(
        default=(), description="the groups of axes that go together as a list of lists of keys"
    )
    derived: dict[str, str | int | float] = Field(
        default={}, description="further keys as a mapping to expressions over keys", examples=["total / 4"]
    )
    where: Texts = Field(default=(), description="the conditions on points as a list of expressions over keys")
    metrics: Texts = Field(
        default=ALWAYS,
        min_length=1,
        description=f"the metrics as a list of {', '.join((*METRICS.builtin, *SEARCHED))}, and of your own",
    )

    @model_validator(mode="after")
    def _axes_have_values(self) -> "StudyConfig":
        if not self.axes:
            raise RuleError(("axes",), self.axes, "at least one axis", "Write for example strategy: [tp, ep_balanced]")
        for key, value in self.axes.items():
            axis_of(value, ("axes", key))
            if key in self.set or key in self.derived:
                other = "set" if key in self.set else "derived"
                raise RuleError((other, key), getattr(self, other)[key], "no key of axes", "Remove it here or there")
        return self

    @model_validator(mode="after")
    def _systems_are_rolled_out(self) -> "StudyConfig":
        keys = [*self.axes, *self.set, *self.derived]
        if not any(map(is_of_system, keys)):
            return self
        if "strategy" in keys:
            section = "axes" if "strategy" in self.axes else "set"
            got, remedy = getattr(self, section)["strategy"], "Name it plan: a system runs on a plan"
            raise RuleError((section, "strategy"), got, "no strategy beside a system", remedy)
        if PLAN in keys and f"{SYSTEM}.{PLAN}" in keys:
            raise RuleError(("axes",), keys, "one of plan and system.plan", "They are the same; remove one")
        for index, name in enumerate(self.metrics):
            if name in SEARCHED:
                told = "no metric that takes a search of placements, for systems are rolled out"
                raise RuleError(("metrics", index), name, told, "Leave it out")
        return self

    @model_validator(mode="after")
    def _expressions_can_be_read(self) -> "StudyConfig":
        for key, text in self.derived.items():
            check_expression(("derived", key), str(text))
        for index, text in enumerate(self.where):
            check_expression(("where", index), text)
        try:
            in_order(self.derived)
        except CycleError as error:
            told = " -> ".join(error.args[1])
            raise RuleError(("derived",), told, "no key that needs itself", "Write one of them without it") from None
        return self

    @model_validator(mode="after")
    def _values_are_plain(self) -> "StudyConfig":
        for name, values in (("axes", self.axes), ("set", self.set)):
            for key, value in values.items():
                try:
                    json.dumps(value)
                except TypeError:
                    expected = "numbers, text, true, false, null, lists and mappings"
                    raise RuleError((name, key), str(value), expected, "Put a date in quotes") from None
        for key in ("strategy", "exchange"):
            if key in self.derived:
                raise RuleError(("derived", key), self.derived[key], "no name that is computed", "Make it an axis")
            if isinstance(self.axes.get(key), dict):
                raise RuleError(("axes", key), self.axes[key], "a list of names", "Write for example [own]")
        return self

    @model_validator(mode="after")
    def _zipped_axes_fit(self) -> "StudyConfig":
        seen: list[str] = []
        for index, keys in enumerate(self.zip):
            if not keys:
                raise RuleError(("zip", index), [], "at least two axes", "Name them or remove it")
            for key in keys:
                if key not in self.axes or key in seen:
                    expected = f"axes, each once: {', '.join(self.axes)}"
                    raise RuleError(("zip", index), list(keys), expected, f"Correct {key!r}")
                seen.append(key)
            axes = {key: axis_of(self.axes[key], ("axes", key)) for key in keys}
            if self.sample.count and all(isinstance(axis, RangeConfig) for axis in axes.values()):
                continue  # one draw serves them all
            sizes = {key: axis.points if isinstance(axis, RangeConfig) else len(axis) for key, axis in axes.items()}
            if len(set(sizes.values())) > 1:
                told = ", ".join(f"{key} has {size}" for key, size in sizes.items())
                raise RuleError(("zip", index), list(keys), f"axes of one length ({told})", "Even them out")
        return self

    @model_validator(mode="after")
    def _ranges_are_drawn_or_have_points(self) -> "StudyConfig":
        zipped_with_lists = {
            key for keys in self.zip for key in keys if any(isinstance(self.axes[other], list) for other in keys)
        }
        ranges = [key for key, value in self.axes.items() if isinstance(value, dict) and key not in zipped_with_lists]
        if self.sample.count and not ranges:
            told, remedy = "a range among the axes to draw from", "Write {from: .., to: ..}, or leave sample out"
            raise RuleError(("sample",), self.sample.model_dump(exclude_none=True), told, remedy)
        for key, value in self.axes.items():
            axis = axis_of(value, ("axes", key))
            drawn = self.sample.count and key not in zipped_with_lists
            if isinstance(axis, RangeConfig) and axis.points is None and not drawn:
                raise RuleError(("axes", key), value, "points beside from and to", "Write for example points: 5")
        return self

    @model_validator(mode="after")
    def _metrics_are_known(self) -> "StudyConfig":
        for index, name in enumerate(self.metrics):
            if name not in METRICS and name not in SEARCHED:
                raise RuleError(("metrics", index), name, f"one of {', '.join(known_metrics())}", "Write one of them")
        return self


def axis_of(value: object, keys: tuple[str | int, ...]) -> RangeConfig | list[Any]:
    """The values of an axis. Raises `RuleError`."""
    if isinstance(value, list) and value:
        return value
    if not isinstance(value, dict):
        expected = "a list with at least one value, or {from: .., to: .., points: ..}"
        raise RuleError(keys, value, expected, "Write for example [1, 2, 4]")
    try:
        return TypeAdapter(RangeConfig).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        rule = problem.get("ctx", {}).get("error")
        reason = f"{rule.expected}" if isinstance(rule, RuleError) else problem["msg"]
        where = ".".join(str(part) for part in problem["loc"])
        expected = f"{{from: .., to: .., points: .., scale: linear|log}} ({where or 'scale'}: {reason})"
        raise RuleError(keys, value, expected, "Correct it") from None


@dataclass(frozen=True)
class Study:
    """A study file that was read. `scenario` is an absolute path, of the shipped file where it is the name of one."""

    path: Path
    config: StudyConfig

    @property
    def scenario(self) -> Path:
        beside = self.path.parent / Path(self.config.scenario).expanduser()
        by_name = shipped_names("scenarios").get(self.config.scenario)
        return beside if by_name is None or beside.exists() else by_name

    @property
    def has_systems(self) -> bool:
        """Whether points are systems that are rolled out, as `jaxmoe simulate` does, and not strategies."""
        return any(map(is_of_system, (*self.config.axes, *self.config.set, *self.config.derived)))

    @property
    def has_serving(self) -> bool:
        """Whether points are requests over time and the engines that serve them, as `jaxmoe serve` runs them."""
        return any(key.startswith("serving.") for key in (*self.config.axes, *self.config.derived))

    @property
    def has_deployments(self) -> bool:
        """Whether points are deployments of a whole model, as `jaxmoe evaluate --phase` times one."""
        return any(key.startswith("deployment.") for key in (*self.config.axes, *self.config.derived))

    @property
    def searched(self) -> tuple[str, ...]:
        """Metrics of the study that take a search for every machine."""
        return tuple(name for name in SEARCHED if name in self.config.metrics)

    @property
    def layers(self) -> str | None:
        """The layers as the text that `--layers` takes; `None` for all."""
        return None if self.config.layers is None else ",".join(map(str, self.config.layers))


def read_study(path: Path) -> Study:
    """The study in a YAML file. Raises `ConfigError`."""
    absolute = path.absolute()
    if "axes" not in (given := read_mapping(absolute)) and "hardware" in given:
        raise ConfigError(
            f"{path}: is a scenario; expected a study. Write one with the keys scenario: {path.name} and axes: "
            "{KEY: [VALUE, ..]}, as in studies/dse/quickstart.yaml"
        )
    return Study(absolute, load_section(StudyConfig, absolute))


def check_sweep(path: Path) -> None:
    """Raise `InputError` where the study in a file cannot be swept, or its results not be written."""
    check_parquet()
    read_study(path)
