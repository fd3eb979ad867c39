"""Designs that are timed by one compiled function, and what that function is given of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.sweep.evaluation import Given


class Part(NamedTuple):
    """The layers of a design that share an exchange, and what times them."""

    setting: ParametricRun
    exchange: str
    rows: tuple[int, ...]


Arguments = tuple[tuple[Given, ...], ...]  # by size of batch and part
Settings = tuple[tuple[ParametricRun, ...], ...]  # likewise


class Family(NamedTuple):
    """Designs that are timed by one function: strategies under one exchange, or a tuned plan.

    `parts` has for every size of batch those of the layers, `given` their arguments, whose shares have a leading axis
    of designs.
    """

    names: tuple[str, ...]
    parts: tuple[tuple[Part, ...], ...]
    given: Arguments

    @property
    def settings(self) -> Settings:
        """All that a compiled function is of beside its arguments: families that have the same share it."""
        return tuple(tuple(part.setting for part in parts) for parts in self.parts)


def family_of(strategies: Sequence[Strategy], settings: Sequence[ParametricRun]) -> Family:
    """Strategies of one mode whose layers have the same exchanges, as one family."""
    names = strategies[0].placement.exchange
    parts, given = [], []
    for setting in settings:
        rows = {name: tuple(at for at, other in enumerate(names) if other == name) for name in dict.fromkeys(names)}
        chosen = [Part(setting, name, where) for name, where in rows.items()]
        parts.append(tuple(chosen))
        given.append(tuple(_given(part, strategies) for part in chosen))
    return Family(tuple(strategy.name for strategy in strategies), tuple(parts), tuple(given))


def _given(part: Part, strategies: Sequence[Strategy]) -> Given:
    setting, rows = part.setting, np.array(part.rows)
    share = jax.device_put(np.stack([strategy.placement.share[rows] for strategy in strategies]))
    batches = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[rows]), setting.batches)
    model = replace(setting.inputs.model, mode=strategies[0].placement.mode)
    return Given(model, share, batches, setting.inputs.exchange(part.exchange))


def by_design(given: Arguments) -> Any:
    """`in_axes` of `vmap` over the designs of a family: shares alone differ."""
    axes: Any = (None, 0, None, None)
    return tuple(tuple(Given(*axes) for _ in parts) for parts in given)
