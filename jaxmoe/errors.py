"""Errors of bad input and of placements, and of rules between several settings."""


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
