"""Files of fitted kernels: a data sheet and, for every kernel, its names, its numbers and its intervals, as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from jaxmoe.errors import InputError
from jaxmoe.hardware.gpu.kernel import Base, FittedKernel, Reach, Residual
from jaxmoe.hardware.gpu.sheet import SHEETS, Sheet, sheet_of

FORMAT = 1
DIGITS = 4  # of a number: far below what a fit knows of it


class KernelFileError(InputError):
    """A file of kernels that cannot be used, with the reason and the remedy."""


@dataclass(frozen=True, eq=False)
class KnownKernel:
    """A kernel with its names, and by sizes from which on it is measured over told seconds, lower and upper."""

    kind: str
    names: Mapping[str, str]
    fitted: FittedKernel
    intervals: Sequence[tuple[float, float, float]]
    told: Mapping[str, Any]  # rows, held-out error: for people

    def interval(self, size: Float[np.ndarray, " row"]) -> tuple[np.ndarray, np.ndarray]:
        """Factors on told seconds, within which measured ones are in nine cases of ten."""
        starts = np.array([each[0] for each in self.intervals])
        at = np.maximum(np.searchsorted(starts, size, side="right") - 1, 0)
        bounds = np.array([each[1:] for each in self.intervals])
        return bounds[at, 0], bounds[at, 1]


@dataclass(frozen=True, eq=False)
class KernelFile:
    """All fitted kernels of one GPU.

    `like` names the file beside it of another GPU, whose kernels are taken for kinds that it has none of.
    """

    system: str
    source: str
    sheet: Sheet
    kernels: tuple[KnownKernel, ...]
    like: str | None = None

    def of_kind(self, kind: str) -> list[KnownKernel]:
        """Kernels of a kind of table."""
        return [kernel for kernel in self.kernels if kernel.kind == kind]


def at_sheet(file: KernelFile, system: str | None) -> KernelFile:
    """These kernels as another GPU would run them by its data sheet alone, which nobody measured.

    Raises `KernelFileError` for a GPU whose data sheet is not known.
    """
    if system is None or system == file.system:
        return file
    if system not in SHEETS:
        raise KernelFileError(f"there is no data sheet of {system!r}; known are {', '.join(SHEETS)}")
    source = f"{file.source}; at the data sheet of {system}"
    kernels = _measured_on(file.system, file.kernels)
    return replace(file, system=system, source=source, sheet=sheet_of(system), kernels=kernels)


def write_kernels(path: Path, file: KernelFile) -> None:
    """Write a file of kernels."""
    sheet = {name: np.asarray(getattr(file.sheet, name)).item() for name in Sheet.__dataclass_fields__}
    told = {"format": FORMAT, "system": file.system, "source": file.source, "sheet": sheet}
    told |= {} if file.like is None else {"like": file.like}
    lines = [json.dumps(_written(kernel)) for kernel in file.kernels]
    head = json.dumps(told, indent=1).removesuffix("\n}")
    path.write_text(head + ',\n "kernels": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n", encoding="utf-8")


def _written(kernel: KnownKernel) -> dict[str, Any]:
    numbers = {"base": _numbers(kernel.fitted.base)}
    for name in ("residual", "reach"):
        part = getattr(kernel.fitted, name)
        if part is not None:
            numbers[name] = _numbers(part)
    intervals = [[_short(value) for value in each] for each in kernel.intervals]
    return {"kind": kernel.kind, **kernel.names, "told": kernel.told, "intervals": intervals, **numbers}


def _numbers(part: eqx.Module) -> dict[str, Any]:
    return {name: _short(np.asarray(getattr(part, name)).tolist()) for name in part.__dataclass_fields__}


def _short(value: object) -> Any:
    return [_short(each) for each in value] if isinstance(value, list) else float(f"{value:.{DIGITS}g}")


def read_kernels(path: Path) -> KernelFile:
    """Read a file of kernels, with those of the file that it is like, at its own data sheet.

    Raises `KernelFileError` for one that is none.
    """
    file = read_own_kernels(path)
    if file.like is None:
        return file
    own, other = {kernel.kind for kernel in file.kernels}, read_own_kernels(path.with_name(file.like))
    taken = (kernel for kernel in other.kernels if kernel.kind not in own)
    return replace(file, kernels=(*file.kernels, *_measured_on(other.system, taken)), like=None)


def _measured_on(system: str, kernels: Iterable[KnownKernel]) -> tuple[KnownKernel, ...]:
    """These kernels with the GPU that they were measured on."""
    return tuple(replace(kernel, told={"measured_on": system, **kernel.told}) for kernel in kernels)


def files_of(path: Path) -> list[Path]:
    """A file of kernels, and the one that it is like, if there is one; any other file alone."""
    try:
        like = json.loads(path.read_text(encoding="utf-8")).get("like")
    except (ValueError, AttributeError):
        like = None
    if like is None or not path.with_name(like).is_file():
        return [path]
    return [path, path.with_name(like)]


def read_own_kernels(path: Path) -> KernelFile:
    """Read the kernels that a file has itself. Raises `KernelFileError` for one that is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise KernelFileError(f"{path}: has format {data['format']}, expected {FORMAT}; calibrate the machine anew")
        sheet = Sheet.of(**data["sheet"])
        kernels = tuple(map(_read, data["kernels"]))
        return KernelFile(data["system"], data["source"], sheet, kernels, data.get("like"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise KernelFileError(
            f"{path}: is no file of kernels ({type(error).__name__}: {error}); write one with jaxmoe calibrate"
        ) from None


def _read(data: dict[str, Any]) -> KnownKernel:
    parts = {"base": Base, "residual": Residual, "reach": Reach}
    made = {
        name: part(**{key: jax.device_put(np.asarray(value, np.float32)) for key, value in data.pop(name).items()})
        for name, part in parts.items()
        if name in data
    }
    kind, told, intervals = (data.pop(name) for name in ("kind", "told", "intervals"))
    known = [(float(start), float(low), float(high)) for start, low, high in intervals]
    return KnownKernel(kind, data, FittedKernel(**made), known, told)
