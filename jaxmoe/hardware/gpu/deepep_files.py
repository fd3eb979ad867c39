"""Files of DeepEP's fitted exchanges: a GPU's links and, for every kernel, its names, numbers and interval, as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.hardware.gpu.deepep import ExchangeKernel, Links, LowLatencyKernel, NormalKernel, Notice
from jaxmoe.hardware.gpu.files import KernelFileError

FORMAT, DIGITS = 2, 5  # 2: the start of a low-latency kernel moves all choices of a token
FORMS: dict[str, type[ExchangeKernel]] = {"transmit": NormalKernel, "notify": Notice, "avg_t": LowLatencyKernel}


@dataclass(frozen=True)
class KnownExchange:
    """A fitted exchange: what it is by `names`, and measured over told seconds in nine cases of ten.

    `names` has `side` (dispatch or combine), `part` (a key of `FORMS`), `across` (nodes or node) and `version`.
    """

    names: Mapping[str, str]
    kernel: ExchangeKernel
    interval: tuple[float, float]
    told: Mapping[str, Any]  # rows, held-out error: for people


@dataclass(frozen=True)
class ExchangeFile:
    """All fitted exchanges of one GPU."""

    system: str
    source: str
    links: Links
    processors: int
    exchanges: tuple[KnownExchange, ...]
    node: int = 8  # GPUs


def beside(kernels: Path) -> Path:
    """Where the exchanges are of which a file has the other kernels: NAME_deepep.json for NAME.json."""
    return kernels.with_name(f"{kernels.stem}_deepep.json")


def write_exchanges(path: Path, file: ExchangeFile) -> None:
    """Write a file of exchanges."""
    head = {"format": FORMAT, "system": file.system, "source": file.source, "processors": file.processors}
    head |= {"node": file.node}
    told = json.dumps({**head, "links": file.links._asdict()}, indent=1).removesuffix("\n}")
    lines = (json.dumps(_written(exchange)) for exchange in file.exchanges)
    path.write_text(told + ',\n "exchanges": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n", encoding="utf-8")


def _written(exchange: KnownExchange) -> dict[str, Any]:
    numbers = {name: _short(getattr(exchange.kernel, name)) for name in exchange.kernel.__dataclass_fields__}
    interval = [_short(bound) for bound in exchange.interval]
    return {**exchange.names, "told": dict(exchange.told), "interval": interval, "numbers": numbers}


def _short(value: object) -> float:
    return float(f"{float(np.asarray(value)):.{DIGITS}g}")


def read_exchanges(path: Path) -> ExchangeFile:
    """Read a file of exchanges. Raises `KernelFileError` for one that is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise KernelFileError(f"{path}: has format {data['format']}, expected {FORMAT}; calibrate the machine anew")
        exchanges = tuple(map(_read, data["exchanges"]))
        links, numbers = Links(**data["links"]), (data["processors"], exchanges, data.get("node", 8))
        return ExchangeFile(data["system"], data["source"], links, *numbers)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise KernelFileError(
            f"{path}: is no file of exchanges ({type(error).__name__}: {error}); write one with jaxmoe calibrate"
        ) from None


def _read(data: dict[str, Any]) -> KnownExchange:
    told, (low, high), numbers = (data.pop(name) for name in ("told", "interval", "numbers"))
    form = FORMS[data["part"]]
    return KnownExchange(data, form(**{name: jnp.float32(value) for name, value in numbers.items()}), (low, high), told)
