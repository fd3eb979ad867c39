"""Measurements of a machine from CSV files, and the modelled time of each.

The functions that time a layer also time the measurements.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.config import HardwareConfig
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
HELD_OUT = 5  # every so many-th measurement of a kind is kept from the fit


@dataclass(frozen=True)
class Measurements:
    """Measurements of one kind: columns by name, [sample], and seconds."""

    kind: str
    columns: Mapping[str, np.ndarray]
    seconds: Float[np.ndarray, " sample"]

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def held_out(self) -> np.ndarray:
        """Whether each measurement is kept from the fit to test it, bool [sample]."""
        return np.arange(len(self)) % HELD_OUT == HELD_OUT - 1


class Crowding(NamedTuple):
    """Factors on the modelled time of an all-to-all, fitted to measurements.

    `load` multiplies the seconds of its busiest link or port, `path` the delay of its longest path. They are not 1
    because messages wait for each other where paths cross, and the last one to arrive need not have the longest path.
    """

    load: float | Float[Array, ""] = 1.0
    path: float | Float[Array, ""] = 1.0

    @staticmethod
    def of_logarithms(position: Float[Array, " factor"]) -> "Crowding":
        return Crowding(*jnp.exp(position))


ALONE = Crowding()


def read_measured(path: Path, hardware: HardwareConfig) -> Measurements:
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
    return Measurements(kind, arrays, arrays.pop("seconds"))


def _entry(place: str, name: str, text: str | None, hardware: HardwareConfig) -> float | int:
    """One value of a line; a memory level as its index in the machine's list."""
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


# Modelled times of measurements.


def seconds_of(
    measured: Measurements, machine: Machine, network: Congestion, crowding: Crowding = ALONE
) -> Float[Array, " sample"]:
    """Seconds of every measurement by the model; `crowding` is of all-to-alls.

    Raises `OptionError` where the machine has no such part.
    """
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
        crowding = ALONE
        place = columns["source"] * nodes + columns["destination"]
        traffic = jax.vmap(lambda at, size: jnp.zeros(nodes**2).at[at].set(size))(place, columns["bytes"])
    else:
        traffic = columns["bytes"][:, None] * jnp.ravel(1 - jnp.eye(nodes))

    def seconds(matrix: Float[Array, " pair"]) -> Float[Array, ""]:
        time = network(machine.topology, matrix.reshape(nodes, nodes))
        busiest = time.total(HardMax()) - time.path_delay
        return crowding.load * busiest + crowding.path * time.path_delay

    # One after the other: a matrix for each of many messages between many nodes would not fit.
    return jax.lax.map(seconds, traffic, batch_size=64)


def _gemm_seconds(machine: Machine, columns: Mapping[str, Array]) -> Float[Array, " sample"]:
    """Seconds of one matrix product on one die, timed as an expert that is a single product, not cut."""
    rows, width = columns["tokens"], columns["columns"]
    rate = machine.die.flops[0] / (2 * columns["hidden"] * width)  # tokens a second
    if machine.die.gemm is None:
        return rows / rate
    one = jnp.ones_like(rows)
    return jax.vmap(machine.die.gemm.seconds)(rows, one, one, rate, width, one)
