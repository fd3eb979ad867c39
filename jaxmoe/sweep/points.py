"""From axes to points: every combination of lists, numbers drawn from ranges, derived keys, conditions."""

import hashlib
import itertools
import json
from collections import ChainMap
from collections.abc import Hashable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxmoe.config import Scenario, resolved
from jaxmoe.config.explain import ConfigSource
from jaxmoe.config.expressions import Expression, in_order
from jaxmoe.config.keys import (
    PLAN,
    SYSTEM,
    RangeConfig,
    ScenarioFile,
    is_number,
    is_of_system,
    is_parameter,
    spelled_out,
    takes_whole_numbers,
)
from jaxmoe.config.loader import FOLDERS, PATHS, label_of
from jaxmoe.errors import InputError
from jaxmoe.experiment.metrics import columns
from jaxmoe.hardware.gpu.deepep_files import beside
from jaxmoe.hardware.gpu.files import files_of
from jaxmoe.placement.exchange import EXCHANGES
from jaxmoe.placement.named import compared_strategies
from jaxmoe.sweep.point import Point, Values, comparable, digest
from jaxmoe.sweep.study import Study, axis_of

OWN = "own"  # the exchange that a strategy has where none is named, and the strategy of a system: its plan
DEFAULTS = {"strategy": "ep_balanced", "exchange": OWN}

KERNELS = ("hardware", "die", "gemm", "path")  # of files that may name another one, or have exchanges beside them

# Columns of the results that are of no key, beside those of metrics.
RESERVED = {"hash", "point", "note", "comparable", "busiest_kind", "busiest_index", "jaxmoe_version"}

MOST_POINTS = 5_000_000  # before conditions; each takes about a kilobyte


class SweepError(InputError):
    """A study that cannot be carried out. The message names the key, the value and the remedy."""


class Space:
    """The points of a study, and scenarios at them."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.label = label_of(study.path)
        self._contents: dict[Hashable, str] = {}
        config = study.config
        derived = [(key, config.derived[key]) for key in in_order(config.derived)]
        self.derived = {key: Expression(str(text)) for key, text in derived}
        self.conditions = [Expression(text) for text in config.where]
        self.fixed = {key: value for key, value in config.set.items() if key not in DEFAULTS}
        self._file = ScenarioFile(study.scenario, ConfigSource(self.label, study.path.parent), self.fixed)
        used = {key for expression in (*self.derived.values(), *self.conditions) for key in expression.keys}
        self.parameters = {key for key in (*config.axes, *self.derived) if is_parameter(key) and key in used}
        self._check_variables(used)
        self.base = self.scenario({})

    def _check_variables(self, used: set[str]) -> None:
        for key in sorted(self.parameters & {*RESERVED, *columns().values()}):
            raise SweepError(f"{self.label}: {key} is a column of the results; give the variable another name")
        for key, value in self.fixed.items():
            if is_parameter(key) and key in used:
                raise SweepError(f"{self.label}: set has {key}: {value}, a variable; write it under derived instead")

    @property
    def identity(self) -> str:
        """A digest that studies share if they differ in axes, conditions and metrics alone: one folder suits all."""
        files = _files(resolved(self.base))
        parts: list[Any] = [resolved(self.base), self.study.config.layers, *([files] if files else [])]
        parts += [self.study.config.iterations] if self.study.has_systems else []
        return digest(json.dumps(parts, sort_keys=True))

    def scenario(self, values: Mapping[str, Any]) -> Scenario:
        """The base scenario with the values of a point. Raises `ConfigError`."""
        return self._file.at(self._own(values))

    def _own(self, values: Mapping[str, Any]) -> Values:
        """Those of these values that are keys of the scenario."""
        return {key: value for key, value in values.items() if key not in DEFAULTS and key not in self.parameters}

    def content(self, values: Values) -> str:
        """A digest of what the files hold that a point's values name; nothing where they name none."""
        keys = [key for key in values if _names_files(key) and not is_number(values[key])]
        cached = tuple((key, comparable(values[key])) for key in keys)
        if cached not in self._contents:
            self._contents[cached] = self._content({key: values[key] for key in keys}) if keys else ""
        return self._contents[cached]

    def _content(self, named: Values) -> str:
        try:
            whole = resolved(self.scenario(named))
        except InputError:  # told when the point is set up; with another file it is another point
            return ""
        sections = {key: whole[key] for key, value in named.items() if key in FOLDERS and isinstance(value, str)}
        spelled = [spelled_out(key, value)[0] for key, value in named.items()]
        files = {key: digest for key, digest in _files(whole).items() if any(_is_below(key, name) for name in spelled)}
        return json.dumps([sections, files], sort_keys=True) if sections or files else ""

    def points(self) -> list[Point]:
        """All points, each once. Raises `SweepError` where there is none, and for strategies that are not known."""
        self._check_names()
        given = {key: self.study.config.set.get(key, default) for key, default in DEFAULTS.items()}
        given |= {"strategy": OWN} if self.study.has_systems else {}
        derived = [(key, _Known(self.derived[key]), self._integers.get(key, False)) for key in self.derived]
        conditions = [_Known(condition) for condition in self.conditions]
        found: dict[Hashable, Point] = {}
        for values in self._combined():
            view = _View(self, values)
            for key, expression, whole in derived:
                view.known[key] = _rounded(expression(view), whole)
            if all(bool(condition(view)) for condition in conditions):
                content = self.content(view.known)
                same = (*map(comparable, view.known.values()), content)  # all points have the same keys
                if same not in found:
                    found[same] = Point(given | view.known, content)
        if not found:
            told = "; ".join(condition.text for condition in self.conditions)
            raise SweepError(f"{self.label}: where leaves no point ({told}); relax a condition or widen the axes")
        return list(found.values())

    def outside(self, values: Mapping[str, Any], key: str) -> Any:
        """The value of a point's scenario at a key that is no axis. Raises `ConfigError` for an unknown one."""
        named = {
            name: value
            for name, value in self._own(values).items()
            if not is_number(value) and name not in self.derived
        }
        return self._file.value(key, named, (*self.study.config.axes, *self.derived))

    def behind(self, point: Point, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values by key: looked up in `numbers`, else in the point, else in its scenario."""
        return ChainMap(dict(numbers), _View(self, point.values))  # type: ignore[arg-type]

    @cached_property
    def _integers(self) -> dict[str, bool]:
        """Whether a key takes integers alone."""
        return {key: takes_whole_numbers(self.base, key) for key in (*self.study.config.axes, *self.derived)}

    def _check_names(self) -> None:
        config = self.study.config
        for key, known in (
            ("strategy", compared_strategies()),
            ("exchange", (OWN, *EXCHANGES.shown().split(", "))),
        ):
            axis = config.axes.get(key)
            for value in axis if isinstance(axis, list) else [config.set.get(key, DEFAULTS[key])]:
                if value not in known and not (key == "exchange" and value in EXCHANGES):
                    guess = "".join(f"; did you mean {close}?" for close in get_close_matches(str(value), known, n=1))
                    raise SweepError(f"{self.label}: {key} has {value!r}; expected one of {', '.join(known)}{guess}")

    def units(self) -> list[tuple[list[str], bool]]:
        """Axes that go together, in their order, and whether numbers are drawn for them."""
        config, order = self.study.config, list(self.study.config.axes)
        zipped = [list(keys) for keys in config.zip]
        alone = [[key] for key in order if not any(key in keys for keys in zipped)]
        units = sorted([*zipped, *alone], key=lambda keys: min(order.index(key) for key in keys))
        drawn = config.sample.count is not None
        return [(keys, drawn and all(_is_range(self._axes[key]) for key in keys)) for keys in units]

    def place(self, key: str, numbers: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
        """Where numbers are on the range of an axis, 0 to 1."""
        return self._range(key).parts(numbers)

    def _range(self, key: str) -> RangeConfig:
        axis = self._axes[key]
        assert isinstance(axis, RangeConfig)
        return axis

    @cached_property
    def _axes(self) -> dict[str, RangeConfig | list[Any]]:
        return {key: axis_of(value, ("axes", key)) for key, value in self.study.config.axes.items()}

    def _combined(self) -> Iterator[Values]:
        """The grid of lists, times what is drawn from ranges."""
        drawn = [keys for keys, drawn in self.units() if drawn]
        fixed = [keys for keys, drawn in self.units() if not drawn]
        self._check_number([_length(self._axes[keys[0]]) for keys in fixed], bool(drawn))
        lists = [[*self._rows(keys)] for keys in fixed]
        draws = [{}] if not drawn else self._drawn(drawn)
        for parts in itertools.product(*lists, draws):
            yield {key: value for part in parts for key, value in part.items()}

    def _check_number(self, lengths: list[int | None], draws: bool) -> None:
        """Raise `SweepError` for more points than `MOST_POINTS`, before there are any."""
        drawn = [self.study.config.sample.count or 1] if draws else []
        count = prod(length or 1 for length in [*lengths, *drawn])
        if count > MOST_POINTS:
            raise SweepError(
                f"{self.label}: axes make {count:,} points, more than the {MOST_POINTS:,} that a sweep may have; "
                "shorten axes, zip some of them, or draw fewer from ranges with sample: {sobol: N}"
            )

    def _rows(self, keys: list[str]) -> Iterator[Values]:
        """The values of axes that go together."""
        columns = []
        for key in keys:
            axis = self._axes[key]
            if isinstance(axis, RangeConfig):
                assert axis.points is not None  # else the study would have been refused
                numbers = axis.at(np.linspace(0, 1, axis.points))
                columns.append([_rounded(float(number), self._integers[key]) for number in numbers])
            else:
                columns.append(axis)
        for row in zip(*columns, strict=True):
            yield dict(zip(keys, row, strict=True))

    def _drawn(self, units: list[list[str]]) -> list[Values]:
        """Numbers of ranges drawn together; those that are zipped share one coordinate."""
        part = self._unit_cube(len(units))
        columns = {
            key: [_rounded(float(number), self._integers[key]) for number in self._range(key).at(part[:, at])]
            for at, keys in enumerate(units)
            for key in keys
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _unit_cube(self, dimensions: int) -> Float[np.ndarray, "point dimension"]:
        from scipy.stats import qmc  # takes long to import

        sample = self.study.config.sample
        if sample.sobol is None:
            return qmc.LatinHypercube(dimensions, rng=sample.seed).random(sample.latin_hypercube)
        # Balance needs a power of two; of a longer sequence the first points are the best.
        power = int(np.ceil(np.log2(sample.sobol)))
        return qmc.Sobol(dimensions, rng=sample.seed).random_base2(power)[: sample.sobol]


class _Known:
    """An expression whose value is worked out once for the same values of its keys."""

    def __init__(self, expression: Expression) -> None:
        self.expression = expression
        self._values: dict[Hashable, Any] = {}

    def __call__(self, values: Mapping[str, Any]) -> Any:
        same = tuple(comparable(values[key]) for key in self.expression.keys)
        if same not in self._values:
            self._values[same] = self.expression(values)
        return self._values[same]


class _View(Mapping[str, Any]):
    """Values by key: those of a point, else those of its scenario."""

    def __init__(self, space: Space, values: Values) -> None:
        self.space, self.known = space, values

    def __getitem__(self, key: str) -> Any:
        return self.known[key] if key in self.known else self.space.outside(self.known, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


@cache
def _names_files(key: str) -> bool:
    """Whether values at a key may name files."""
    return key.split(".")[0] in FOLDERS or is_of_system(key)


def _files(whole: Values) -> dict[str, str]:
    """Digests of the files that a resolved scenario has paths of, by dotted key."""
    digests: dict[str, str] = {}
    for keys in (*PATHS, (SYSTEM, PLAN)):
        node: Any = whole
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, str) and (keys in PATHS or node.endswith(".npz")) and Path(node).is_file():
            path = Path(node)
            files = [*files_of(path), beside(path)] if keys == KERNELS else [path]
            contents = b"".join(each.read_bytes() for each in files if each.is_file())
            digests[".".join(keys)] = hashlib.sha256(contents).hexdigest()[:16]
    return digests


def _is_below(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _rounded(value: object, whole: bool) -> object:
    return round(value) if whole and isinstance(value, float) else value


def _length(axis: RangeConfig | list[Any]) -> int | None:
    return axis.points if isinstance(axis, RangeConfig) else len(axis)


def _is_range(axis: object) -> bool:
    return isinstance(axis, RangeConfig)
