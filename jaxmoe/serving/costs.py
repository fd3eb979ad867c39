"""Joules and price of a million output tokens: by what a machine says of its parts, or by a board's power and hours."""

from typing import Any, NamedTuple

from jaxmoe.serving.closed_loop import Backend, Users, step_loads, tokens_of_step
from jaxmoe.serving.kernels import Given
from jaxmoe.serving.step import AbstractStep

MILLION, HOUR = 1e6, 3600.0
BOARD, PARTS = "board power x time", "energy of the machine's parts"


class DeviceCosts(NamedTuple):
    """Of one device: the `power` of its board, W, which it is taken to draw all the time, and the price of an `hour`.

    `None` where not given.
    """

    power: float | None = None
    hour: float | None = None

    def joules(self, tokens_per_s: Given) -> Any:
        """J of a million tokens, of which a device has so many a second."""
        return None if self.power is None else MILLION * self.power / tokens_per_s

    def price(self, tokens_per_s: Given) -> Any:
        """Price of a million tokens, in the currency of an hour."""
        return None if self.hour is None else MILLION * self.hour / HOUR / tokens_per_s


def joules_of_steps(step: AbstractStep, users: Users, sequences: Given, backend: Backend) -> Any:
    """J of a million output tokens, from the energy that steps take of a machine's parts; `None` where none is stated.

    A token takes its part of a step that decodes, and its part of the steps that read a prompt.
    """
    loads = step_loads(step, users, sequences, backend)
    alone, reading = step.time(loads.alone), step.time(loads.reading)
    if not alone.energy:
        return None
    added = reading.total_energy - (alone.total_energy if backend.mixes else 0.0)
    ranks, tokens = step.deployment.data, tokens_of_step(step.deployment.drafted, users.acceptance)
    decoded = alone.total_energy / (loads.alone.decoding * tokens)
    return MILLION * (decoded + loads.chunks * added / users.output) / ranks
