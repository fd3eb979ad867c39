"""A search over a machine's numbers: an objective and constraints as functions of a position inside their bounds."""

import abc
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.engine import Layer
from jaxmoe.errors import InputError
from jaxmoe.relax import AbstractReduction
from jaxmoe.tune.machine.designs import Arguments, DesignGroup

Position = Float[Array, " variable"]  # 0 at the lower bound of a variable, 1 at the upper one
Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps done and those in all."""


class MachineSearchError(InputError):
    """A search over a machine's numbers that cannot be carried out. The message names the key and the remedy."""


@runtime_checkable
class Bounds(Protocol):
    """Ends of a variable, and equal steps between them as differences or ratios."""

    @property
    def start(self) -> float: ...

    @property
    def stop(self) -> float: ...

    @property
    def scale(self) -> Literal["linear", "log"]: ...

    def parts(self, numbers: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
        """Where numbers are between the ends, 0 to 1."""


@runtime_checkable
class MachineConstraint(Protocol):
    """A relation between two expressions of a machine's numbers, such as `left <= right`."""

    @property
    def text(self) -> str: ...

    @property
    def relation(self) -> Literal["<=", ">=", "=="]: ...


class AbstractMachineProblem(abc.ABC):
    """Find numbers of a machine, and which of some designs runs on it.

    Variables are numbers by name (`bounds`); `model_numbers.ModelNumbers` says which leaves of the layer model each of
    them changes. Designs are timed by `objective`, those of a group in one compiled function.
    """

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """Name of the file or text that states the search, for errors."""

    @property
    @abc.abstractmethod
    def bounds(self) -> Mapping[str, Bounds]:
        """Ends of every variable, by name."""

    @property
    @abc.abstractmethod
    def integers(self) -> tuple[str, ...]:
        """Names of the variables that have to be integers."""

    @property
    @abc.abstractmethod
    def constraints(self) -> Sequence[MachineConstraint]:
        """Conditions on the numbers."""

    @property
    @abc.abstractmethod
    def groups(self) -> Sequence[DesignGroup]:
        """Groups of designs; one compiled function times each group."""

    @property
    @abc.abstractmethod
    def num_sizes(self) -> int:
        """Sizes of batch whose geometric mean counts."""

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """Steps of gradient descent at least."""

    @property
    @abc.abstractmethod
    def seed(self) -> int:
        """Seed of the starts."""

    @property
    @abc.abstractmethod
    def lower_is_better(self) -> bool:
        """Whether the metric is to be low."""

    @abc.abstractmethod
    def with_derived(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Variables, and numbers that are derived from them, by name."""

    @abc.abstractmethod
    def sides(self, constraint: Any, numbers: Mapping[str, Any]) -> tuple[Any, Any]:
        """Both sides of a constraint at numbers by name."""

    @abc.abstractmethod
    def limit(self, constraint: Any) -> float | None:
        """Value of the side that is the same for all machines, the right one first; `None` where neither is."""

    @abc.abstractmethod
    def limit_is_left(self, constraint: Any) -> bool:
        """Whether the limit is the left side."""

    @abc.abstractmethod
    def with_constraints(self, texts: Sequence[str]) -> "AbstractMachineProblem":
        """The problem with further constraints."""

    @abc.abstractmethod
    def model(self, numbers: Mapping[str, Any], fixed: Layer) -> Layer:
        """The layer model at numbers by name; leaves that no number changes are those of `fixed`."""

    @abc.abstractmethod
    def objective(
        self, static: Any, arguments: Arguments, position: Position, reduction: AbstractReduction | None
    ) -> Float[Array, ""]:
        """The logarithm of the metric of one design, mean over sizes of batch; negative where higher is better.

        Exact without a `reduction`. `static` and `arguments` are those of the design's group.
        """

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the variables."""
        return tuple(self.bounds)

    def numbers(self, position: Position | Sequence[float]) -> dict[str, Any]:
        """Variables and all that is derived from them, by name; plain where the position is."""
        values: dict[str, Any] = {}
        for (key, bounds), part in zip(self.bounds.items(), position, strict=True):
            low, high = bounds.start, bounds.stop
            values[key] = low * (high / low) ** part if bounds.scale == "log" else low + (high - low) * part
        return self.with_derived(values)

    def scale(self, constraint: MachineConstraint, left: Any, right: Any) -> Any:
        """Scale of a constraint's excess: its limit, or where that is no constant the larger side.

        Of a limit of 0 it is the larger side in the middle of the bounds.
        """
        limit = self.limit(constraint)
        if limit:
            return abs(limit)
        if limit is None:
            return jnp.maximum(jnp.maximum(jnp.abs(left), jnp.abs(right)), 1e-30)
        middle = self.sides(constraint, self.numbers([0.5] * len(self.keys)))
        return max(*(abs(float(side)) for side in middle), 1e-30)

    def excess(self, position: Position) -> Float[Array, " constraint"]:
        """By how much every constraint is broken, relative to its `scale`: 0 where it holds just so, less where
        it has slack. Either sign breaks an equality.
        """
        numbers, made = self.numbers(position), []
        for constraint in self.constraints:
            left, right = (jnp.asarray(side, jnp.float32) for side in self.sides(constraint, numbers))
            gap = right - left if constraint.relation == ">=" else left - right
            made.append(gap / jax.lax.stop_gradient(self.scale(constraint, left, right)))
        return jnp.stack(made) if made else jnp.zeros(0)

    @cached_property
    def equal(self) -> np.ndarray:
        """Which constraints are equalities, bool [constraint]."""
        return np.array([constraint.relation == "==" for constraint in self.constraints], bool)

    @cached_property
    def excess_and_slope(self) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Excess at many positions, float64 [position, constraint], and slopes [position, constraint, variable]."""
        compiled = jax.jit(jax.vmap(lambda position: (self.excess(position), jax.jacfwd(self.excess)(position))))

        def both(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            excess, slope = compiled(jnp.asarray(positions, jnp.float32))
            shape = (len(positions), len(self.constraints))
            return np.asarray(excess, float).reshape(shape), np.asarray(slope, float).reshape(*shape, len(self.keys))

        return both

    def metric(self, objective: float) -> float:
        """The metric, SI units, from a value of the objective."""
        return float(np.exp(objective if self.lower_is_better else -objective))
