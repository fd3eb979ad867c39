"""Folders of results written by hand, as the commands write them, with figures of our own."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from jaxmoe.report.html import MachineLoads, write_loads

TIMES = ("total_s", "p95_s", "dispatch_s", "compute_s", "combine_s")
METRICS = (*TIMES, "utilisation", "communication_share", "busiest_s")
COMPUTE, LINK = "hardware.die.compute_TFLOPs_per_s", "hardware.link.bandwidth_GB_per_s"


def write_sweep(folder: Path, machines: int = 8, names: tuple[str, str] = ("ep_balanced", "tp")) -> Path:
    """Two strategies on each machine: one computes for longer, one communicates for longer."""
    rng = np.random.default_rng(0)
    compute, link = 10 ** rng.uniform(0, 2, machines), 10 ** rng.uniform(1, 3, machines)
    (folder / "points").mkdir(parents=True)
    for at, name in enumerate(names):
        busy, sent = (2 - at) * 1e-3 / compute, (1 + 9 * at) * 1e-3 / link
        total = busy + sent
        times = (total, total * 1.1, sent / 2, busy, sent / 2, busy / total, sent / total, busy)
        columns = {"hash": [f"{at}{machine:015x}" for machine in range(machines)], "strategy": [name] * machines}
        columns |= {"exchange": ["least_loaded"] * machines, COMPUTE: compute, LINK: link}
        columns |= {"point": columns["hash"]} | dict(zip(METRICS, times, strict=True))
        columns |= {name: pa.nulls(machines, pa.float64()) for name in ("energy_J", "bound_s")}
        columns |= {"busiest_kind": ["node"] * machines, "busiest_index": [0] * machines}
        columns |= {"comparable": [True] * machines, "note": [""] * machines, "jaxmoe_version": ["0"] * machines}
        parquet.write_table(pa.table(columns), folder / "points" / f"{at}.parquet")
    hashes = [f"0{machine:015x}" for machine in range(machines)]
    worth = {"hash": hashes, "metric": ["total"] * machines, "key": [LINK] * machines}
    parquet.write_table(pa.table(worth | {"elasticity": -rng.random(machines)}), folder / "elasticities.parquet")
    manifest = {
        "study": "by hand",
        "base": "none.yaml",
        "identity": "0",
        "metrics": [*METRICS, "energy_J", "bound_s"],
        "versions": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    summary = {"command": "sweep", "study": {"name": "by hand", "metrics": ["total", "utilisation"]}}
    (folder / "summary.json").write_text(json.dumps(summary | {"points": 2 * machines, "notes": []}))
    return folder


def write_evaluated(
    folder: Path,
    names: tuple[str, str] = ("tp", "ep"),
    name: str = "by hand",
    shape: tuple[int, int] | None = None,
    exchanges: int = 2,
) -> Path:
    """Two strategies on two layers and two nodes, or on a mesh; times are whole microseconds."""
    folder.mkdir(parents=True)
    first, second = names
    #       dispatch, compute, combine, p95, best and its exchange, by layer
    layers = {
        first: [(1, 10, 2, 14, 13, "ring"), (3, 10, 4, 18, 15, "tree")],
        second: [(5, 4, 6, 18, 11, "tree"), (7, 4, 8, 20, 13, "tree")],
    }
    under = {first: {"ring": 15e-6, "tree": 14e-6}, second: {"ring": 17e-6, "tree": 12e-6}}
    for seconds in under.values():
        seconds |= {f"exchange {number}": 1.5e-5 + number * 1e-7 for number in range(exchanges - 2)}
    summary = {
        "command": "evaluate",
        "command_line": "jaxmoe evaluate by_hand.yaml",
        "scenario": {"name": name, "hardware": {"link": {"bandwidth_GB_per_s": 10}}},
        "versions": {"jaxmoe": "9.8.7"},
        "bound_s": {"mean": 9e-6, "layers": [8e-6, 10e-6]},
        "strategies": {each: _strategy(layers[each], under[each]) for each in names},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    node = np.array([[[10, 10], [10, 10]], [[4, 1], [2, 4]]]) * 1e-6
    positions = np.array([[0.0, 0.0], [1.0, 0.0]])
    link = node / 2
    if shape is not None:
        positions = np.array([[column, row] for row in range(shape[0]) for column in range(shape[1])], float)
        node = np.arange(4.0 * len(positions)).reshape(2, 2, -1) * 1e-6
    loads = MachineLoads(
        names=[*names],
        frames=["layer 3", "layer 5"],
        node=node,
        link=link,
        link_ends=np.array([[0, 1], [1, 0]]),
        positions=positions,
        unit="s",
        grid=shape or (),
    )
    write_loads(folder / "loads.npz", loads)
    return folder


def _strategy(rows: list[tuple], under: dict[str, float]) -> dict:
    keys = ("dispatch_s", "compute_s", "combine_s", "p95_total_s", "best_total_s")
    layers = []
    for layer_id, (*values, exchange) in zip((3, 5), rows, strict=True):
        seconds = dict(zip(keys, (1e-6 * value for value in values), strict=True))
        seconds["total_s"] = seconds["dispatch_s"] + seconds["compute_s"] + seconds["combine_s"]
        seconds |= {"des_total_s": 1.1 * seconds["total_s"], "des_model_total_s": seconds["total_s"]}
        gained = seconds["total_s"] - seconds["best_total_s"]  # in combine alone
        seconds |= {f"best_{key}": seconds[key] for key in ("dispatch_s", "compute_s")}
        seconds |= {f"best_{key}": seconds[key] - gained for key in ("combine_s", "p95_total_s")}
        layers.append(seconds | {"layer_id": layer_id, "exchange": "ring", "best_exchange": exchange})
    mean = {key: (layers[0][key] + layers[1][key]) / 2 for key in layers[0] if key.endswith("_s")}
    return {"fits": True, "comparable": True, "note": "", "mean": mean, "under": under, "layers": layers}
