"""Errors of bad input and of placements, and of rules between several settings."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something that was given is wrong. The message names it, its value and the remedy."""


class PlanError(InputError):
    """A placement that cannot be used, with the reason and the remedy."""


class RuleError(ValueError):
    """A rule between several settings does not hold, or a value has the wrong form.

    `keys` lead from the section that holds the rule to the value to blame; `expected` and `remedy` are
    put into the message as they are.
    """

    def __init__(self, keys: tuple[str | int, ...], value: object, expected: str, remedy: str) -> None:
        super().__init__(f"{keys} is {value!r}; expected {expected}. {remedy}")
        self.keys, self.value, self.expected, self.remedy = keys, value, expected, remedy


def did_you_mean(said: object, known: Iterable[str]) -> str:
    """A question for the known name that is nearest to what was written; empty where none is near."""
    near = get_close_matches(str(said), [*known], n=1)
    return f"Did you mean {near[0]}? " if near else ""


def write_one(said: object, known: Iterable[str]) -> str:
    """The remedy for a name that is none of those known."""
    return f"{did_you_mean(said, known)}Write one of them"
