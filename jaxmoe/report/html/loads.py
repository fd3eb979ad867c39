"""A machine with how busy every node and every directed link is, layer by layer."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial import cKDTree

from jaxmoe.files import atomic_write
from jaxmoe.report.html.blocks import Figure, ReportError, axis, figure, rounded
from jaxmoe.report.style import LINK_BYTES, LINK_TIME, NODE_BYTES, NODE_TIME
from jaxmoe.report.timeline import bends

MOST_NUMBERS = 1_000_000  # in the page; of more, evenly spaced frames are shown
LANE = 0.14  # how far a link is drawn beside the line that joins its ends, to its right; of the least distance
FAR_LANE = 0.36  # of a link whose line runs over other nodes, as those round the edge of a torus
BAR_ROOM = 64  # CSS pixels for a colour bar with its title and ticks
MOST_TICKS = 12  # of a side that has a number at every row
VIRIDIS, MAGMA = "Viridis", "Magma"


@dataclass(frozen=True)
class MachineLoads:
    """Loads by name (a strategy) and frame (a layer, or a traffic matrix).

    `unit` is `s` where values are busy seconds, and `B` where nodes received and links carried bytes. Vertices after
    the nodes are switches. `grid` has the rows and columns of a mesh, whose positions are (column, row), else nothing.
    `sides` has those of any network whose nodes lie so, as a torus.
    """

    names: list[str]
    frames: list[str]
    node: Float[np.ndarray, "name frame node"]
    link: Float[np.ndarray, "name frame link"]
    link_ends: Int[np.ndarray, "link 2"]
    positions: Float[np.ndarray, "vertex 2"]  # to the right, and down
    unit: str
    grid: tuple[int, ...] = ()

    @property
    def sides(self) -> tuple[int, ...]:
        if self.grid:
            return self.grid
        columns, rows = (int(each) for each in self.positions.max(axis=0, initial=0) + 1)
        lattice = np.argwhere(np.ones((rows, columns)))[:, ::-1]
        return (rows, columns) if min(rows, columns) > 1 and np.array_equal(self.positions, lattice) else ()


def write_loads(path: Path, loads: MachineLoads) -> None:
    """Write loads as an npz, an array for each field, whole or not at all."""
    narrow = {"node": loads.node.astype(np.float32), "link": loads.link.astype(np.float32)}
    arrays: dict[str, Any] = {key: np.asarray(value) for key, value in (vars(loads) | narrow).items()}
    with atomic_write(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_loads(path: Path) -> MachineLoads:
    """Read what `write_loads` has written. Raises `ReportError` naming the file where it is something else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            # Files of versions that had no grid are read as well.
            arrays = {
                each.name: file[each.name] for each in fields(MachineLoads) if each.name != "grid" or "grid" in file
            }
        names, frames, unit = arrays.pop("names").tolist(), arrays.pop("frames").tolist(), str(arrays.pop("unit"))
        grid = tuple(int(side) for side in arrays.pop("grid", np.array([])))
        loads = MachineLoads(names=names, frames=frames, unit=unit, grid=grid, **arrays)
        _check(loads)
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise ReportError(
            f"{path} is not as jaxmoe writes it ({error}); run the command again, or remove the file"
        ) from None
    return loads


def _check(loads: MachineLoads) -> None:
    """Raise `ValueError` where shapes do not fit each other."""
    lead, links = (len(loads.names), len(loads.frames)), len(loads.link_ends)
    if loads.node.shape[:2] != lead or loads.link.shape != (*lead, links) or loads.positions.shape[1:] != (2,):
        raise ValueError(f"shapes {loads.node.shape} of nodes and {loads.link.shape} of links do not fit")
    if len(loads.positions) < max(loads.node.shape[-1], int(loads.link_ends.max(initial=-1)) + 1):
        raise ValueError("a node or the end of a link has no position")


def loads_block(loads: MachineLoads, shown: list[str]) -> Figure:
    """The machine under up to two of the names, with a slider over frames; others can be chosen."""
    frames = np.arange(len(loads.frames))
    per_frame = loads.node[:, 0].size + loads.link[:, 0].size
    most = max(MOST_NUMBERS // per_frame, 1)
    if len(frames) > most:
        frames = np.unique(np.linspace(0, len(frames) - 1, most).round().astype(int))
    measures = (NODE_TIME, LINK_TIME) if loads.unit == "s" else (NODE_BYTES, LINK_BYTES)
    values, titles = [], []
    for measure, of in zip(measures, (loads.node, loads.link), strict=True):
        factor, unit = measure.unit(float(of.max(initial=0.0)))
        values.append(rounded(np.asarray(of[:, frames], float) * factor))
        titles.append((measure.label, unit))
    data = {
        "figure": _machine(loads, titles),
        "names": loads.names,
        "frames": [loads.frames[frame] for frame in frames],
        "shown": [loads.names.index(name) for name in shown],
        "node": values[0],
        "link": values[1],
        "extent": (np.ptp(loads.positions, axis=0) + 1).tolist(),
        "spacing": _spacing(loads.positions),
    }
    left_out = (
        f" {len(frames)} of {len(loads.frames)} are shown, evenly spaced." if len(frames) < len(loads.frames) else ""
    )
    caption = (
        "Squares are nodes, arrows are directed links; the darker, the busier. The busiest of each are outlined. One "
        f"scale for all that the slider shows.{_numbering(loads)}{left_out}"
    )
    return Figure("Load of nodes and links", caption, data, kind="loads", height=420, wide=True)


def _numbering(loads: MachineLoads) -> str:
    """How nodes of a mesh or torus are counted, and where to look for links round its edge."""
    if len(loads.sides) != 2:
        return ""
    far = bends(loads.link_ends, loads.positions).any()
    round_it = " Outer arrows are of links round the edge." if far else ""
    return f" Node {loads.sides[1]} x row + column; rows go down.{round_it}"


def _machine(loads: MachineLoads, titles: list[tuple[str, str]]) -> dict[str, Any]:
    """Lines where links run, nodes, links, switches: colours and sizes of nodes and links come with a frame."""
    start, end = (loads.positions[loads.link_ends[:, side]] for side in (0, 1))
    lines = np.stack([start, end, np.full_like(start, np.nan)], axis=1).reshape(-1, 2)
    spacing = _spacing(loads.positions)
    arrows, angles = _arrows(start, end, spacing, bends(loads.link_ends, loads.positions / spacing))
    nodes = loads.node.shape[-1]
    node_text = [str(node) for node in range(nodes)]
    link_text = [f"link {a} to {b}" for a, b in loads.link_ends]
    traces = [
        {"type": "scatter", "mode": "lines", "x": lines[:, 0], "y": lines[:, 1], "hoverinfo": "skip"}
        | {"line": {"color": "#d5d5d5", "width": 1}},
        _coloured(loads.positions[:nodes], node_text, titles[0], VIRIDIS, "square", "bottom")
        | {"hovertemplate": f"node %{{text}}<br>%{{marker.color:.4g}} {titles[0][1]}<extra></extra>"},
        _coloured(arrows, link_text, titles[1], MAGMA, "triangle-up", "top", angle=angles),
    ]
    switches = loads.positions[nodes:]
    if len(switches):
        look = {"symbol": "circle-open", "size": 9, "color": "#5b5b5b"}
        traces.append(
            {"type": "scatter", "mode": "markers", "x": switches[:, 0], "y": switches[:, 1], "marker": look}
            | {"hoverinfo": "text", "text": [f"switch {nodes + index}" for index in range(len(switches))]}
        )
    low, high = loads.positions.min(axis=0) - 0.6, loads.positions.max(axis=0) + 0.6
    across, down = _axis(loads, "column"), _axis(loads, "row")
    return figure(
        [_listed(trace) for trace in traces],
        showlegend=False,
        margin={"l": 8, "r": 8, "t": BAR_ROOM, "b": BAR_ROOM},
        xaxis=across | {"range": [low[0], high[0]], "constrain": "domain"},
        yaxis=down | {"range": [high[1], low[1]], "scaleanchor": "x", "constrain": "domain"},
    )


def _axis(loads: MachineLoads, name: str) -> dict[str, Any]:
    """An axis of a mesh with its name and numbers; of another network, whose positions mean nothing, a blank one."""
    plain = {"showgrid": False, "zeroline": False, "fixedrange": True}
    if not loads.sides:
        return plain | {"showticklabels": False}
    return axis(name) | plain | {"tickformat": "d", "dtick": 1 if max(loads.sides) <= MOST_TICKS else 4}


def _coloured(
    at: np.ndarray, texts: list[str], title: tuple[str, str], scale: str, symbol: str, side: str, **more: Any
) -> dict[str, Any]:
    """Markers coloured by load, with their colour bar above or below."""
    label, unit = title
    bar = {
        "orientation": "h",
        "thickness": 10,
        "len": 0.9,
        "yref": "container",
        "y": 0.0 if side == "bottom" else 1.0,
        "yanchor": side,
        "title": {"text": f"{label} [{unit}]", "side": "bottom", "font": {"size": 12}},
    }
    marker = {
        "symbol": symbol,
        "opacity": 1,
        "colorscale": scale,
        "reversescale": True,
        "cmin": 0,
        "cmax": 1,
        "colorbar": bar,
    } | more
    return {
        "type": "scatter",
        "mode": "markers",
        "x": at[:, 0],
        "y": at[:, 1],
        "text": texts,
        "marker": marker | {"color": np.zeros(len(at))},
        "hovertemplate": f"%{{text}}<br>%{{marker.color:.4g}} {unit}<extra></extra>",
    }


def _listed(value: object) -> Any:
    """Arrays as lists, for Plotly's schema."""
    if isinstance(value, dict):
        return {key: _listed(each) for key, each in value.items()}
    return rounded(value) if isinstance(value, np.ndarray) else value


def _arrows(start: np.ndarray, end: np.ndarray, spacing: float, far: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where to draw links, and their direction in degrees clockwise from up; y runs down.

    In the middle of their way, or, of those that are `far` from it, between two of the nodes that it runs over.
    """
    along = end - start
    length = np.maximum(np.linalg.norm(along, axis=1, keepdims=True), 1e-9)
    right = np.stack([-along[:, 1], along[:, 0]], axis=1) / length
    between = (np.floor(length / spacing / 2 + 1e-6) + 0.5) * spacing / length
    at = start + np.where(far[:, None], between, 0.5) * along
    at += np.where(far, FAR_LANE, LANE)[:, None] * spacing * right
    return at, np.degrees(np.arctan2(along[:, 0], -along[:, 1]))


def _spacing(positions: np.ndarray) -> float:
    """The least distance between vertices."""
    nearest = cKDTree(positions).query(positions, k=2)[0][:, 1]
    return float(nearest.min()) if np.isfinite(nearest).all() and nearest.min() > 0 else 1.0
