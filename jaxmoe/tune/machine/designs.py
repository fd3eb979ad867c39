"""Designs that one compiled function times: arguments by batch size and exchange, and the axes that differ."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jaxmoe.engine import Layer
from jaxmoe.network import AbstractExchange
from jaxmoe.traces import Batch


class EvaluationArguments(NamedTuple):
    """A placement and all that it is timed with, as arguments: constants of their own would be compiled in."""

    model: Layer
    share: Float[Array, "*design layer expert node"]
    batches: Batch  # leaves [layer, batch, ...]
    exchange: AbstractExchange  # of all these layers


Arguments = tuple[tuple[EvaluationArguments, ...], ...]  # by size of batch and exchange


class DesignGroup(NamedTuple):
    """Designs that one function times: strategies under one exchange, or a tuned plan.

    Groups with equal `static` share what is compiled; the shares of `arguments` have a leading axis of designs.
    """

    names: tuple[str, ...]
    static: Hashable
    arguments: Arguments


def by_design(arguments: Arguments) -> Any:
    """`in_axes` of `vmap` over the designs of a group: shares alone differ."""
    axes: Any = (None, 0, None, None)
    return tuple(tuple(EvaluationArguments(*axes) for _ in parts) for parts in arguments)
