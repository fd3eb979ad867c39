"""What all errors of bad input have in common."""


class InputError(ValueError):
    """Something that was given is wrong. The message names it, its value and the remedy."""
