"""Points of one structure: which of their keys are plain numbers, and all that is drawn once for them.

A key is a number of the model where everything else about a run is the same whatever its value: the trace, the
batches, the placements. That is found by trying: the run is set up with the key's value traced by JAX. Whatever uses it
as a size, as a seed or to decide something fails at once, and the key then defines groups.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.config import ConfigError, Scenario, Section, build_layer_model
from jaxmoe.errors import InputError
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.strategies import Strategy, standard_strategies, strategy
from jaxmoe.latency import LayerModel
from jaxmoe.placement.exchange import ExchangeError
from jaxmoe.sweep.points import DEFAULTS, OWN, Point, Space, SweepError, Values, is_number
from jaxmoe.traces import Batch

Numbers = Float[Array, " key"]
MOST_TRIED = 32  # points in which a value of points that cannot be is tried


@dataclass(frozen=True, eq=False)
class Setting:
    """What points have in common that differ in numbers, strategy and exchange alone."""

    inputs: Inputs  # at the first of these points
    batches: Batch  # [layer, batch, ...]
    strategies: dict[str, Strategy]
    keys: tuple[str, ...]  # the numbers
    traced: tuple[bool, ...]  # which leaves of the model depend on them

    def model(self, numbers: Numbers, fixed: LayerModel) -> LayerModel:
        """The model as a function of the numbers; leaves that do not depend on them are those of `fixed`."""
        scenario = with_numbers(self.inputs.scenario, dict(zip(self.keys, numbers, strict=True)))
        leaves, structure = jax.tree.flatten(build_layer_model(scenario, "sharded"))
        pairs = zip(self.traced, leaves, jax.tree.leaves(fixed), strict=True)
        return jax.tree.unflatten(structure, [own if traced else given for traced, own, given in pairs])


@dataclass(frozen=True, eq=False)
class Group:
    """Points that differ in numbers alone. Where no model could be set up, `reason` says why."""

    points: list[Point]
    setting: Setting | None = None
    strategy: Strategy | None = None
    reason: str = ""
    invalid: bool = False  # whether no scenario may have such values

    @property
    def numbers(self) -> Float[np.ndarray, "point key"]:
        """The numbers of every point, as the scenario has them."""
        assert self.setting is not None
        keys = self.setting.keys
        rows = [[point.values[key] for key in keys] for point in self.points]
        return np.array(rows, float).reshape(len(rows), len(keys))

    @property
    def exchange(self) -> str:
        """The exchange of all layers."""
        assert self.strategy is not None
        return self.strategy.placement.exchange[0]


@dataclass
class Grouping:
    """Sorts points into groups, and remembers which keys turned out to be no numbers."""

    space: Space
    structural: set[str] = field(default_factory=set)
    refusals: dict[str, InputError | None] = field(default_factory=dict)  # by the text of a scenario's values

    def sorted(self, points: Sequence[Point]) -> list[list[Point]]:
        """Points by all but their numbers, those that share a setting next to each other."""
        groups: dict[str, dict[str, list[Point]]] = {}
        for point in points:
            structure, method = self._structure(point.values)
            groups.setdefault(structure, {}).setdefault(method, []).append(point)
        return [group for methods in groups.values() for group in methods.values()]

    def _structure(self, values: Values) -> tuple[str, str]:
        """Texts that are equal for points of one setting, and for those of one strategy and exchange in it."""
        rest = {
            key: "a number" if self._may_be_number(key, value) else [value]
            for key, value in values.items()
            if key not in DEFAULTS
        }
        return json.dumps(rest, sort_keys=True), json.dumps([values[key] for key in DEFAULTS])

    def _may_be_number(self, key: str, value: Any) -> bool:
        return is_number(value) and key not in self.structural

    def numbers(self, values: Values) -> tuple[str, ...]:
        """Keys of a point that may be numbers of the model."""
        return tuple(
            key
            for key, value in values.items()
            if key not in self.space.parameters and key not in DEFAULTS and self._may_be_number(key, value)
        )

    def refusal(self, point: Point) -> InputError | None:
        """Why no scenario may have these values, loaded once for all strategies and exchanges."""
        text = _scenario_text(point)
        if text not in self.refusals:
            try:
                self.space.scenario(point.values)
                self.refusals[text] = None
            except InputError as error:
                self.refusals[text] = error
        return self.refusals[text]


def groups_of(
    space: Space, points: Sequence[Point], report: Callable[[int, int], None], known: Sequence[Point] = ()
) -> list[Group]:
    """All points in groups, each with its setting. Raises `InputError` where none can be set up.

    `report` is called with the points done and those in all. `known` are further points of the study, whose rows are
    there: their values are in order.
    """
    grouping, groups, done = Grouping(space), [], 0
    waiting = [[*points]]
    settings: dict[str, Setting] = {}
    while waiting:
        members = waiting.pop()
        parts = grouping.sorted(members)
        if len(parts) > 1:
            waiting += parts[::-1]
            continue
        before = len(grouping.structural)
        structure = grouping._structure(members[0].values)[0]
        refused: dict[int, InputError] = {}
        if structure not in settings:
            found = _setting(grouping, members)
            if len(grouping.structural) > before:
                settings.clear()  # the texts of all others changed as well
                waiting.append(members)
                continue
            if isinstance(found, Setting):
                settings[structure] = found
            else:
                refused = found
        refused = refused or _refused_numbers(grouping, members)
        groups += _parted(members, settings.get(structure), refused)
        done += len(members)
        report(done, len(points))
    _check_values(space, groups, known)
    return groups


def _parted(members: list[Point], setting: Setting | None, refused: dict[int, InputError]) -> list[Group]:
    """Points that can be set up in one group, and a group for each reason why others, by their place, cannot."""
    able = [point for at, point in enumerate(members) if at not in refused]
    by_reason: dict[str, list[int]] = {}
    for at, error in refused.items():
        by_reason.setdefault(str(error), []).append(at)
    groups = [_group(able, setting)] if able and setting is not None else []
    return groups + [
        Group([members[at] for at in places], reason=reason, invalid=isinstance(refused[places[0]], ConfigError))
        for reason, places in by_reason.items()
    ]


def _check_values(space: Space, groups: list[Group], known: Sequence[Point]) -> None:
    """Raise `SweepError` where a value of an axis does in no point, or no point can be set up at all.

    A value that is in points alone that cannot be, as drawn ones are in but one, may do in the place of another's.
    """
    if not known and all(group.setting is None for group in groups):
        raise SweepError(groups[0].reason)
    fine = [*known, *(point for group in groups if not group.invalid for point in group.points)]
    some = fine[:: max(len(fine) // MOST_TRIED, 1)]
    for key in space.study.config.axes:
        valid = {_text(point, key) for point in fine}
        for group in groups:
            for point in group.points if group.invalid else ():
                text, value = _text(point, key), point.values[key]
                if text not in valid and not any(_loads(space, other.values | {key: value}) for other in some):
                    raise SweepError(group.reason)
                valid.add(text)


def _loads(space: Space, values: Values) -> bool:
    try:
        space.scenario(values)
    except InputError:
        return False
    return True


def _text(point: Point, key: str) -> Any:
    """Equal for equal values, 10 and 10.0 among them."""
    value = point.values[key]
    return value if is_number(value) else json.dumps(value)


def _group(points: list[Point], setting: Setting) -> Group:
    name, exchange = points[0].values["strategy"], points[0].values["exchange"]
    try:
        return Group(points, setting, with_exchange(setting.inputs, setting.strategies[name], exchange))
    except ExchangeError as error:
        return Group(points, reason=str(error))


def with_exchange(inputs: Inputs, usual: Strategy, exchange: str) -> Strategy:
    """A usual strategy under an exchange, which may be its own. Raises `ExchangeError` where it does not suit."""
    if exchange == OWN:
        return usual
    inputs.exchange(exchange)
    return strategy(inputs, usual.name, usual.placement.share, exchange)


def _setting(grouping: Grouping, members: list[Point]) -> Setting | dict[int, InputError]:
    """What the points have in common, or why each of them, by its place, cannot be set up.

    Adds keys that turn out to be no numbers to those that define groups; what it returns is then of no use.
    """
    keys, layers = grouping.numbers(members[0].values), grouping.space.study.layers
    errors: dict[int, InputError] = {}
    ends = _ends(members, keys)
    for at in (*ends, *(at for at in range(len(members)) if at not in ends)):
        if len(errors) == len(ends) and len({str(error) for error in errors.values()}) == 1:
            return dict.fromkeys(range(len(members)), errors[0])  # whatever the numbers are
        text = _scenario_text(members[at])
        if refusal := grouping.refusals.get(text):
            errors[at] = refusal
            continue
        try:
            scenario = grouping.space.scenario(members[at].values)
            setting = _tried(scenario, keys, layers)
            if setting is None:
                wrong = {key for key in keys if _tried(scenario, (key,), layers) is None}
                # Each for itself may do where all together do not; then none is a number.
                grouping.structural |= wrong or set(keys)
                return {}
            return setting
        except InputError as error:
            errors[at] = grouping.refusals[text] = error
    return errors


def _scenario_text(point: Point) -> str:
    """Equal for points of one scenario, whatever their strategy and exchange."""
    return json.dumps({key: value for key, value in point.values.items() if key not in DEFAULTS})


def _refused_numbers(grouping: Grouping, members: list[Point]) -> dict[int, InputError]:
    """Points, by their place, with numbers that no scenario may have.

    Limits of a key are intervals: all points are tried only where one at an end is refused.
    """
    keys = grouping.numbers(members[0].values)
    if not any(grouping.refusal(members[at]) for at in _ends(members, keys)):
        return {}
    refusals = ((at, grouping.refusal(point)) for at, point in enumerate(members))
    return {at: error for at, error in refusals if error is not None}


def _ends(members: list[Point], keys: tuple[str, ...]) -> list[int]:
    """The first point, and places where a number is least, largest, or the first to be no whole one."""
    ends = [0]
    for key in keys:
        numbers = [point.values[key] for point in members]
        broken = [at for at, number in enumerate(numbers) if not isinstance(number, int)]
        places = range(len(members))
        # a whole number alone may be too narrow
        ends += [min(places, key=numbers.__getitem__), max(places, key=numbers.__getitem__), *broken[:1]]
    return list(dict.fromkeys(ends))


def _tried(scenario: Scenario, keys: tuple[str, ...], layers: str | None) -> Setting | None:
    """The setting, `None` where it depends on these keys. Raises `InputError` where there is none at all."""
    if not keys:
        inputs = inputs_of(scenario, layers=layers)
        strategies = {strategy.name: strategy for strategy in standard_strategies(inputs)}
        nothing = (False,) * len(jax.tree.leaves(inputs.model))
        return Setting(inputs, inputs.evaluation_batches, strategies, (), nothing)
    kept: list[tuple[Inputs, dict[str, Strategy]]] = []

    def draw(numbers: Numbers) -> Float[Array, ""]:
        inputs = inputs_of(with_numbers(scenario, dict(zip(keys, numbers, strict=True))), layers=layers)
        strategies = {strategy.name: strategy for strategy in standard_strategies(inputs)}
        _ = inputs.evaluation_batches
        kept.append((inputs, strategies))
        return jnp.zeros(())

    values = jnp.asarray([number_at(scenario, key) for key in keys], jnp.float32)
    # `vmap` traces what depends on the numbers and nothing else: all the rest is computed here and now.
    try:
        with warnings.catch_warnings(action="ignore"):  # pydantic's, of what is no plain number any more
            jax.vmap(draw)(jnp.stack([values, values]))
    except Exception as error:  # whatever it is that a traced number cannot do; without one, it is raised
        if isinstance(error, InputError):
            _tried(scenario, (), layers)  # raises the same where the number itself is not to blame
        return None
    ((inputs, strategies),) = kept
    drawn = jax.tree.leaves((inputs.evaluation_batches, [s.placement.share for s in strategies.values()]))
    if any(map(_is_traced, drawn)):
        return None
    traced = tuple(map(_is_traced, jax.tree.leaves(inputs.model)))
    batches = inputs.evaluation_batches
    # From here on without a trace of how the numbers were found.
    inputs = replace(inputs, scenario=scenario, model=build_layer_model(scenario, "sharded"))
    return Setting(inputs, batches, strategies, keys, traced)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


# Numbers of a scenario by dotted key.


def with_numbers(section: Any, numbers: Mapping[str, Any]) -> Any:
    """The scenario with other numbers, which are not validated and may be traced by JAX."""
    below: dict[str, dict[str, Any]] = {}
    update: dict[str, Any] = {}
    for key, value in numbers.items():
        name, _, rest = key.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            update[name] = value
    for name, inner in below.items():
        update[name] = with_numbers(getattr(section, name), inner)
    return section.model_copy(update=update)


def number_at(section: Section, key: str) -> float:
    """The number that a scenario has at a dotted key."""
    node: Any = section
    for name in key.split("."):
        node = getattr(node, name)
    return float(node)
