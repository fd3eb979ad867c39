"""Where timings of a network come from: the event simulator, or a table of measurements; and tables of profiles."""

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Float

from jaxmoe.des import Fabric, replay_traffic
from jaxmoe.experiment.profile_fit import Measure, Timings
from jaxmoe.files import atomic_write
from jaxmoe.network.pairwise import FITTED, STAGES, Profile, ProfileError

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
