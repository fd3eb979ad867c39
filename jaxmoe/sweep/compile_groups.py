"""Groups of points that share one compilation and one set of inputs: equal structure, strategy and exchange.

Points of a group differ in numbers of the layer model alone (`experiment.parametric`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxmoe.config import ConfigError, Scenario, build_model
from jaxmoe.config.keys import is_number, is_of_system
from jaxmoe.config.systems import SystemConfig
from jaxmoe.errors import InputError
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.parametric import ParametricRun, parametric_run, structural_keys
from jaxmoe.experiment.strategies import Strategy, given_plans, strategy
from jaxmoe.sweep.point import Point, Values
from jaxmoe.sweep.points import DEFAULTS, OWN, Space, SweepError

MOST_TRIED = 32  # points in which a value of points that cannot be is tried


@dataclass(frozen=True, eq=False)
class Group:
    """Points that differ in numbers alone.

    With a `system`, the strategy is its plan, and it is rolled out over so many `iterations`.
    """

    points: list[Point]
    run: ParametricRun
    strategy: Strategy
    system: SystemConfig | None = None
    iterations: int = 0

    @property
    def numbers(self) -> Float[np.ndarray, "point key"]:
        """The numbers of every point, as the scenario has them."""
        keys = self.run.keys
        rows = [[point.values[key] for key in keys] for point in self.points]
        return np.array(rows, float).reshape(len(rows), len(keys))

    @property
    def exchange(self) -> str:
        """The exchange of all layers."""
        return self.strategy.placement.exchange[0]


class Refused(NamedTuple):
    """Points that no model could be set up for, and why."""

    points: list[Point]
    reason: str


@dataclass
class Grouping:
    """Sorts points into groups, and remembers which keys are no numbers of the model."""

    space: Space
    structural: set[str] = field(default_factory=set)
    refusals: dict[str, InputError | None] = field(default_factory=dict)  # by the text of a scenario's values

    def sorted(self, points: Sequence[Point]) -> list[list[Point]]:
        """Points by all but their numbers, those that share a run next to each other."""
        groups: dict[str, dict[str, list[Point]]] = {}
        for point in points:
            structure, method = self.structure(point.values)
            groups.setdefault(structure, {}).setdefault(method, []).append(point)
        return [group for methods in groups.values() for group in methods.values()]

    def structure(self, values: Values) -> tuple[str, str]:
        """Texts that are equal for points of one run, and for those of one strategy, exchange and system in it."""
        rest = {
            key: "a number" if self._may_be_number(key, value) else [value]
            for key, value in values.items()
            if not _is_method(key)
        }
        method = {key: value for key, value in values.items() if _is_method(key)}
        return json.dumps(rest, sort_keys=True), json.dumps(method, sort_keys=True)

    def _may_be_number(self, key: str, value: object) -> bool:
        return is_number(value) and key not in self.structural

    def numbers(self, values: Values) -> tuple[str, ...]:
        """Keys of a point that may be numbers of the model."""
        return tuple(
            key
            for key, value in values.items()
            if key not in self.space.parameters and not _is_method(key) and self._may_be_number(key, value)
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


def _is_method(key: str) -> bool:
    """Whether a key chooses the strategy, exchange or system, and not the machine."""
    return key in DEFAULTS or is_of_system(key)


def groups_of(
    space: Space, points: Sequence[Point], report: Callable[[int, int], None], known: Sequence[Point] = ()
) -> Iterator[Group | Refused]:
    """All points in groups, those of a run after each other; a run is drawn when its first group is asked for.

    Raises `SweepError` at once for a value that no point may have, and with the first group where none can be set up.
    `report` is called with the points done and those in all. `known` are further points of the study, whose rows are
    there: their values are in order.
    """
    grouping = Grouping(space)
    _check_values(grouping, points, known)
    return _set_up(grouping, points, report, bool(known))


def _set_up(
    grouping: Grouping, points: Sequence[Point], report: Callable[[int, int], None], able: bool
) -> Iterator[Group | Refused]:
    """The groups. Those without a run wait for the first that has one, unless points are known to be `able`."""
    waiting, held, done = grouping.sorted(points)[::-1], list[Refused](), 0
    last: tuple[str, ParametricRun] | None = None  # and the structure that it is of
    while waiting:
        members = waiting.pop()
        before, structure = len(grouping.structural), grouping.structure(members[0].values)[0]
        found = last[1] if last and last[0] == structure else _run_of(grouping, members)
        if len(grouping.structural) > before:
            # The structures of all others changed as well.
            rest = [*members, *(point for part in waiting[::-1] for point in part)]
            waiting, last = grouping.sorted(rest)[::-1], None
            continue
        run, refused = (found, {}) if isinstance(found, ParametricRun) else (None, found)
        last = last if run is None else (structure, run)
        parted = _parted(grouping.space, members, run, refused or _refused_numbers(grouping, members))
        done += len(members)
        report(done, len(points))
        able = able or any(isinstance(each, Group) for each in parted)
        if able:
            yield from (*held, *parted)
            held.clear()
        else:
            held += [each for each in parted if isinstance(each, Refused)]
    if held:
        raise SweepError(held[0].reason)


def _parted(
    space: Space, members: list[Point], run: ParametricRun | None, refused: dict[int, InputError]
) -> list[Group | Refused]:
    """Points that can be set up in one group, and a group for each reason why others, by their place, cannot."""
    able = [point for at, point in enumerate(members) if at not in refused]
    by_reason: dict[str, list[int]] = {}
    for at, error in refused.items():
        by_reason.setdefault(str(error), []).append(at)
    groups = [_group(space, able, run)] if able and run is not None else []
    return groups + [Refused([members[at] for at in places], reason) for reason, places in by_reason.items()]


def _check_values(grouping: Grouping, points: Sequence[Point], known: Sequence[Point]) -> None:
    """Raise `SweepError` where a value of an axis does in no point.

    A value that is in points alone that cannot be, as drawn ones are in but one, may do in the place of another's.
    Where the wrong value stands in another file, which does not go with that of the axis, the points have notes.
    """
    space, refused, fine = grouping.space, list[tuple[Point, InputError]](), [*known]
    for members in grouping.sorted(points):
        errors = _refused_numbers(grouping, members)
        refused += [(members[at], error) for at, error in errors.items() if _is_of_study(space, error)]
        fine += [point for at, point in enumerate(members) if at not in errors]
    some = fine[:: max(len(fine) // MOST_TRIED, 1)]
    for key in space.study.config.axes if refused else ():
        valid = {_text(point, key) for point in fine}
        for point, error in refused:
            text, value = _text(point, key), point.values[key]
            if text not in valid and not any(_loads(space, other.values | {key: value}) for other in some):
                raise SweepError(str(error))
            valid.add(text)


def _is_of_study(space: Space, error: InputError) -> bool:
    """Whether a value that the study gives is wrong, as far as is known."""
    return not isinstance(error, ConfigError) or not error.written_in or space.label in error.written_in


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


def _group(space: Space, points: list[Point], run: ParametricRun) -> Group | Refused:
    name, exchange = points[0].values["strategy"], points[0].values["exchange"]
    try:
        if not space.study.has_systems:
            return Group(points, run, with_exchange(run.inputs, run.strategies[name], exchange))
        system = space.scenario(points[0].values).system
        plans = given_plans([system.plan], run.inputs, compared=()) if system.plan not in run.strategies else ()
        usual = plans[0] if plans else run.strategies[system.plan]
        if usual.placement.copies is not None:
            return Refused(
                points, f"plan {system.plan} has copies of experts, which sweeps do not serve yet; evaluate it"
            )
        plan = with_exchange(run.inputs, usual, exchange)
        return Group(points, run, plan, system=system, iterations=space.study.config.iterations)
    except InputError as error:
        return Refused(points, str(error))


def with_exchange(inputs: Inputs, usual: Strategy, exchange: str) -> Strategy:
    """A usual strategy under an exchange, which may be its own. Raises `ExchangeError` where it does not suit."""
    if exchange == OWN:
        return usual
    inputs.exchange(exchange)
    return strategy(inputs, usual.name, usual.placement.share, exchange)


def _run_of(grouping: Grouping, members: list[Point]) -> ParametricRun | dict[int, InputError]:
    """The run that these points share, or why each of them, by its place, cannot be set up.

    Where keys are no plain numbers of the model, adds them to those that define groups and returns nothing.
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
            check_layers(grouping.space, scenario)
            if structural := structural_keys(scenario, keys):
                grouping.structural |= structural.keys()
                return {}
            return parametric_run(scenario, keys, layers)
        except InputError as error:
            errors[at] = grouping.refusals[text] = error
    return errors


def check_layers(space: Space, scenario: Scenario) -> None:
    """Raise `SweepError` where the model lacks a layer that the study names."""
    model = build_model(scenario.model)
    if unknown := [layer for layer in space.study.config.layers or () if layer not in model.moe_layer_ids]:
        raise SweepError(
            f"{space.label}: layers has {unknown}, but {model.name} has experts in layers "
            f"{list(model.moe_layer_ids)}; name some of these, or leave layers out for all"
        )


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
    """The first point, and places where a number is least, largest, or the first that is no integer."""
    ends = [0]
    for key in keys:
        numbers = [point.values[key] for point in members]
        broken = [at for at, number in enumerate(numbers) if not isinstance(number, int)]
        places = range(len(members))
        # a key that takes integers alone refuses the first of these
        ends += [min(places, key=numbers.__getitem__), max(places, key=numbers.__getitem__), *broken[:1]]
    return list(dict.fromkeys(ends))
