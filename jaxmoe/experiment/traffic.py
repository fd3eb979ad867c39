"""Traffic on a network: given matrices by time models and in the event simulator, and timings of lone messages."""

import csv
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.des import Fabric, replay_traffic
from jaxmoe.des.traffic import Order
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.profile_fit import Measure, Timings
from jaxmoe.files import atomic_write
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import Congestion, Uncongested, alpha_beta
from jaxmoe.network.pairwise import FITTED, STAGES, Profile, ProfileError
from jaxmoe.relax import HardMax

LARGEST = 1e24  # B: no traffic comes near it, and times stay within 32 bits
Matrices = Mapping[str, Float[np.ndarray, "node node2"]]


@dataclass(frozen=True)
class Prediction:
    """Completion times of every matrix by each time model, s, and busy times by the congestion model, `model`, s."""

    completion: dict[str, Float[np.ndarray, " matrix"]]  # by time model: model, uncongested, alpha_beta
    link_time: Float[np.ndarray, "matrix link"]
    port_time: Float[np.ndarray, "matrix port"]  # ports that send, then ports that receive, where they are limited


@dataclass(frozen=True)
class TrafficLoads:
    """Bytes that every matrix sends, receives and puts on each link, exact. A node's traffic to itself is left out."""

    sent: Float[np.ndarray, "matrix node"]
    received: Float[np.ndarray, "matrix node"]
    link: Float[np.ndarray, "matrix link"]

    @property
    def total(self) -> Float[np.ndarray, " matrix"]:
        return self.sent.sum(axis=1)

    @property
    def hops(self) -> Float[np.ndarray, " matrix"]:
        """Bytes times the links they pass."""
        return self.link.sum(axis=1)


def read_matrices(path: Path, nodes: int) -> dict[str, Float[np.ndarray, "node node2"]]:
    """Bytes from every source, a row, to every destination, a column, by name; in the order of the file.

    Diagonals, which are free, are set to zero. Raises `OptionError` naming the file, the key and what is wrong.
    """
    arrays = _read_npz(path)
    if not arrays:
        raise OptionError(f"{path}: holds no arrays; expected traffic matrices of {nodes}x{nodes} bytes")
    return {name: _checked(f"{path}: {name}", array, nodes) for name, array in arrays.items()}


def predict(model: Congestion, topology: AbstractTopology, matrices: Matrices) -> Prediction:
    """Evaluate all time models on all matrices in one call."""
    traffic = jnp.asarray(np.stack(list(matrices.values())), jnp.float32)
    completion, link_time, port_time = jax.tree.map(
        lambda leaf: np.asarray(leaf, float), _evaluate(model, topology, traffic)
    )
    return Prediction(completion, link_time, port_time)


@eqx.filter_jit
def _evaluate(
    model: Congestion, topology: AbstractTopology, traffic: Float[Array, "matrix node node2"]
) -> tuple[dict[str, Float[Array, " matrix"]], Float[Array, "matrix link"], Float[Array, "matrix port"]]:
    pairwise = {"uncongested": Uncongested(), "alpha_beta": alpha_beta(topology, pipelined=model.cut_through)}

    def one(matrix: Float[Array, "node node2"]):
        stage = model(topology, matrix)
        completion = {"model": stage.total(HardMax())}
        completion |= {name: other(topology, matrix).total(HardMax()) for name, other in pairwise.items()}
        return completion, stage.link_time, stage.port_time

    return jax.vmap(one)(traffic)


def simulate(
    fabric: Fabric, matrices: Matrices, order: Order, seed: int, report: Callable[[int, int], None]
) -> Float[np.ndarray, " matrix"]:
    """Replay every matrix, s; `report` is called with the matrices done and those in all."""
    completion = np.zeros(len(matrices))
    for index, matrix in enumerate(matrices.values()):
        completion[index] = replay_traffic(fabric, matrix, order, seed).completion_s
        report(index + 1, len(matrices))
    return completion


def loads_of(fabric: Fabric, matrices: Matrices) -> TrafficLoads:
    """Count bytes along the paths that messages take, B."""
    pair, link = fabric.routes.rows.owner, fabric.routes.rows.items
    traffic = list(matrices.values())
    return TrafficLoads(
        sent=np.stack([matrix.sum(axis=1) for matrix in traffic]),
        received=np.stack([matrix.sum(axis=0) for matrix in traffic]),
        link=np.stack([np.bincount(link, matrix.ravel()[pair], fabric.num_links) for matrix in traffic]),
    )


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            head = file.read(2)
        if head != b"PK":
            what = "another kind of file" if head else "empty"
            raise OptionError(f"{path}: is {what}; expected an npz of traffic matrices, as numpy.savez writes it")
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files}
    except FileNotFoundError:
        raise OptionError(f"{path}: no such file; give an npz of traffic matrices with --traffic") from None
    # What a damaged archive raises depends on where it is damaged.
    except (OSError, ValueError, BadZipFile, EOFError, zlib.error, RuntimeError, KeyError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{path}: not a readable npz ({error}); write it again with numpy.savez") from None


def _checked(label: str, array: np.ndarray, nodes: int) -> Float[np.ndarray, "node node2"]:
    """The matrix in float64 without its diagonal; `label` names file and key."""
    if array.shape != (nodes, nodes):
        raise OptionError(
            f"{label} has shape {array.shape}, expected ({nodes}, {nodes}): the network has {nodes} nodes; "
            "remove the array from the file, or describe a network of its size"
        )
    if array.dtype.kind not in "iuf":
        raise OptionError(f"{label} holds values of type {array.dtype}, expected whole or floating-point numbers")
    traffic = array.astype(float)
    wrong = np.argwhere(~((traffic >= 0) & (traffic <= LARGEST)))
    if len(wrong):
        source, destination = wrong[0].tolist()
        raise OptionError(
            f"{label}[{source}, {destination}] is {traffic[source, destination]:g}, "
            f"expected bytes: zero or more, and at most {LARGEST:g}"
        )
    np.fill_diagonal(traffic, 0)
    return traffic


# Where timings of messages come from: the event simulator, or a table of measurements; and tables of profiles.

COLUMNS = ("source", "destination", "phase", "bytes", "seconds")


def by_simulator(fabric: Fabric) -> Measure:
    """Timings of the event simulator, in which all phases are alike."""

    def measure(phase: str, traffic: Float[np.ndarray, "node node2"]) -> float:
        return replay_traffic(fabric, traffic).completion_s

    return measure


def disturbed(measure: Measure, noise: float, outliers: float, seed: int) -> Measure:
    """Timings with normal relative `noise`, of which the part `outliers` takes 2 to 10 times as long."""
    rng = np.random.default_rng(seed)

    def noisy(phase: str, traffic: Float[np.ndarray, "node node2"]) -> float:
        late = rng.uniform(2, 10) if rng.random() < outliers else 1.0
        return measure(phase, traffic) * max(1 + noise * rng.standard_normal(), 0.1) * late

    return noisy


def read_timings(path: Path) -> Timings:
    """A CSV of lone messages with the columns source, destination, phase, bytes and seconds, in any order.

    Nodes are numbered from 0; the phase is metadata, dispatch or combine. Raises `ProfileError` naming file, line, key.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(f"{path}: has no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
        rows = [_row(path, reader.line_num, row) for row in reader]
    if not rows:
        raise ProfileError(f"{path}: has no timings; write a line for every message measured")
    return Timings.of(rows)


def _row(path: Path, line: int, row: dict[str, str]) -> tuple[int, int, int, float, float]:
    if row["phase"] not in STAGES:
        raise ProfileError(f"{path}, line {line}: phase is {row['phase']!r}, expected one of {', '.join(STAGES)}")
    numbers = []
    for name in ("source", "destination", "bytes", "seconds"):
        try:
            numbers.append(float(row[name]))
        except (TypeError, ValueError):
            raise ProfileError(f"{path}, line {line}: {name} is {row[name]!r}, expected a number") from None
    source, destination, size, seconds = numbers
    whole = source == int(source) >= 0 and destination == int(destination) >= 0 if np.isfinite(numbers).all() else False
    if not whole or size < 0 or seconds <= 0:
        expected = "nodes as whole numbers from 0, bytes of 0 or more and seconds above 0, all finite"
        raise ProfileError(f"{path}, line {line}: expected {expected}")
    return int(source), int(destination), STAGES.index(row["phase"]), size, seconds


def write_timings(path: Path, timings: Timings) -> None:
    """Write timings as a CSV that `read_timings` reads: source, destination, phase, bytes and seconds."""
    phases = [STAGES[row] for row in timings.phase]
    values = (timings.source, timings.destination, phases, timings.bytes, timings.seconds)
    _write(path, COLUMNS, zip(*values, strict=True))


def write_profile(path: Path, profile: Profile) -> None:
    """Fitted alphas and betas with their standard errors, a line for each phase and pair."""
    tables = (profile.alpha, profile.alpha_error, profile.beta, profile.beta_error, profile.samples)
    pairs = np.argwhere(~np.eye(profile.num_nodes, dtype=bool)).tolist()
    rows = [
        (phase, source, destination, *(table[row, source, destination] for table in tables))
        for row, phase in enumerate(STAGES)
        for source, destination in pairs
    ]
    _write(path, FITTED, rows)


def _write(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    with atomic_write(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
