"""Kernel profiles in LLMServingSim's layout: measured seconds of each kernel of a layer, of one GPU.

The layout is told in docs/profiler/output-bundle of casys-kaist/LLMServingSim: a folder with `meta.yaml` and, for each
number of GPUs that a layer is cut over, `tpN` with `dense.csv`, `per_sequence.csv`, `attention.csv`, `moe.csv` where
the model has experts, and `skew_fit.csv` where contexts of unequal length were measured. Times there are in µs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from jaxtyping import Float

from jaxmoe.errors import InputError
from jaxmoe.files import read_table
from jaxmoe.units import MICRO

Line = tuple[float, ...]
ALONE = 1.0  # token of a prompt: as few make attention run the kernel that also reads prompts


class Curve(NamedTuple):
    """Seconds of a kernel at ascending sizes: tokens, or sequences."""

    sizes: Float[np.ndarray, " P"]
    seconds: Float[np.ndarray, " P"]

    def at(self, sizes: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
        """Seconds at other sizes: linear between, the first below, with the last slope above."""
        return onto(self.sizes, self.seconds, sizes)


class Grid(NamedTuple):
    """Seconds, or another number, over ascending values of each axis."""

    axes: tuple[Float[np.ndarray, " G"], ...]
    values: Float[np.ndarray, "..."]


@dataclass(frozen=True, eq=False)
class KernelProfile:
    """Kernels of a layer of a model on one of the GPUs that it is cut over.

    `attention` is over tokens of a prompt that is read, tokens before them, sequences that decode, and tokens of
    each before that. `experts` is over tokens, each with all of its choices, and over experts that any of them chose.
    `skew` is over tokens of a prompt and decoding sequences: how far their attention lies from that of equal contexts
    of the mean length towards that of the longest.
    """

    model: str
    kernels: Mapping[str, Curve]  # by the name of the layer
    attention: Grid  # s
    experts: Grid | None  # s
    skew: Grid | None


def read_profile(folder: Path, tensor: int) -> KernelProfile:
    """The profile of a model that is cut over `tensor` GPUs; `folder` has `meta.yaml`, or one folder that has it.

    Raises `InputError` for what is missing, and for a table that is not as it should be, with its row.
    """
    folder = _bundle(folder)
    part = folder / f"tp{tensor}"
    if not part.is_dir():
        known = ", ".join(sorted(each.name for each in folder.glob("tp*"))) or "none"
        raise InputError(f"{part}: no such folder; measured are {known}. Take one of these, or profile this one too")
    kernels = _curves(part / "dense.csv", "tokens") | _curves(part / "per_sequence.csv", "sequences")
    moe, skew = part / "moe.csv", part / "skew_fit.csv"
    return KernelProfile(
        model=_model(folder / "meta.yaml"),
        kernels=kernels,
        attention=_attention(part / "attention.csv"),
        experts=_experts(moe) if moe.is_file() and moe.stat().st_size else None,
        skew=_skew(skew) if skew.is_file() else None,
    )


def onto(points: Sequence[float] | np.ndarray, values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Values along the first axis at other points: linear between, the first below, with the last slope above."""
    points, values = np.asarray(points, float), np.asarray(values, float)
    if len(points) == 1:
        return np.repeat(values, len(grid), axis=0)
    low = np.clip(np.searchsorted(points, grid, side="right") - 1, 0, len(points) - 2)
    part = (np.maximum(grid, points[0]) - points[low]) / (points[low + 1] - points[low])
    part = part.reshape(-1, *[1] * (values.ndim - 1))
    return values[low] + part * (values[low + 1] - values[low])


def _bundle(folder: Path) -> Path:
    if (folder / "meta.yaml").is_file():
        return folder
    inner = sorted(each.parent for each in folder.glob("*/meta.yaml"))
    if len(inner) == 1:
        return inner[0]
    found = f"{len(inner)} folders in it have one" if inner else "nor has a folder in it"
    raise InputError(f"{folder}: has no meta.yaml, {found}; name the folder of one profile, such as .../bf16")


def _model(path: Path) -> str:
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML ({error}); get the profile again") from None
    if not isinstance(told, dict) or not isinstance(told.get("model"), str):
        raise InputError(f"{path}: has no key model; expected the name of the profiled model")
    return str(told["model"])


def _curves(path: Path, size: str) -> dict[str, Curve]:
    """Kernels by name; several times of one size count as their mean."""
    found = defaultdict(list)
    for name, line in _lines(path, (size, "time_us"), "layer"):
        found[name].append(line)
    return {name: Curve(*_means(lines)) for name, lines in found.items()}


def _means(lines: Iterable[Line]) -> tuple[np.ndarray, np.ndarray]:
    """Sizes in order, and the mean seconds of each."""
    sizes, seconds = np.array(list(lines)).T
    sizes, where = np.unique(sizes, return_inverse=True)
    return sizes, np.bincount(where, seconds * MICRO) / np.bincount(where)


def _experts(path: Path) -> Grid:
    lines = [line for _, line in _lines(path, ("tokens", "activated_experts", "time_us"))]
    tokens = np.unique([line[0] for line in lines])
    active = np.unique([line[1] for line in lines])
    columns = [onto(*_means((t, time) for t, e, time in lines if e == one), tokens) for one in active]
    return Grid((tokens, active), np.stack(columns, axis=1))


def _attention(path: Path) -> Grid:
    """All points of the grid; those that were not measured lie on lines through their neighbours.

    Without a prompt another kernel runs, so nothing lies between none and the first token of one.
    """
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    lines = [line for _, line in _lines(path, (*names, "time_us"))]
    chunks, before, decoding, cached = (np.unique([line[axis] for line in lines]) for axis in range(4))
    decoding = np.union1d([0.0], decoding)
    for axis, values in ((0, chunks), (2, decoding)):
        if not (values > 0).any():
            raise InputError(f"{path}: {names[axis]} is 0 in all rows; expected some above, as prompts are read, too")
    slices = _slices(lines, before, cached)
    nothing = np.zeros((len(before), len(cached)))
    pure = _along(decoding, {0.0: nothing} | {count: each for (chunk, count), each in slices.items() if chunk == 0})
    mixed = _mixed({key: each for key, each in slices.items() if key[0] > 0}, chunks[chunks > 0], decoding)
    chunks = np.union1d([0.0, ALONE], chunks)
    values = np.concatenate([pure[None], onto(*mixed, chunks[1:])])
    return Grid((chunks, before, decoding, cached), np.moveaxis(values, 1, 2))


def _slices(lines: list[Line], before: np.ndarray, cached: np.ndarray) -> dict[tuple[float, float], np.ndarray]:
    """Seconds over `before` and `cached`, by chunk and decoding sequences."""
    found = {}
    ordered = sorted(lines, key=lambda line: (line[0], line[2], line[1]))
    for key, some in groupby(ordered, key=lambda line: (line[0], line[2])):
        rows = {
            place: onto(*_means((line[3], line[4]) for line in same), cached)
            for place, same in groupby(some, key=lambda line: line[1])
        }
        found[key] = _along(before, rows)
    return found


def _mixed(
    slices: Mapping[tuple[float, float], np.ndarray], chunks: np.ndarray, decoding: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Chunks, and the seconds of each with any number of decoding sequences: [chunk, decoding, ...]."""
    own = {chunk: {count: each for (of, count), each in slices.items() if of == chunk} for chunk in chunks}
    whole = {chunk: _along(decoding, each) for chunk, each in own.items() if max(each) > 0}
    if not whole:
        return chunks, np.stack([_along(decoding, own[chunk]) for chunk in chunks])
    seconds = _along(chunks, whole)
    alone = {chunk: each[0.0] for chunk, each in own.items() if 0.0 in each}
    if alone:  # chunks were measured more finely without decoding
        seconds[:, 0] = _along(chunks, alone)
    return chunks, seconds


def _along(grid: np.ndarray, parts: Mapping[float, np.ndarray]) -> np.ndarray:
    points = sorted(parts)
    return onto(points, np.stack([parts[point] for point in points]), grid)


def _skew(path: Path) -> Grid | None:
    """For each chunk and number of sequences, the median over what else was varied, weighted by samples.

    A label `n<=64` stands for the 64 sequences that were measured.
    """
    found = defaultdict(list)
    for label, line in _lines(path, ("pc", "alpha", "n_samples"), "n_label"):
        if count := re.fullmatch(r"n<=(\d+)", label):
            found[line[0], float(count.group(1))].append(line[1:])
    chunks, counts = (np.unique([key[axis] for key in found]) for axis in range(2))
    rows = []
    for chunk in chunks:
        known = sorted((count, _median(lines)) for (of, count), lines in found.items() if of == chunk)
        rows.append(np.interp(counts, [count for count, _ in known], [part for _, part in known]))
    return Grid((chunks, counts), np.array(rows)) if rows else None


def _median(lines: Iterable[Line]) -> float:
    values, weights = np.array(sorted(lines)).T
    return float(values[np.searchsorted(np.cumsum(weights), weights.sum() / 2)])


def _lines(path: Path, numbers: tuple[str, ...], text: str = "") -> list[tuple[str, Line]]:
    """Rows of a table: what the column `text` says, and the numbers. The last but of `skew_fit.csv` are times."""
    try:
        rows = read_table(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a profile has it, so get the profile again") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: not readable ({error}); expected a CSV file") from None
    if not rows:
        raise InputError(f"{path}: has no rows; get the profile again")
    if missing := [name for name in (*numbers, *filter(None, [text])) if name not in rows[0]]:
        raise InputError(f"{path}: has no column {missing[0]}; expected {', '.join(filter(None, (text, *numbers)))}")
    return [
        (row[text] if text else "", tuple(_number(path, line, name, row[name]) for name in numbers))
        for line, row in enumerate(rows, start=2)
    ]


def _number(path: Path, line: int, name: str, value: str | None) -> float:
    try:
        number = float(value or "")
    except ValueError:
        number = math.nan
    least = -math.inf if name == "alpha" else 0.0
    if not math.isfinite(number) or number < least or (name == "time_us" and number == 0):
        expected = "a time above 0" if name == "time_us" else "a number" if name == "alpha" else "a number from 0"
        raise InputError(f"{path}: line {line}: {name} is {value!r}; expected {expected}. Correct or leave out the row")
    return number
