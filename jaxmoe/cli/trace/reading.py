"""The files of a command line, by name."""

from collections.abc import Sequence
from pathlib import Path

from jaxmoe.cli.session import OptionError
from jaxmoe.config import build_model, load_model
from jaxmoe.traces import GatingTrace, Hints, LoadCounts, read_any

Source = GatingTrace | LoadCounts


def read_files(paths: Sequence[Path], model: str | None) -> dict[str, Source]:
    """Every file by its name, or its whole path where two have the same name.

    `model` is the name or file of the model that they are of, for what a file does not state. Raises `TraceError`,
    `ConfigError` or `OptionError`.
    """
    if len(set(paths)) < len(paths):
        raise OptionError("a file is given twice; give each file once")
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    return {name: read_file(path, model) for name, path in zip(names, paths, strict=True)}


def read_file(path: Path, model: str | None) -> Source:
    """A trace or load counts of any kind, as above."""
    return read_any(path, hints_of(model)).content


def hints_of(model: str | None) -> Hints:
    """What the model tells that a file may not state; nothing without one. Raises `ConfigError`."""
    if model is None:
        return Hints()
    moe = build_model(load_model(model, "--model"))
    return Hints(moe.num_experts, moe.top_k, moe.moe_layer_ids, moe.num_layers)
