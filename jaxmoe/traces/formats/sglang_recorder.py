"""Dumps of SGLang's expert distribution recorder in mode stat (--expert-distribution-recorder-mode).

A `.pt` file, or a folder of them by time, with `logical_count` [step, layer, expert]. There is a row for every layer
of the model, zeros in dense ones; the layers with experts are those with counts, or come from a hint. Every step is
a window. Reading and writing need PyTorch, the extra jaxmoe[torch]; nothing but tensors is ever unpickled.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.traces.formats.arrays import member_names
from jaxmoe.traces.formats.aside import whole
from jaxmoe.traces.formats.choices import expert_layers, naming, with_dense
from jaxmoe.traces.formats.source import AGAIN, Format, Hints, Source
from jaxmoe.traces.trace import LoadCounts, TraceError


def _matches(source: Source) -> bool:
    if source.path.is_dir():
        return any(name.endswith(".pt") for name in source.files)
    return source.head.startswith(b"PK") and any(name.endswith("data.pkl") for name in member_names(source.path))


def _read(source: Source, hints: Hints) -> LoadCounts:
    steps = []
    for name, file in source.files.items():
        if name.endswith(".pt") or not source.path.is_dir():
            with naming(name if source.path.is_dir() else ""):
                steps.append(_counts(file))
                if steps[-1].shape[1:] != steps[0].shape[1:]:
                    raise TraceError(f"has layers and experts {steps[-1].shape[1:]}, the others {steps[0].shape[1:]}")
    counts = np.concatenate(steps)
    hints.agreed_experts(counts.shape[2])
    layers = expert_layers(np.asarray(counts.any(axis=(0, 2))), hints)
    windows = tuple(f"step {number}" for number in range(len(counts)))
    return LoadCounts(counts[:, layers], np.asarray(layers), hints.top_k, windows, {"source": source.path.name})


def _counts(file: Path) -> np.ndarray:
    """The counts in one dump, [step, layer, expert]."""
    torch = _torch()
    try:
        dump = torch.load(file, map_location="cpu", weights_only=True)
    # What a damaged file raises depends on where it is damaged.
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, KeyError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"not a dump of tensors ({reason}); {AGAIN}") from None
    if not isinstance(dump, dict) or "logical_count" not in dump:
        held = sorted(map(str, dump)) if isinstance(dump, dict) else type(dump).__name__
        raise TraceError(f"has no logical_count but {held}; record with --expert-distribution-recorder-mode stat")
    counts = dump["logical_count"]
    if not isinstance(counts, torch.Tensor) or counts.ndim != 3 or 0 in counts.shape or counts.is_floating_point():
        shape = tuple(counts.shape) if isinstance(counts, torch.Tensor) else type(counts).__name__
        raise TraceError(f"logical_count is {shape}, expected whole numbers [step, layer, expert]; {AGAIN}")
    return counts.numpy()


def _torch() -> Any:
    try:
        import torch  # not a dependency of the package
    except ImportError:
        raise TraceError("dumps of tensors need PyTorch; install jaxmoe[torch]") from None
    return torch


def _write(path: Path, loads: LoadCounts) -> list[str]:
    torch = _torch()
    counts = with_dense(loads.counts, loads.layer_ids.tolist())
    with whole(path) as aside:
        torch.save({"rank": 0, "logical_count": torch.from_numpy(counts)}, aside)
    unnamed = tuple(f"step {number}" for number in range(len(counts))) == loads.window_name
    return ([] if unnamed else ["window_name is left out"]) + ["top_k is left out"] * (loads.top_k is not None)


LOAD_COUNTS = Format("sglang", _matches, _read, _write, suffix=".pt")
