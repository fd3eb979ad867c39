"""Traffic matrices from an npz file: any number of them, under any names."""

import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float

from jaxmoe.cli.session import OptionError

LARGEST = 1e24  # B: no traffic comes near it, and times stay within 32 bits


def read_matrices(path: Path, nodes: int) -> dict[str, Float[np.ndarray, "node node2"]]:
    """Bytes from every source, a row, to every destination, a column, by name; in the order of the file.

    Diagonals, which are free, are set to zero. Raises `OptionError` naming the file, the key and what is wrong.
    """
    arrays = _read_npz(path)
    if not arrays:
        raise OptionError(f"{path}: holds no arrays; expected traffic matrices of {nodes}x{nodes} bytes")
    return {name: _checked(f"{path}: {name}", array, nodes) for name, array in arrays.items()}


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
