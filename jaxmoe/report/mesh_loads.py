"""Meshes drawn with how busy every node and every directed link is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from jaxmoe.hardware.networks import link_ends, num_links
from jaxmoe.report import style
from jaxmoe.report.style import LINK_TIME, NODE_TIME, Measure

# In mesh units: neighbours are 1 apart.
NODE_SIDE = 0.46
LANE_OFFSET = 0.115  # of the two opposite links of a pair, to either side of the line that joins the nodes
THINNEST, THICKEST = 0.025, 0.13  # width of an arrow's shaft
HEAD_LENGTH = 0.17


@dataclass(frozen=True)
class MeshPanel:
    """One mesh of the figure: a value of every node and one of every directed link, such as how long it is busy, s."""

    title: str
    node_value: np.ndarray  # [node]
    link_value: np.ndarray  # [link], numbered as in `jaxmoe.hardware.networks`


def plot_mesh_loads(
    path: Path,
    shape: tuple[int, int],
    panels: Sequence[MeshPanel],
    title: str,
    measures: tuple[Measure, Measure] = (NODE_TIME, LINK_TIME),
) -> None:
    """Draw one mesh per panel, side by side, on one colour scale for nodes and one for links.

    `measures` say what the values of nodes and of links are; seconds for which they are busy, if nothing is said.

    Node `row * columns + column` stands in its row and column. Links are arrows, on the right of their way as one
    walks it; the busier, the darker and thicker. The busiest node and link of each panel are outlined, unless a
    measure is a number that only tells nodes apart.
    """
    style.check_not_empty("panels", panels)
    for panel in panels:
        _check(shape, panel)
    node_scale = style.scale_of([panel.node_value for panel in panels])
    link_scale = style.scale_of([panel.link_value for panel in panels])
    figure, grid = _layout(shape, len(panels), title)
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, shape, panel, node_scale, link_scale, measures)
        _frame(axes, shape, panel, measures)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if num_links(shape):
        style.colourbar(figure, grid, link_scale, style.link_colours(), measures[1])
    style.colourbar(figure, grid, node_scale, style.node_colours(), measures[0])
    style.save(figure, path)


def _check(shape: tuple[int, int], panel: MeshPanel) -> None:
    for what, values, count in (
        ("node_value", panel.node_value, shape[0] * shape[1]),
        ("link_value", panel.link_value, num_links(shape)),
    ):
        if np.shape(values) != (count,):
            raise ValueError(
                f"{what} of panel {panel.title!r} has shape {np.shape(values)}, "
                f"but a {shape[0]}x{shape[1]} mesh needs ({count},)"
            )


def _layout(shape: tuple[int, int], count: int, title: str) -> tuple[Figure, list[Axes]]:
    columns = min(count, 4)
    rows = -(-count // columns)
    cell = float(np.clip(9.0 / max(shape), 0.42, 1.05))
    cell = min(cell, max(13.5 / (columns * shape[1]), 0.42))
    width = max(shape[1] * cell, 3.2) * columns + 2.4
    height = max(shape[0] * cell + 0.9, 2.6) * rows + 0.7
    figure = style.new_figure(width, height, title, layout="compressed")
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def _draw_panel(
    axes: Axes,
    shape: tuple[int, int],
    panel: MeshPanel,
    node_scale: Normalize,
    link_scale: Normalize,
    measures: tuple[Measure, Measure],
) -> None:
    corners, plain = _squares(shape), "#ffffff00"
    axes.add_collection(
        PolyCollection(
            list(corners),
            array=panel.node_value,
            cmap=style.node_colours(),
            norm=node_scale,
            edgecolors=plain if measures[0].number else style.edges(panel.node_value, plain),
            linewidths=2.4,
            zorder=2,
        )
    )
    if panel.link_value.size:
        width = THINNEST + (THICKEST - THINNEST) * link_scale(panel.link_value)
        axes.add_collection(
            PolyCollection(
                list(_arrows(shape, np.asarray(width))),
                array=panel.link_value,
                cmap=style.link_colours(),
                norm=link_scale,
                edgecolors=style.edges(panel.link_value, "#9a9a9a"),
                linewidths=np.where(style.is_busiest(panel.link_value), 2.0, 0.3),
                zorder=3,
            )
        )
    _number_nodes(axes, shape, panel, node_scale)


def _squares(shape: tuple[int, int]) -> np.ndarray:
    """Corners of the node squares as (column, row), float [node, 4, 2]."""
    row, column = np.unravel_index(np.arange(shape[0] * shape[1]), shape)
    corner = NODE_SIDE / 2 * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    return np.stack([column, row], axis=-1)[:, None] + corner


def _arrows(shape: tuple[int, int], width: np.ndarray) -> np.ndarray:
    """Outlines of the arrows in the gaps between nodes as (column, row), float [link, 7, 2]."""
    row, column = np.unravel_index(link_ends(shape), shape)
    ends = np.stack([column, row], axis=-1).astype(float)  # [link, end, 2]
    forward = ends[:, 1] - ends[:, 0]
    # Rows grow downwards on the page, so this is the right-hand side of who walks the link.
    right = np.stack([-forward[:, 1], forward[:, 0]], axis=-1)
    reach = (1 - NODE_SIDE) / 2 - 0.03
    half, head = width / 2, np.minimum(width / 2 + 0.045, LANE_OFFSET - 0.006)
    neck = np.full_like(width, reach - HEAD_LENGTH)
    tip, tail = np.full_like(width, reach), np.full_like(width, -reach)
    along = np.stack([tail, neck, neck, tip, neck, neck, tail], axis=1)
    across = np.stack([half, half, head, 0 * half, -head, -half, -half], axis=1) + LANE_OFFSET
    middle = ends.mean(axis=1)
    return middle[:, None] + along[..., None] * forward[:, None] + across[..., None] * right[:, None]


def _can_be_numbered(shape: tuple[int, int]) -> bool:
    """Whether nodes are large enough for numbers that can be read."""
    return max(shape) <= 10


def _number_nodes(axes: Axes, shape: tuple[int, int], panel: MeshPanel, scale: Normalize) -> None:
    if not _can_be_numbered(shape):
        return
    for node, time in enumerate(panel.node_value):
        row, column = divmod(node, shape[1])
        colour = "white" if scale(time) > 0.5 else style.INK
        axes.text(column, row, str(node), ha="center", va="center", fontsize=7.5, color=colour, zorder=4)


def _frame(axes: Axes, shape: tuple[int, int], panel: MeshPanel, measures: tuple[Measure, Measure]) -> None:
    axes.set_aspect("equal")
    axes.set_xlim(-0.5, shape[1] - 0.5)
    axes.set_ylim(shape[0] - 0.5, -0.5)
    busiest = _busiest_text(panel, measures, wide=shape[1] > 3)
    axes.set_title(f"{panel.title}\n{busiest}", fontsize=style.PANEL_SIZE, color=style.INK)
    formula = "" if _can_be_numbered(shape) else f" (node {shape[1]} row + column)"
    axes.set_xlabel(f"column{formula}", fontsize=style.LABEL_SIZE)
    axes.set_ylabel("row", fontsize=style.LABEL_SIZE)
    axes.label_outer()
    for axis, count in ((axes.xaxis, shape[1]), (axes.yaxis, shape[0])):
        axis.set_ticks(range(0, count, 1 if count <= 10 else 5))
    axes.tick_params(labelsize=style.TICK_SIZE, length=0)
    axes.spines[:].set_visible(False)


def _busiest_text(panel: MeshPanel, measures: tuple[Measure, Measure], wide: bool) -> str:
    texts = [] if measures[0].number else [f"node {measures[0].show(float(panel.node_value.max()))}"]
    if panel.link_value.size:
        texts.append(f"link {measures[1].show(float(panel.link_value.max()))}")
    if not texts:
        return ""
    return ("max: " if wide else "max ") + (", " if wide else "\nmax ").join(texts)


# A placement in slots: loads of ranks by layer.


def plot_slots(path: Path, layer_ids: Sequence[int], amount: np.ndarray, measure: str, copies: np.ndarray, title: str):
    """`amount` [layer, rank] as a map, and the mean number of copies [layer, expert] of the experts with most first."""
    style.check_lengths("amount", amount, "layers", layer_ids)
    figure = style.new_figure(10.0, 4.6, title)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    top = max(float(amount.max()), 1e-9)
    image = left.imshow(amount, aspect="auto", cmap=style.node_colours(), vmin=0, vmax=top, interpolation="nearest")
    figure.colorbar(image, ax=left, label=measure)
    rows = np.unique(np.linspace(0, len(layer_ids) - 1, min(len(layer_ids), 8)).round().astype(int))
    left.set_yticks(rows, [str(layer_ids[row]) for row in rows])
    left.set_xlabel("rank")
    left.set_ylabel("layer")
    ordered = -np.sort(-copies, axis=1)
    order = np.arange(1, copies.shape[1] + 1)
    right.fill_between(order, ordered.min(axis=0), ordered.max(axis=0), step="mid", color=style.PALETTE[4], alpha=0.35)
    right.step(order, ordered.mean(axis=0), where="mid", color=style.PALETTE[0], linewidth=1.8)
    right.set_ylim(0, float(copies.max()) * 1.08)
    style.dress(right, "expert of a layer, most copies first", "copies: mean, least and most over layers")
    style.save(figure, path)
