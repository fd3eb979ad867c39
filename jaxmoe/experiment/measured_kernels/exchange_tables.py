"""Measured tables of DeepEP's exchanges, and their rows as loads of a GPU.

DeepEP's own tests draw a token's choices evenly, among the experts of four nodes at most: so do the loads here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.kinds import Columns, grouped
from jaxmoe.hardware.gpu.deepep import BYTES, Load, copies_of

GPUS = 8  # of a node
NODES_OF_A_TOKEN = 4  # that DeepSeek-V3's gate lets a token's choices fall on
LOADED = ("num_token", "hidden_size", "num_topk", "num_experts", "node_num")  # as `even_load` takes them
PARTS = {"normal": ("transmit", "notify"), "ll": ("avg_t",)}  # of each op_name
SIDES = ("dispatch", "combine")


@dataclass(frozen=True)
class ExchangeTable:
    """A table of DeepEP: `mode` is normal or ll, `columns` its numbers by name, [row], `given` as they are in the file.

    `version` is that of each row.
    """

    path: Path
    mode: str
    columns: Columns
    version: np.ndarray
    given: Columns

    def column(self, side: str, part: str) -> str:
        """The name of the column of a time."""
        return f"{side}_{part}_us"


def is_exchange(columns: Mapping[str, object]) -> bool:
    """Whether columns are of DeepEP."""
    return "node_num" in columns and bool({"num_token", "num_topk"} & set(columns))


def exchange_table(path: Path, columns: Columns, timed: bool = True) -> ExchangeTable:
    """A table of DeepEP, checked; without `timed` its times need not be there.

    Raises `OptionError` naming file, column and remedy.
    """
    modes = sorted(set(map(str, columns.get("op_name", ("",)))))
    if len(modes) != 1 or modes[0] not in PARTS:
        raise OptionError(f"{path}: op_name is {', '.join(modes) or 'not there'}; expected normal or ll in all rows")
    mode = modes[0]
    asked = [*LOADED, *(f"{side}_sms" for side in SIDES if mode == "normal")]
    times = [f"{side}_{part}_us" for side in SIDES for part in PARTS[mode]] if timed else []
    missing = [name for name in (*asked, *times) if name not in columns]
    if missing:
        raise OptionError(f"{path}: lacks {', '.join(missing)} of a table of DeepEP; add what is missing")
    read: dict[str, np.ndarray] = {}
    for name in (*asked, *times):
        try:
            read[name] = np.asarray(columns[name]).astype(float)
        except ValueError:
            raise OptionError(f"{path}: the column {name} has a value that is no number; write numbers") from None
        wrong = ~np.isfinite(read[name]) | (read[name] < (0 if "notify" in name else 1e-9))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise OptionError(f"{path}: {name} is {read[name][row]:g} in row {row + 1}; remove what is not above 0")
    if not len(read["node_num"]):
        raise OptionError(f"{path}: has no rows; give a table with a row for each measurement")
    _check_shapes(path, *(read[name] for name in ("num_topk", "num_experts", "node_num")))
    version = np.asarray(columns.get("version", np.full(len(read["node_num"]), ""))).astype(str)
    return ExchangeTable(path, mode, read, version, columns)


def _check_shapes(path: Path, top_k: np.ndarray, experts: np.ndarray, nodes: np.ndarray) -> None:
    """Raise `OptionError` for choices, experts and nodes that cannot be."""
    wrong = {
        "num_topk is above num_experts": top_k > experts,
        f"num_experts is no multiple of the GPUs, {GPUS} a node": experts % (nodes * GPUS) != 0,
        "num_topk, num_experts or node_num is no whole number": (top_k % 1 + experts % 1 + nodes % 1) != 0,
    }
    for told, rows in wrong.items():
        if rows.any():
            raise OptionError(f"{path}: {told} in row {int(np.argmax(rows)) + 1}; correct or remove the row")


def load_of(table: ExchangeTable, side: str, processors: int, gpus: int = GPUS) -> Load:
    """Loads of the rows of a table, [row]; `processors` are those of the GPU, `gpus` those of a node."""
    given = table.columns[f"{side}_sms"] if table.mode == "normal" else np.full(len(table.version), float(processors))
    rows = zip(*(table.columns[name].astype(int).tolist() for name in LOADED), given.tolist(), strict=True)
    loads = [partial(even_load, side, gpus=gpus)(*row) for row in rows]
    return Load(*(np.asarray(part, np.float32) for part in zip(*loads, strict=True)))


def even_load(
    side: str,
    tokens: int,
    hidden: int,
    choices: int,
    experts: int,
    nodes: int,
    processors: int | float,
    gpus: int = GPUS,
) -> Load:
    """The load of a GPU where choices fall evenly on experts.

    A token's nodes are limited, its best ones stay, and its choices fall on their experts.
    """
    chosen = min(nodes, NODES_OF_A_TOKEN)
    near = experts * chosen // nodes
    gpu_copies = copies_of(chosen * gpus, near, min(choices, near))
    node_copies = copies_of(nodes, experts, choices, NODES_OF_A_TOKEN)
    return Load(tokens, hidden * BYTES[side], choices, experts, gpu_copies, node_copies, nodes, gpus, processors)


def exchanges_of(tables: Sequence[ExchangeTable]) -> Iterator[tuple[ExchangeTable, dict[str, str], np.ndarray]]:
    """Rows of each exchange. Nobody has to be told of what comes within a node.

    Within a node and across nodes are two normal kernels, but one of low latency.
    """
    for table in tables:
        across = np.where(table.columns["node_num"] > 1, "nodes", "node")
        if table.mode == "ll":
            across = np.array(
                ["nodes" if "nodes" in across[table.version == each] else "node" for each in table.version]
            )
        groups, group = grouped({"version": table.version, "across": across}, ("version", "across"))
        for index, (version, reach) in enumerate(groups):
            rows = np.flatnonzero(group == index)
            for side in SIDES:
                for part in PARTS[table.mode]:
                    if part != "notify" or reach == "nodes":
                        yield table, {"side": side, "part": part, "across": reach, "version": version}, rows
