"""Calibration: numbers of a machine fitted to measurements by gradients through the model, with what is uncertain.

Every measurement is priced by the very functions that price a layer; the logarithms of the numbers are fitted so that
the logarithms of the times agree. Noise is taken to be relative, outliers count linearly. An all-to-all may take some
per cent more or less than the largest load that the model counts: one factor for all of them is fitted as well, so that
it does not pass for a slower link.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # imports its submodules when they are first used
from jaxtyping import Array, Float

from jaxmoe.config import HardwareConfig, Section, build_machine, build_time_model, number_at, with_numbers
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.hardware import Machine
from jaxmoe.network import Congestion
from jaxmoe.relax import HardMax

# What is measured, by the columns beside `seconds` of a CSV file; other columns are left alone.
COLUMNS = {
    "gemm": ("tokens", "hidden", "columns"),  # one product, [tokens, hidden] by [hidden, columns]
    "memory": ("level", "bytes"),  # one node reads so much from a level of memory, alone
    "ping": ("source", "destination", "bytes"),  # one message, alone
    "all_to_all": ("bytes",),  # so much from every node to every other, all at once
}
PLACES = ("level", "source", "destination")  # columns of whole numbers
FITTED = ("_per_s", "_ns", "efficiency")  # ends of keys that are fitted where no key is named
HELD_OUT = 5  # every so many-th measurement of a kind is kept from the fit
STARTS, SPREAD = 8, 1.5  # fits from so many places, and how far they are from the description, in e-folds
CONTENTION = 0.1  # how far, in logarithms, that factor is from 1 as a rule: a measurement of its own
OUTLIER = 0.1  # relative residuals beyond which a measurement counts linearly
SINGULAR = 1e-4  # singular values below this part of the largest are directions that nothing measured depends on
PART_OF_IT, MOST_ERROR = 0.1, 0.5  # of a key in such a direction, and its standard error, above which it is unknown


@dataclass(frozen=True)
class Measured:
    """Measurements of one kind: columns by name, [sample], and seconds."""

    kind: str
    columns: Mapping[str, np.ndarray]
    seconds: Float[np.ndarray, " sample"]

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def held_out(self) -> np.ndarray:
        """Which ones the fit does not see."""
        return np.arange(len(self)) % HELD_OUT == HELD_OUT - 1


@dataclass(frozen=True)
class FittedNumber:
    """A number before and after, and its relative standard error; `alike` are the keys it cannot be told from.

    `known` is false where the measurements do not say what the number is.
    """

    key: str
    before: float
    after: float
    error: float
    known: bool
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """The machine with fitted numbers, and what it says of every measurement, s.

    `contention` is the factor by which all-to-alls take longer than the model says; `after` has it in.
    """

    hardware: HardwareConfig
    numbers: tuple[FittedNumber, ...]
    contention: float
    measured: Sequence[Measured]
    before: Sequence[np.ndarray]
    after: Sequence[np.ndarray]

    def errors(self, of: Sequence[np.ndarray], held_out: bool) -> dict[str, float]:
        """Mean relative error by kind, of what the fit saw or of what was held out."""
        found = {}
        for each, said in zip(self.measured, of, strict=True):
            rows = each.held_out if held_out else ~each.held_out
            if rows.any():
                found[each.kind] = float(np.mean(np.abs(said[rows] / each.seconds[rows] - 1)))
        return found


def read_measured(path: Path, hardware: HardwareConfig) -> Measured:
    """A CSV whose first line names the columns of one kind. Raises `OptionError` naming file, line and column."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names, lines = list(reader.fieldnames or ()), [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise OptionError(f"{path}: cannot be read as a CSV file ({error}); give one with --measured") from None
    # Of kinds whose columns are all there, the one with the most.
    fits = [kind for kind, columns in COLUMNS.items() if {*columns, "seconds"} <= set(names)]
    if not fits or not lines:
        told = "; or ".join(f"{', '.join(columns)}, seconds ({kind})" for kind, columns in COLUMNS.items())
        what = "no measurements" if fits else f"the columns {', '.join(names) or 'none'}"
        raise OptionError(f"{path}: has {what}; write a line for each measurement, below a line {told}")
    kind = max(fits, key=lambda fit: len(COLUMNS[fit]))
    columns: dict[str, list] = {name: [] for name in (*COLUMNS[kind], "seconds")}
    for number, line in lines:
        for name, values in columns.items():
            values.append(_entry(f"{path}, line {number}", name, line[name], hardware))
    arrays = {name: np.array(values) for name, values in columns.items()}
    if kind == "ping" and (arrays["source"] == arrays["destination"]).any():
        raise OptionError(f"{path}: a message goes from a node to itself; remove its line")
    return Measured(kind, arrays, arrays.pop("seconds"))


def _entry(place: str, name: str, text: str | None, hardware: HardwareConfig) -> float | int:
    """One value of a line: a level as its place in the list."""
    if name == "level":
        known = [level.name for level in hardware.memory] or ["memory"]
        if text not in known:
            raise OptionError(
                f"{place}: level is {text!r}, expected one of {', '.join(known)}, as the machine names it"
            )
        return known.index(text)
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if name in ("source", "destination"):
        if value not in range(hardware.num_nodes):
            raise OptionError(f"{place}: {name} is {text!r}, expected a node from 0 to {hardware.num_nodes - 1}")
        return int(value)
    if not 0 < value < np.inf:
        raise OptionError(f"{place}: {name} is {text!r}, expected a finite number above 0")
    return value


# What the model says of measurements.


def seconds_of(measured: Measured, machine: Machine, network: Congestion) -> Float[Array, " sample"]:
    """Seconds of every measurement by the model. Raises `OptionError` where the machine has no such part."""
    columns = {
        name: jnp.asarray(values, jnp.int32 if name in PLACES else jnp.float32)
        for name, values in measured.columns.items()
    }
    match measured.kind:
        case "gemm":
            return _gemm_seconds(machine, columns)
        case "memory":
            if not machine.memory:
                raise OptionError("measured memory, but the machine states none; add memory to its description")
            moved = jnp.zeros(machine.num_nodes).at[0]
            levels = [
                jax.vmap(lambda size, level=level: level.seconds(moved.set(size)).max())(columns["bytes"])
                for level in machine.memory
            ]
            return jnp.stack(levels)[columns["level"], jnp.arange(len(measured))]
    nodes = machine.num_nodes
    if measured.kind == "ping":
        place = columns["source"] * nodes + columns["destination"]
        traffic = jax.vmap(lambda at, size: jnp.zeros(nodes**2).at[at].set(size))(place, columns["bytes"])
    else:
        traffic = columns["bytes"][:, None] * jnp.ravel(1 - jnp.eye(nodes))
    # One after the other: a matrix for each of many messages between many nodes would not fit.
    return jax.lax.map(
        lambda matrix: network(machine.topology, matrix.reshape(nodes, nodes)).total(HardMax()), traffic, batch_size=64
    )


def _gemm_seconds(machine: Machine, columns: Mapping[str, Array]) -> Float[Array, " sample"]:
    """One product on one die: as an expert of one product, all of whose columns the die has."""
    rows, width = columns["tokens"], columns["columns"]
    rate = machine.die.flops[0] / (2 * columns["hidden"] * width)  # tokens a second
    if machine.die.gemm is None:
        return rows / rate
    one = jnp.ones_like(rows)
    return jax.vmap(machine.die.gemm.seconds)(rows, one, one, rate, width, one)


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

    The last position is the logarithm of what all-to-alls take over what the model says.
    """

    hardware: HardwareConfig
    keys: tuple[str, ...]
    measured: Sequence[Measured]
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
            values = self.base * jnp.exp(position[:-1])
            hardware = with_numbers(self.hardware, dict(zip(self.keys, values, strict=True)))
            machine, network = build_machine(hardware), build_time_model(hardware)
            return [
                jnp.log(seconds_of(each, machine, network)) + (position[-1] if each.kind == "all_to_all" else 0)
                for each in self.measured
            ]

        return jax.jit(logarithms)

    def predicted(self, position: np.ndarray) -> list[np.ndarray]:
        """What the model says, s."""
        return [np.exp(np.asarray(log, float)) for log in self._logarithms(jnp.asarray(position, jnp.float32))]

    def residuals(self, position: np.ndarray) -> Float[np.ndarray, " sample"]:
        """How far the logarithms are off, of what is not held out; and last the factor's, in units of noise."""
        said = self._logarithms(jnp.asarray(position, jnp.float32))
        logs = [np.asarray(log, float) - np.log(each.seconds) for log, each in zip(said, self.measured, strict=True)]
        return np.append(self._seen(logs), self._expected * position[-1])

    def jacobian(self, position: np.ndarray) -> Float[np.ndarray, "sample position"]:
        """Their derivatives by every position."""
        parts = [np.asarray(part, float) for part in self._derivatives(jnp.asarray(position, jnp.float32))]
        factor = np.append(np.zeros(len(self.keys)), self._expected)
        return np.vstack([self._seen(parts), factor])

    @property
    def _expected(self) -> float:
        """The weight of the factor's own residual, for noise of a third of what makes an outlier."""
        return OUTLIER / 3 / CONTENTION

    @cached_property
    def _derivatives(self):
        return jax.jit(jax.jacfwd(self._logarithms))

    def _seen(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([part[~each.held_out] for part, each in zip(parts, self.measured, strict=True)])


def calibrate(hardware: HardwareConfig, keys: Sequence[str], measured: Sequence[Measured], seed: int) -> Calibration:
    """Fit the numbers at `keys`, from several starts, and tell how well each is known.

    Raises `OptionError` for keys that are no numbers above 0, and where nothing measured depends on any of them.
    """
    fit = Fit(hardware, tuple(keys), measured)
    nothing = np.zeros(len(keys) + 1)
    before = fit.predicted(nothing)
    if not np.abs(fit.jacobian(nothing)[:, :-1]).max(initial=0.0) > 0:
        raise OptionError(f"nothing measured depends on {', '.join(keys)}; measure it, or name other keys with --fit")
    rng = np.random.default_rng(seed)
    starts = [
        nothing,
        *SPREAD * np.append(rng.uniform(-1, 1, (STARTS - 1, len(keys))), np.zeros((STARTS - 1, 1)), axis=1),
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
    return Calibration(fitted, numbers, float(np.exp(position[-1])), measured, before, fit.predicted(position))


def _told(fit: Fit, position: np.ndarray) -> tuple[FittedNumber, ...]:
    """Standard errors by the curvature at the fit, and which numbers the measurements do not tell."""
    jacobian, residuals = fit.jacobian(position), fit.residuals(position)
    spare = max(len(residuals) - len(position), 1)
    # Robust: 1.4826 median deviations of normal noise are a standard deviation.
    noise = 1.4826 * np.median(np.abs(residuals - np.median(residuals))) * np.sqrt(len(residuals) / spare)
    seen = np.flatnonzero(np.abs(jacobian).max(axis=0) > 0)  # what some measurement depends on
    _, values, directions = np.linalg.svd(jacobian[:, seen], full_matrices=len(residuals) < len(seen))
    values = np.pad(values, (0, len(directions) - len(values)))
    free = values < SINGULAR * values.max()
    variance = np.full(len(position), np.inf)
    variance[seen] = ((directions[~free] / values[~free, None]) ** 2).sum(axis=0) * noise**2
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
