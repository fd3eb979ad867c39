"""The router traces of FLAME-MoE (Hugging Face dataset CMU-FLAME/FLAME-MoE-Traces).

Parquet, one file for each iteration and layer, with the columns `indices` list<int16> and optionally `scores`
list<float16>, a row for each token. The numbers come from the names: `layer_02` or `layer2`, and `iter_0000540`,
`iteration-540` or a folder or file called `540`, anywhere in the path; a file without a second number is of
iteration 0. Layers count from 1, as Megatron's do, and `layer_ids` from 0. Every iteration is a sequence.
Missing choices and the number of experts, without a hint the largest id + 1, are not in it.

Reading and writing need pyarrow, the extra `traces`.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.extras import install_command
from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.expert_choices import (
    RecordedSequence,
    check_not_negative,
    joined,
    names,
    naming,
    parted,
    stacked_layers,
)
from jaxmoe.traces.formats.source import AGAIN, Format, Hints, TraceSource, check_whole
from jaxmoe.traces.trace import GatingTrace, TraceError

_LAYER = re.compile(r"layer[_-]?(\d+)", re.IGNORECASE)
_ITERATION = re.compile(r"(?:iter(?:ation)?|step|epoch|checkpoint|ckpt)[_-]?(\d+)|(?:^|/)(\d+)(?=/|\.)", re.IGNORECASE)


def _matches(source: TraceSource) -> bool:
    return source.head.startswith(b"PAR1") or any(name.endswith(".parquet") for name in source.files)


def _read(source: TraceSource, hints: Hints) -> GatingTrace:
    table: dict[int, dict[int, tuple[str, Path]]] = {}
    for name, file in source.files.items():
        if name.endswith(".parquet") or not source.path.is_dir():
            iteration, layer = _numbers(name)
            other = table.setdefault(iteration, {}).setdefault(layer, (name, file))
            if other != (name, file):
                raise TraceError(f"{name} and {other[0]} are both iteration {iteration}, layer {layer}; keep one")
    order = sorted(table[min(table)])
    sequences = []
    for iteration, layers in sorted(table.items()):
        if sorted(layers) != order:
            raise TraceError(f"iteration {iteration} has layers {sorted(layers)}, but {min(table)} has {order}")
        sequences.append(_iteration(iteration, layers))
    facts = {"source": source.path.name}
    return joined(sequences, [layer - 1 for layer in order], hints.num_experts, facts)


def _numbers(name: str) -> tuple[int, int]:
    """Iteration and layer of a file, by its path."""
    layer = _LAYER.search(name)
    if layer is None:
        raise TraceError(f"{name}: the name has no layer number, expected one such as layer_02.parquet")
    if int(layer[1]) == 0:
        raise TraceError(f"{name}: FLAME-MoE counts layers from 1; rename the files")
    iteration = _ITERATION.search(name)
    return 0 if iteration is None else int(iteration[1] or iteration[2]), int(layer[1])


def _iteration(number: int, layers: dict[int, tuple[str, Path]]) -> RecordedSequence:
    experts, weights = {}, {}
    for layer, (name, file) in sorted(layers.items()):
        with naming(name):
            columns = _columns(file)
            experts[layer - 1] = columns["indices"]
            check_not_negative(f"layer {layer - 1}", columns["indices"])
            if "scores" in columns:
                if columns["scores"].shape != columns["indices"].shape:
                    raise TraceError("scores are not one for each of the indices; get the file again")
                weights[layer - 1] = columns["scores"]
    if weights and len(weights) < len(experts):
        raise TraceError(f"iteration {number}: layers {sorted(experts.keys() - weights.keys())} have no scores")
    with naming(f"iteration {number}"):
        scores = stacked_layers(weights) if weights else None
        return RecordedSequence(f"iteration {number}", stacked_layers(experts), weights=scores)


def _columns(file: Path) -> dict[str, np.ndarray]:
    """The columns `indices` and, where there is one, `scores`, [token, top_k]."""
    arrow, parquet = _pyarrow()
    try:
        schema = parquet.read_schema(file)
        kinds = {"indices": arrow.types.is_integer, "scores": arrow.types.is_floating}
        for name in kinds.keys() & set(schema.names):
            kind = schema.field(name).type
            if not ((arrow.types.is_list(kind) or arrow.types.is_large_list(kind)) and kinds[name](kind.value_type)):
                raise TraceError(f"{name} has type {kind}, expected list<int16> for indices, list<float16> for scores")
        if "indices" not in schema.names:
            raise TraceError(f"has no column indices, only {schema.names}; use a FLAME-MoE trace")
        table = parquet.read_table(file, columns=[name for name in kinds if name in schema.names])
        return {name: _matrix(name, table.column(name).combine_chunks()) for name in table.column_names}
    except TraceError:
        raise
    # What a damaged file raises depends on where it is damaged.
    except (arrow.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TraceError(f"not readable as Parquet ({reason}); {AGAIN}") from None


def _matrix(name: str, lists: Any) -> np.ndarray:
    """A column of lists as [token, top_k]."""
    if len(lists) == 0:
        raise TraceError(f"{name} is empty; get the file again")
    lengths = lists.value_lengths().fill_null(-1).to_numpy()
    if (lengths != lengths[0]).any() or lengths[0] < 1:
        at = int(np.flatnonzero((lengths != lengths[0]) | (lengths < 1))[0])
        raise TraceError(f"{name} of token {at} are {lists[at].as_py()}, expected {max(lengths[0], 1)} as in token 0")
    values = lists.flatten()
    if values.null_count:
        raise TraceError(f"{name} of token {int(np.flatnonzero(values.is_null())[0]) // lengths[0]} have a null")
    return values.to_numpy().reshape(len(lists), lengths[0])


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # not a dependency of the package
        import pyarrow.parquet
    except ImportError:
        raise TraceError(f"Parquet needs pyarrow; install it with: {install_command('traces', 'pyarrow')}") from None
    return pyarrow, pyarrow.parquet


def _write(path: Path, trace: GatingTrace) -> list[str]:
    check_whole(trace, "flame_moe")
    arrow, parquet = _pyarrow()
    numbers = _iteration_numbers(trace)
    scores = None if trace.weights is None else trace.weights.astype(np.float16)
    with atomic_write(path) as aside:
        for number, part in zip(numbers, parted(trace), strict=True):
            folder = aside / f"iter_{number:07d}"
            folder.mkdir(parents=True)
            for row, layer in enumerate(trace.layer_ids.tolist()):
                columns = {"indices": _lists(arrow, trace.experts[part, row])}
                if scores is not None:
                    columns["scores"] = _lists(arrow, scores[part, row])
                parquet.write_table(arrow.table(columns), folder / f"layer_{layer + 1:02d}.parquet")
    exact = scores is None or trace.weights is None or np.array_equal(scores, trace.weights)
    renamed = trace.seq_name is not None and [f"iteration {i}" for i in numbers] != names(trace)
    return ["seq_name becomes numbers of iterations"] * renamed + ["weights are rounded to float16"] * (not exact)


def _iteration_numbers(trace: GatingTrace) -> list[int]:
    """Those that the sequences are called by, or the sequences' own numbers."""
    called = [re.fullmatch(r"iteration (\d+)", name) for name in names(trace)]
    numbers = [int(match[1]) for match in called if match]
    return numbers if len(numbers) == len(called) and numbers == sorted(set(numbers)) else list(range(len(called)))


def _lists(arrow: Any, rows: np.ndarray) -> Any:
    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return arrow.ListArray.from_arrays(offsets, arrow.array(rows.ravel()))


TRACE = Format("flame_moe", _matches, _read, _write, holds=frozenset({"seq_start", "weights", "seq_name"}))
