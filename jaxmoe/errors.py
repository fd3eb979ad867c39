"""Errors of bad input and of placements, and of rules between several settings."""

import re
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


_LISTED = re.compile(
    r"""(?:is|has) ["'](?P<said>[^"']+)["'][;,] expected one of (?P<known>[^.;]+)(?P<rest>[.;]\s*|$)"""
)


def with_nearest(message: str) -> str:
    """The message of a refusal, with a question for the nearest name where it lists those that are known."""
    found = _LISTED.search(message)
    if found is None or "id you mean" in message:
        return message
    known = (name.strip("'\"` ") for name in re.split(", | or ", found["known"]))
    guess, end = did_you_mean(found["said"], known), found.start("rest")
    return f"{message[:end]}. {guess}{message[found.end() :]}".rstrip() if guess else message
