"""Calibration: numbers of a machine fitted to measurements by gradients through the model, with what is uncertain.

The logarithms of the numbers are fitted so that the logarithms of the times agree. Noise is taken to be relative,
outliers count linearly. An all-to-all may take some per cent more or less than what the model counts: two factors for
all of them, `Crowding`, are fitted as well, so that it does not pass for a slower link. What is known of factors
beforehand counts as a measurement of each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # imports its submodules when they are first used
from jaxtyping import Array, Float

from jaxmoe.config import HardwareConfig, Section, build_machine, build_time_model, number_at, with_numbers
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measurements import Crowding, Measurements, seconds_of

FITTED = ("_per_s", "_ns", "efficiency")  # ends of keys that are fitted where no key is named
STARTS, SPREAD = 8, 1.5  # fits from so many places, and how far they are from the description, in e-folds
OUTLIER = 0.1  # relative residuals beyond which a measurement counts linearly
NOISE = OUTLIER / 3  # that of measurements, against which what is known of factors is weighed
USUAL = Crowding(load=0.1, path=0.5)  # how far from 1, in logarithms, the factors of all-to-alls are as a rule
EXPECTED = np.diag(NOISE / np.array(USUAL))  # a measurement of each, which says 1
ENOUGH = 8  # measurements of a kind that tell its own noise
SINGULAR = 1e-4  # singular values below this part of the largest are directions that nothing measured depends on
PART_OF_IT, MOST_ERROR = 0.1, 0.5  # of a key in such a direction, and its standard error, above which it is unknown


@dataclass(frozen=True)
class FittedNumber:
    """A number of the machine before and after the fit, with its relative standard error.

    `known` is false where the measurements do not determine the number. `alike` are the keys whose effects on the
    measurements cannot be separated from its own.
    """

    key: str
    before: float
    after: float
    error: float
    known: bool
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """The machine with fitted numbers, and modelled seconds of every measurement `before` and `after` the fit.

    `crowding`: the fitted factors of all-to-alls. `after` includes them; the machine in `hardware` does not.
    """

    hardware: HardwareConfig
    numbers: tuple[FittedNumber, ...]
    crowding: Crowding
    measured: Sequence[Measurements]
    before: Sequence[np.ndarray]
    after: Sequence[np.ndarray]

    def errors(self, of: Sequence[np.ndarray], held_out: bool) -> dict[str, float]:
        """Mean relative error of predictions by kind, over the held-out samples or over those the fit used."""
        found = {}
        for each, said in zip(self.measured, of, strict=True):
            rows = each.held_out if held_out else ~each.held_out
            if rows.any():
                found[each.kind] = float(np.mean(np.abs(said[rows] / each.seconds[rows] - 1)))
        return found


# The fit.


def fitted_keys(hardware: HardwareConfig) -> list[str]:
    """Rates, latencies and efficiencies that a machine's description states, by dotted key."""

    def stated(section: Section, before: str) -> Iterable[str]:
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, Section):
                yield from stated(value, f"{before}{name}.")
            elif name == "memory":
                for level in value:
                    yield from stated(level, f"{before}{name}.{level.name}.")
            elif isinstance(value, float) and value > 0 and name in section.model_fields_set and _is_fitted(name):
                yield before + name

    return list(stated(hardware, ""))


def _is_fitted(name: str) -> bool:
    """Whether a key is of a speed; what takes energy, area or money for each unit of one is not."""
    return name.endswith(FITTED) and "_per_GB_per_s" not in name and "_per_TFLOPs" not in name


@dataclass(frozen=True, eq=False)
class Fit:
    """Numbers of a machine as a function of positions, their logarithms relative to the description.

    The last positions are the logarithms of the factors of all-to-alls.
    """

    hardware: HardwareConfig
    keys: tuple[str, ...]
    measured: Sequence[Measurements]
    base: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        values = []
        for key in self.keys:
            try:
                values.append(number_at(self.hardware, key))
            except (AttributeError, StopIteration, TypeError):
                known = ", ".join(fitted_keys(self.hardware))
                raise OptionError(f"--fit {key}: the machine states no such number; it states {known}") from None
            if not values[-1] > 0:
                raise OptionError(f"--fit {key}: is {values[-1]:g}; give a first guess above 0 with --set {key}=VALUE")
        object.__setattr__(self, "base", np.array(values))

    @cached_property
    def _logarithms(self):
        def logarithms(position: Float[Array, " position"]) -> list[Float[Array, " sample"]]:
            values, crowding = self.base * jnp.exp(position[:-2]), Crowding.of_logarithms(position[-2:])
            hardware = with_numbers(self.hardware, dict(zip(self.keys, values, strict=True)))
            machine, network = build_machine(hardware), build_time_model(hardware)
            return [jnp.log(seconds_of(each, machine, network, crowding)) for each in self.measured]

        return jax.jit(logarithms)

    def predicted(self, position: np.ndarray) -> list[np.ndarray]:
        """Modelled seconds of every measurement at a position, [sample] for each entry of `measured`."""
        return [np.exp(np.asarray(log, float)) for log in self._logarithms(jnp.asarray(position, jnp.float32))]

    def residuals(self, position: np.ndarray) -> Float[np.ndarray, " sample"]:
        """Residuals of the fit at a position.

        Logarithms of modelled over measured seconds, without held-out samples; then one for each factor of all-to-alls,
        its logarithm weighted by `EXPECTED`.
        """
        said = self._logarithms(jnp.asarray(position, jnp.float32))
        logs = [np.asarray(log, float) - np.log(each.seconds) for log, each in zip(said, self.measured, strict=True)]
        return np.append(self._seen(logs), EXPECTED @ position[-2:])

    def jacobian(self, position: np.ndarray) -> Float[np.ndarray, "sample position"]:
        """Derivatives of the residuals by every position."""
        parts = [np.asarray(part, float) for part in self._derivatives(jnp.asarray(position, jnp.float32))]
        return np.vstack([self._seen(parts), np.hstack([np.zeros((2, len(self.keys))), EXPECTED])])

    def noise(self, residuals: Float[np.ndarray, " sample"]) -> Float[np.ndarray, " sample"]:
        """The standard deviation of every residual, by medians; for each kind apart where it has `ENOUGH` samples."""
        spare = max(len(residuals) - len(self.base) - 2, 1)

        def spread(some: Float[np.ndarray, " sample"]) -> float:
            # 1.4826 medians of normal noise are a standard deviation. What the model gets wrong counts as noise.
            return float(1.4826 * np.median(np.abs(some)) * np.sqrt(len(residuals) / spare))

        counts = [int((~each.held_out).sum()) for each in self.measured]
        kinds = np.split(residuals[:-2], np.cumsum(counts)[:-1])
        together = spread(residuals[:-2])
        each = [np.full(len(kind), spread(kind) if len(kind) >= ENOUGH else together) for kind in kinds]
        return np.concatenate([*each, np.full(2, NOISE)])

    @cached_property
    def _derivatives(self):
        return jax.jit(jax.jacfwd(self._logarithms))

    def _seen(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([part[~each.held_out] for part, each in zip(parts, self.measured, strict=True)])


def calibrate(
    hardware: HardwareConfig, keys: Sequence[str], measured: Sequence[Measurements], seed: int
) -> Calibration:
    """Fit the numbers at `keys`, from several starts, and tell how well each is known.

    Raises `OptionError` for keys that are no numbers above 0, and where nothing measured depends on any of them.
    """
    fit = Fit(hardware, tuple(keys), measured)
    nothing = np.zeros(len(keys) + 2)
    before = fit.predicted(nothing)
    if not np.abs(fit.jacobian(nothing)[:, :-2]).max(initial=0.0) > 0:
        raise OptionError(f"nothing measured depends on {', '.join(keys)}; measure it, or name other keys with --fit")
    rng = np.random.default_rng(seed)
    starts = [
        nothing,
        *SPREAD * np.append(rng.uniform(-1, 1, (STARTS - 1, len(keys))), np.zeros((STARTS - 1, 2)), axis=1),
    ]
    found = [
        scipy.optimize.least_squares(
            fit.residuals, start, fit.jacobian, loss="soft_l1", f_scale=OUTLIER, x_scale="jac", max_nfev=200
        )
        for start in starts
    ]
    best = min(found, key=lambda each: each.cost)
    position = np.where(np.abs(fit.jacobian(best.x)).max(axis=0) > 0, best.x, 0.0)  # what nothing told stays
    numbers = _told(fit, position)
    fitted = with_numbers(hardware, {number.key: float(f"{number.after:.6g}") for number in numbers})
    crowding = Crowding(*map(float, np.exp(position[-2:])))
    return Calibration(fitted, numbers, crowding, measured, before, fit.predicted(position))


def _told(fit: Fit, position: np.ndarray) -> tuple[FittedNumber, ...]:
    """Fitted numbers, their standard errors from the curvature at the fit, and whether the data determine each."""
    jacobian, noise = fit.jacobian(position), fit.noise(fit.residuals(position))
    seen = np.flatnonzero(np.abs(jacobian).max(axis=0) > 0)  # what some measurement depends on
    _, values, directions = np.linalg.svd(jacobian[:, seen], full_matrices=len(jacobian) < len(seen))
    values = np.pad(values, (0, len(directions) - len(values)))
    free = values < SINGULAR * values.max()
    # How each number answers to each residual, whose noise is of its own size.
    inverse = np.linalg.pinv(jacobian[:, seen], rcond=SINGULAR)
    variance = np.full(len(position), np.inf)
    variance[seen] = ((inverse * noise) ** 2).sum(axis=1)
    mixed = np.zeros((int(free.sum()), len(position)), bool)  # which numbers are in each direction that is free
    mixed[:, seen] = np.abs(directions[free]) > PART_OF_IT
    numbers = []
    for index, key in enumerate(fit.keys):
        along = np.asarray(mixed[mixed[:, index]].any(axis=0))
        alike = tuple(sorted(other for at, other in enumerate(fit.keys) if along[at] and at != index))
        error = float("inf") if along.any() else float(np.sqrt(variance[index]))
        before, after = float(fit.base[index]), float(fit.base[index] * np.exp(position[index]))
        numbers.append(FittedNumber(key, before, after, error, error <= MOST_ERROR, alike))
    return tuple(numbers)
