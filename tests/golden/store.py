"""Golden files: named arrays, on which machine they were recorded, and how figures are compared."""

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jaxlib
import numpy as np

Arrays = dict[str, np.ndarray]  # by names with slashes

DATA = Path(__file__).resolve().parent / "data"
HERE, ELSEWHERE = 1e-6, 1e-5  # relative tolerances: on the machine that recorded, and on others
OTHERWISE = 0.01  # part of decisions that may fall otherwise on other machines, where equals are told by rounding
LATER = re.compile(r"\b(busy|energy)/")  # figures of which there are more kinds than were recorded
WORSE = 2e-3  # part by which a search may end worse


def fingerprint() -> dict[str, str]:
    """The processor and the versions that decide the last digits."""
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    flags = ""
    if found:
        flags = re.search(r"\nflags\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        flags = hashlib.sha256(flags[1].encode()).hexdigest()[:12] if flags else ""
    return {
        "processor": found[1] if found else platform.processor() or platform.machine(),
        "instructions": flags,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
    }


def tolerance(recorded: Mapping[str, str]) -> float:
    """The relative tolerance for figures that were recorded there."""
    return HERE if dict(recorded) == fingerprint() else ELSEWHERE


def small(array: np.ndarray) -> np.ndarray:
    """The array in the smallest type that has all its values exactly."""
    array = np.asarray(array)
    if array.dtype.kind in "iu":
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        return array.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)))
    if array.dtype == np.float64:
        narrow = array.astype(np.float32)
        return narrow if np.array_equal(narrow.astype(np.float64), array, equal_nan=True) else array
    return array


def write(family: str, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a golden file of this family of cases."""
    DATA.mkdir(exist_ok=True)
    path = DATA / f"{family}.npz"
    about = np.array(json.dumps(fingerprint(), sort_keys=True))
    kept = {name: small(array) for name, array in sorted(arrays.items())}
    np.savez_compressed(path, about=about, **kept)
    return path


def read(family: str) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a family, and the fingerprint of the machine that recorded them."""
    with np.load(DATA / f"{family}.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    arrays = {name: array.astype(np.int32) if array.dtype.kind == "u" else array for name, array in arrays.items()}
    return arrays, json.loads(str(arrays.pop("about")))


def under(arrays: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    """The arrays whose names begin so, by what follows."""
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def named(arrays: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    """The arrays with a prefix before their names."""
    return {prefix + name: np.asarray(array) for name, array in arrays.items()}


def differences(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], rtol: float) -> list[str]:
    """Every array that differs, with its worst entry. Busy resources and energies that were not recorded are left out.

    An entry may differ by `rtol` of itself and a tenth of that of the largest entry of its array: links that carry
    next to nothing have the rounding of sums that are much larger.
    """
    told = [f"{name} is missing" for name in expected if name not in found]
    told += [f"{name} is not in the golden file" for name in found if name not in expected and not LATER.search(name)]
    for name in sorted({*found} & {*expected}):
        told += _difference(name, np.asarray(found[name]), np.asarray(expected[name]), rtol)
    return told


def _difference(name: str, found: np.ndarray, expected: np.ndarray, rtol: float) -> Iterable[str]:
    if found.shape != expected.shape:
        return [f"{name} has the shape {found.shape}, expected {expected.shape}"]
    if not expected.size:
        return []
    found, expected = found.astype(float), expected.astype(float)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    finite = np.isfinite(expected)
    largest = np.abs(expected[finite]).max(initial=0.0)
    off = np.where(same, 0.0, np.abs(found - np.where(finite, expected, 0)))
    allowed = rtol * (np.abs(np.where(finite, expected, 0)) + 0.1 * largest)
    bad = ~same & ~(finite & (off <= allowed))
    if not bad.any():
        return []
    at = np.unravel_index(np.argmax(np.where(bad, np.nan_to_num(off, nan=np.inf), -1)), bad.shape)
    part = abs(found[at] / expected[at] - 1) if expected[at] else np.inf
    place = [int(index) for index in at]
    return [f"{name}{place} is {found[at]:.9g}, expected {expected[at]:.9g} (off by {part:.1e}; {bad.sum()} entries)"]


def undecided(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], part: float) -> list[str]:
    """Every array of decisions of which more than a part is decided otherwise; numbers count as alike to 1e-6."""
    told = [f"{name} is missing" for name in expected if name not in found]
    told += [f"{name} is not in the golden file" for name in found if name not in expected]
    for name in sorted({*found} & {*expected}):
        got, kept = np.asarray(found[name]), np.asarray(expected[name])
        if got.shape != kept.shape:
            told.append(f"{name} has the shape {got.shape}, expected {kept.shape}")
            continue
        close = np.isclose(got, kept, rtol=HERE, atol=0, equal_nan=True) if kept.dtype.kind == "f" else got == kept
        if (~close).sum() > part * close.size:
            told.append(f"{name}: {(~close).sum()} of {close.size} entries were decided otherwise")
    return told
