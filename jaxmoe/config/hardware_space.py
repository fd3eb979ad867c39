"""A hardware space as a user describes it: numbers within bounds, constraints, and what is minimised.

    variables:
      hardware.die.compute_TFLOPs_per_s: {from: 1, to: 100, scale: log}
      hardware.link.bandwidth_GB_per_s: {from: 10, to: 1000, scale: log}
    choices: {hardware.mesh_shape: [[4, 4], [2, 8]]}
    derived: {area: 0.5 * hardware.die.compute_TFLOPs_per_s + 0.02 * hardware.link.bandwidth_GB_per_s}
    constraints: [area <= 20]
    objective: total
    placement: usual
    starts: 64

`placement: system` times what the scenario's system does, and `whole: [modules]` has whole numbers in the end.
All that names a key may name any key of the scenario, a variable or a derived value.
"""

import ast
import math
from dataclasses import dataclass
from graphlib import CycleError
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxmoe.config.base import Fraction, RuleError, Section
from jaxmoe.config.expressions import Expression, ExpressionError, check_expression, in_order
from jaxmoe.config.keys import Count, RangeConfig, Seed, Texts
from jaxmoe.config.loader import load_section
from jaxmoe.registry import METRICS

# Placements: all usual strategies; one that descends together with the machine; what the scenario's system does.
USUAL, TUNED, SYSTEM = "usual", "tuned", "system"
PLAN = "ep_balanced"  # of a system
Relation = Literal["<=", ">=", "=="]
RELATIONS: dict[type[ast.cmpop], Relation] = {ast.LtE: "<=", ast.GtE: ">=", ast.Eq: "=="}


@dataclass(frozen=True)
class ExpressionConstraint:
    """A constraint between two expressions over keys: `left` <=, >= or == `right`; `text` is the source."""

    text: str
    left: Expression
    relation: Relation
    right: Expression


def read_constraint(text: str) -> ExpressionConstraint:
    """Parse a constraint. Raises `ExpressionError` unless the text compares two expressions by <=, >= or ==."""
    Expression(text)
    match ast.parse(text.strip(), mode="eval").body:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in RELATIONS:
            sides = [Expression(ast.unparse(side)) for side in (left, right)]
            return ExpressionConstraint(text, sides[0], RELATIONS[type(op)], sides[1])
    raise ExpressionError(f"{text!r} is no constraint; write two expressions with one <=, >= or == between them")


class HardwareSpace(Section):
    """The content of the file that `--hardware` names."""

    name: str = Field(default="unnamed", description="a name for tables", examples=["mesh_under_20mm2"])
    variables: dict[str, RangeConfig] = Field(
        min_length=1,
        description="the numbers to choose, by dotted key of the scenario or a name of their own, as a mapping to "
        "{from: .., to: .., scale: linear|log}",
    )
    choices: dict[str, list[Any]] = Field(
        default={},
        description="keys that have no values in between (sizes, names), as a mapping to lists: every combination is "
        "tried in short, and the best one searched in full",
        examples=[{"hardware.mesh_shape": [[4, 4], [2, 8]]}],
    )
    derived: dict[str, str | int | float] = Field(
        default={}, description="further keys as a mapping to expressions over keys", examples=["total / 4"]
    )
    constraints: Texts = Field(
        default=(),
        description="the constraints as a list of expressions with <=, >= or ==",
        examples=[["hardware.die.compute_TFLOPs_per_s * 0.5 <= 20"]],
    )
    objective: str = Field(default="total", description=f"one of {', '.join(METRICS.builtin)}", examples=["p95"])
    batch_tokens: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None,
        description="batch sizes whose geometric mean counts as a list, or null for the scenario's",
        examples=[[128, 1024]],
    )
    placement: str | Texts = Field(
        default=USUAL,
        description=f"{USUAL} for all usual strategies, {TUNED} to search for a placement as well, {SYSTEM} for what "
        "the scenario's system does, or names of strategies as a list",
        examples=[TUNED],
    )
    whole: Texts = Field(
        default=(),
        description="the variables that are whole numbers in the end as a list; they descend as others do, and the "
        "whole numbers around where that ends are tried",
        examples=[["modules"]],
    )
    gate_loss: Fraction | None = Field(
        default=None,
        description="the part of the gate's mass that a bias on the router's logits may lose, where one is to be found "
        "together with machine and placement, or null for none",
        examples=[0.05],
    )
    copies: bool = Field(
        default=False,
        description="whether a tuned placement has whole experts and copies of them where memory has room, in place of "
        "experts that are cut over nodes",
    )
    starts: Count = Field(default=64, description="how many machines descend at once", examples=[64])
    steps: Count = Field(
        default=50, description="how many steps of gradient descent each takes, in whole segments of 25", examples=[50]
    )
    seed: Seed = Field(default=0, description="the seed of the starts", examples=[0])

    @model_validator(mode="after")
    def _variables_have_room(self) -> "HardwareSpace":
        for key, bounds in self.variables.items():
            if not bounds.start < bounds.stop:
                told = f"a number above from, {bounds.start:g}"
                raise RuleError(("variables", key, "to"), bounds.stop, told, "Exchange the two, or set it with --set")
            if bounds.points is not None:
                told, remedy = "no points: descent takes any number in between", "Remove it"
                raise RuleError(("variables", key, "points"), bounds.points, told, remedy)
            if key in self.derived:
                raise RuleError(("derived", key), self.derived[key], "no key of variables", "Remove it here or there")
        return self

    @model_validator(mode="after")
    def _choices_are_lists_of_their_own(self) -> "HardwareSpace":
        for key, values in self.choices.items():
            if not values:
                raise RuleError(("choices", key), values, "at least one value", "Add one, or remove the key")
            if key in self.variables or key in self.derived:
                told = "no key of variables or derived"
                raise RuleError(("choices", key), values, told, "Remove it here or there")
        return self

    @model_validator(mode="after")
    def _expressions_can_be_read(self) -> "HardwareSpace":
        for key, text in self.derived.items():
            check_expression(("derived", key), str(text))
        try:
            in_order(self.derived)
        except CycleError as error:
            told = " -> ".join(error.args[1])
            raise RuleError(("derived",), told, "no key that needs itself", "Write one of them without it") from None
        for index, text in enumerate(self.constraints):
            try:
                read_constraint(text)
            except ExpressionError as error:
                raise RuleError(("constraints", index), text, f"a constraint ({error})", "Correct it") from None
        return self

    @model_validator(mode="after")
    def _objective_has_a_slope(self) -> "HardwareSpace":
        if self.objective not in METRICS:
            raise RuleError(("objective",), self.objective, f"one of {', '.join(METRICS)}", "Write one of them")
        if self.placement == SYSTEM and self.objective not in ("total", "p95"):
            told = f"total or p95 beside placement: {SYSTEM}"
            raise RuleError(("objective",), self.objective, told, "A system tells the times of layers alone")
        if self.placement == TUNED and (self.objective not in ("total", "p95") or self.batch_tokens is not None):
            told = "usual or names of strategies beside batch_tokens, or an objective other than total and p95"
            raise RuleError(("placement",), self.placement, told, "A placement is tuned for one size of batch")
        if self.copies and self.placement != TUNED:
            told = f"false, or placement: {TUNED}"
            raise RuleError(("copies",), self.copies, told, "Copies are found together with a placement")
        if self.gate_loss is not None and (self.placement != TUNED or self.gate_loss == 0):
            told = f"a part above 0 beside placement: {TUNED}, or null"
            raise RuleError(("gate_loss",), self.gate_loss, told, "A bias is found together with a placement")
        return self

    @model_validator(mode="after")
    def _whole_numbers_are_there(self) -> "HardwareSpace":
        for index, key in enumerate(self.whole):
            bounds = self.variables.get(key)
            if bounds is None or self.placement == TUNED:
                told = f"a key of variables, and no placement: {TUNED}"
                raise RuleError(("whole", index), key, told, "Name one of variables, or leave it out")
            if math.floor(bounds.stop) < math.ceil(bounds.start):
                raise RuleError(("whole", index), key, "bounds with a whole number between", "Widen them")
        return self

    @property
    def strategies(self) -> tuple[str, ...] | None:
        """Names of the strategies that are tried; `None` for all usual ones."""
        if self.placement in (USUAL, TUNED):
            return None
        if self.placement == SYSTEM:
            return (PLAN,)
        return (self.placement,) if isinstance(self.placement, str) else self.placement


@dataclass(frozen=True)
class SpaceFile:
    """A space that was read, and its absolute path."""

    path: Path
    space: HardwareSpace


def read_space(path: Path) -> SpaceFile:
    """The space in a YAML file. Raises `ConfigError`."""
    absolute = path.absolute()
    return SpaceFile(absolute, load_section(HardwareSpace, absolute))
