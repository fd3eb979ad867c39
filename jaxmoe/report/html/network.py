"""Completion of given traffic: what `network` found, from its `summary.json`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.report.html.blocks import Block, Cell, TableBlock, seconds_unit
from jaxmoe.report.html.validation import agreement_figure
from jaxmoe.report.style import byte_unit

MOST_ROWS = 1000


def network_blocks(summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading, of a summary of `network`."""
    matrices = summary["matrices"]
    times = {name: (of["completion_s"]["des"], of["completion_s"]["model"]) for name, of in matrices.items()}
    simulated, model = (np.array(column, float) for column in zip(*times.values(), strict=True))
    caption = "Every point is a traffic matrix."
    return {"Traffic": [_table(matrices), agreement_figure({"matrices": (simulated, model)}, caption)]}


def _table(matrices: Mapping[str, Mapping[str, Any]]) -> TableBlock:
    """The matrices that take longest."""
    slowest = sorted(matrices, key=lambda name: -matrices[name]["completion_s"]["model"])[:MOST_ROWS]
    factor, unit = seconds_unit(max(of["completion_s"].values()) for of in matrices.values())
    per_byte, size = byte_unit(max(of["bytes"] for of in matrices.values()))
    models = list(matrices[slowest[0]]["completion_s"])
    rows: list[list[Cell]] = [
        [
            name,
            *(matrices[name]["completion_s"][model] * factor for model in models),
            *(matrices[name][key] * per_byte for key in ("bytes", "max_link_load_B", "max_inject_B", "max_eject_B")),
            _bottleneck(matrices[name]["bottleneck"]),
        ]
        for name in slowest
    ]
    left = len(matrices) - len(rows)
    return TableBlock(
        "Completion of every matrix",
        [
            *("matrix", *(f"{_told(model)} [{unit}]" for model in models)),
            *(f"sent [{size}]", f"busiest link [{size}]", f"most sent by a node [{size}]", f"most received [{size}]"),
            "limited by",
        ],
        rows,
        f"And {left} more, which take less time; summary.json has them all." if left else "",
    )


def _told(model: str) -> str:
    return {"des": "simulated"}.get(model, model.replace("_", " "))


def _bottleneck(of: Mapping[str, Any] | None) -> str:
    if of is None:
        return "nothing"
    return f"link {of['ends'][0]} to {of['ends'][1]}" if of["part"] == "link" else f"{of['part']} of node {of['node']}"
