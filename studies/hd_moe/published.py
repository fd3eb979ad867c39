"""What hd_moe publishes, read from `published_latency.json`, and what its whole-model times say of attention."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cases import DEEPSEEK, MIXTRAL, QWEN

MODELS = {"mixtral": MIXTRAL, "ds": DEEPSEEK, "qwen": QWEN}
STRATEGIES = {"TP": "tp", "EP": "ep", "compute_balancing": "hybrid", "node_link_balancing": "node_link"}
MICRO = 1e-6


@dataclass(frozen=True)
class Row:
    """Published seconds of one strategy, whole model."""

    model: str
    mesh: str
    tflops: float
    gbps: float
    batch: int
    strategy: str
    communication: float
    computation: float
    total: float

    @property
    def nodes(self) -> int:
        x, y = self.mesh.split("x")
        return int(x) * int(y)

    @property
    def beside(self) -> float:
        """What is neither of the MoE layers' parts."""
        return self.total - self.communication - self.computation


def read(shared: Path) -> list[Row]:
    """All published rows."""
    rows = []
    for entry in json.loads((shared / "reference" / "hd_moe" / "published_latency.json").read_text()):
        config = entry["config"]
        key = (MODELS[config["model"]], "{}x{}".format(*config["mesh_shape"]), config["comp_TFLOPS"], config["BW_GBPS"])
        for name, strategy in STRATEGIES.items():
            times = (entry[name][f"{part}_us"] * MICRO for part in ("communication", "computation", "latency"))
            rows.append(Row(*key, config["batch"], strategy, *times))
    return rows


@dataclass(frozen=True)
class AttentionFit:
    """Seconds beside the MoE layers: (weights + batch (context + arithmetic / TFLOP/s)) / nodes."""

    weights: float
    context: float
    arithmetic: float
    worst: float  # largest relative error over the rows fitted
    rows: int

    def __call__(self, nodes: int, tflops: float, batch: int) -> float:
        return (self.weights + batch * (self.context + self.arithmetic / tflops)) / nodes


def fit_attention(rows: list[Row], model: str) -> AttentionFit:
    """Least squares of relative errors over the TP rows of a model, all machines and batches of 16 and more.

    It does not depend on the links: every machine's rows fit the same three numbers, where those numbers are right.
    """
    used = [row for row in rows if row.model == model and row.strategy == "tp" and row.batch >= 16]
    terms = np.array([[1, row.batch, row.batch / row.tflops] for row in used])
    terms /= np.array([row.nodes * row.beside for row in used])[:, None]
    solved = np.linalg.lstsq(terms, np.ones(len(used)), rcond=None)[0]
    return AttentionFit(*solved, worst=float(np.abs(terms @ solved - 1).max()), rows=len(used))
