"""Networks drawn: a traffic matrix as a heat map, and links of any network by how busy they are."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxmoe.report import style
from jaxmoe.report.mesh_loads import NODE_SIDE, THICKEST, THINNEST
from jaxmoe.report.style import LINK_BYTES, NODE_BYTES, Measure
from jaxmoe.report.timeline import arrows, bends

# A traffic matrix as a heat map.

SENT = Measure("bytes from source to destination", style.byte_unit)
NOTHING = "white"


def plot_traffic(path: Path, traffic_B: np.ndarray, title: str) -> None:
    """Bytes from every source, a row, to every destination, a column. Pairs that send nothing stay white.

    What a node sends itself is left out.
    """
    if np.ndim(traffic_B) != 2 or len(set(np.shape(traffic_B))) != 1:
        raise ValueError(f"traffic_B has shape {np.shape(traffic_B)}, expected one row and one column for each node")
    style.check_not_empty("traffic_B", traffic_B)
    away = np.where(np.eye(len(traffic_B), dtype=bool), 0.0, traffic_B)
    scale, colours = style.scale_of([away]), style.link_colours().with_extremes(bad=NOTHING)
    figure = style.new_figure(7.4, 6.2, title, layout="compressed")
    axes = figure.subplots()
    axes.imshow(np.ma.masked_equal(away, 0), cmap=colours, norm=scale, interpolation="nearest")
    style.dress(axes, "destination node", "source node")
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    style.colourbar(figure, [axes], scale, colours, SENT)
    style.save(figure, path)


# A network of any form: its nodes, switches and directed links, and what they carry.

FLATTEST = 3.5  # sides of a picture; flatter networks are stretched
PLAIN_LINK, PLAIN_NODE, SWITCH = "#7a7a7a", "#9ecae1", "#d9d9d9"
PLAIN_WIDTH = 0.04
MARGIN = 0.75  # around the outermost vertices
READABLE = 0.35  # inches between neighbours that leave room for their numbers


def plot_network(
    path: Path,
    ends: np.ndarray,
    positions: np.ndarray,
    link_value: np.ndarray | None = None,
    node_value: np.ndarray | None = None,
    *,
    title: str,
    num_nodes: int | None = None,
    measures: tuple[Measure, Measure] = (NODE_BYTES, LINK_BYTES),
) -> None:
    """Draw the vertices at their `positions` [vertex, (right, down)], and an arrow for every link [link, (from, to)].

    The first `num_nodes` vertices, or all, are nodes; the rest are switches. Arrows are on the right of their way as
    one walks it, and bend round vertices that lie on it. With values of links and nodes, the larger, the darker, and
    links thicker; the largest are outlined. Without, it is a plain picture.
    """
    nodes = len(positions) if num_nodes is None else num_nodes
    _check(ends, positions, nodes, link_value, node_value)
    points = _spread(np.asarray(positions, float))
    figure, axes, cell = _layout(points, title)
    _draw_links(axes, ends, points, link_value)
    _draw_nodes(axes, points[:nodes], node_value)
    _draw_switches(axes, points[nodes:])
    if cell >= READABLE:
        _number_vertices(axes, points, node_value)
    for value, colours, measure in (
        (link_value, style.link_colours(), measures[1]),
        (node_value, style.node_colours(), measures[0]),
    ):
        if value is not None and len(value):
            style.colourbar(figure, [axes], style.scale_of([value]), colours, measure)
    _describe(axes, nodes, len(positions), ends, (node_value, link_value), measures)
    style.save(figure, path)


def _check(
    ends: np.ndarray,
    positions: np.ndarray,
    nodes: int,
    link_value: np.ndarray | None,
    node_value: np.ndarray | None,
) -> None:
    style.check_not_empty("positions", positions)
    if not 0 < nodes <= len(positions):
        raise ValueError(f"num_nodes is {nodes}, but there are {len(positions)} positions")
    if len(ends) and not (np.min(ends) >= 0 and np.max(ends) < len(positions)):
        raise ValueError(f"ends name vertices up to {np.max(ends)}, but there are {len(positions)} positions")
    if link_value is not None:
        style.check_lengths("link_value", link_value, "ends", ends)
    if node_value is not None and len(node_value) != nodes:
        raise ValueError(f"node_value has {len(node_value)} values but there are {nodes} nodes")


def _spread(positions: np.ndarray) -> np.ndarray:
    """Positions from zero on, scaled so that the nearest vertices are one apart and the whole is not too flat."""
    points = positions - positions.min(axis=0)
    extent = points.max(axis=0)
    if extent.min() > 0:
        points = points * np.maximum(extent.max() / FLATTEST / extent, 1)
    distance = np.abs(points[:, None] - points[None]).max(axis=-1)  # as squares count it
    apart = distance[distance > 0]
    # A pair of vertices that nearly coincide would leave all others out of sight.
    return points / max(apart.min(), distance.max() / 100) if apart.size else points


def _layout(points: np.ndarray, title: str) -> tuple[Figure, Axes, float]:
    """Figure, axes, and inches between neighbours."""
    size = points.max(axis=0) + 2 * MARGIN
    cell = min(float(np.clip(9.0 / size.max(), 0.42, 1.3)), 16 / float(size.max()))
    figure = style.new_figure(
        max(size[0] * cell, 3.6) + 2.4, max(size[1] * cell, 2.6) + 1.2, title, layout="compressed"
    )
    axes = figure.subplots()
    axes.set_aspect("equal")
    axes.set_xlim(-MARGIN, size[0] - MARGIN)
    axes.set_ylim(size[1] - MARGIN, -MARGIN)
    axes.set_axis_off()
    return figure, axes, cell


def _draw_links(axes: Axes, ends: np.ndarray, points: np.ndarray, value: np.ndarray | None) -> None:
    if value is None or not len(ends):
        plain = arrows(ends, points, np.full(len(ends), PLAIN_WIDTH))
        axes.add_collection(PolyCollection(plain, facecolors=PLAIN_LINK))
        return
    order = np.lexsort([value, ~bends(ends, points)])  # bent ones pass below, the busiest on top
    scale, value = style.scale_of([value]), value[order]
    width = THINNEST + (THICKEST - THINNEST) * np.asarray(scale(value))
    axes.add_collection(
        PolyCollection(
            arrows(ends[order], points, width),
            array=value,
            cmap=style.link_colours(),
            norm=scale,
            edgecolors=style.edges(value, "#9a9a9a"),
            linewidths=np.where(style.is_busiest(value), 2.0, 0.3),
            zorder=3,
        )
    )


def _draw_nodes(axes: Axes, points: np.ndarray, value: np.ndarray | None) -> None:
    squares = list(points[:, None] + NODE_SIDE / 2 * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]))
    if value is None:
        axes.add_collection(PolyCollection(squares, facecolors=PLAIN_NODE, zorder=2))
        return
    axes.add_collection(
        PolyCollection(
            squares,
            array=value,
            cmap=style.node_colours(),
            norm=style.scale_of([value]),
            edgecolors=style.edges(value, "#ffffff00"),
            linewidths=2.4,
            zorder=2,
        )
    )


def _draw_switches(axes: Axes, points: np.ndarray) -> None:
    angle = 2 * np.pi * np.arange(32) / 32
    circles = points[:, None] + 1.1 * NODE_SIDE / 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    axes.add_collection(PolyCollection(list(circles), facecolors=SWITCH, edgecolors=style.GUIDE, zorder=2))


def _number_vertices(axes: Axes, points: np.ndarray, value: np.ndarray | None) -> None:
    dark = np.zeros(len(points), bool)
    if value is not None:
        dark[: len(value)] = np.asarray(style.scale_of([value])(value)) > 0.5
    for vertex, (right, down) in enumerate(points):
        colour = "white" if dark[vertex] else style.INK
        axes.text(right, down, str(vertex), ha="center", va="center", fontsize=7.5, color=colour, zorder=4)


def _describe(
    axes: Axes,
    nodes: int,
    vertices: int,
    ends: np.ndarray,
    values: tuple[np.ndarray | None, np.ndarray | None],
    measures: tuple[Measure, Measure],
) -> None:
    """Title the picture with its numbers of nodes, switches and links, and with the busiest link and node."""
    switches = vertices - nodes
    round_ones = {0: "", 1: ", 1 switch (circle)"}.get(switches, f", {switches} switches (circles)")
    lines = [f"{nodes} nodes (squares){round_ones}, {len(ends)} directed links"]
    node_value, link_value = values
    if link_value is not None and link_value.size:
        start, end = ends[int(link_value.argmax())]
        lines.append(f"busiest link {start} to {end}: {measures[1].show(float(link_value.max()))}")
    if node_value is not None:
        most = measures[0].show(float(node_value.max()))
        lines.append(f"busiest node {int(node_value.argmax())}: {most}")
    axes.set_title("\n".join(lines), fontsize=style.PANEL_SIZE, color=style.INK)
