"""Figures of moentwine's balancers, drawn from the tables of the study `moentwine` alone.

python figures/fig_moentwine_balancing.py
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

STUDY = STUDIES / "moentwine"
NAMES = {"none": "no balancer", "eplb": "EPLB", "greedy": "greedy", "topology_aware": "topology-aware"}
HIDDEN = "topology-aware, non-invasive"
TRACES = {**NAMES, "non_invasive": HIDDEN}
PAPER_EXCESS = {"none": 2.0, "greedy": 0.4}  # Fig. 15 and VI-C1
PAPER_SHARE = {"prefill": 22, "decode": 45, "hybrid": 45}  # % of an iteration, VI-C2
COLOURS = dict(zip([*NAMES.values(), HIDDEN, "oracle"], style.PALETTE, strict=False))
PARTS = {"compute_us": "experts", "all_to_all_us": "all-to-all", "migration_us": "migration"}


def table(name: str) -> Rows:
    return read_table(STUDY / f"balancing_{name}.csv")


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=style.PANEL_SIZE, color=style.INK)


def draw_traces(out: Path) -> None:
    """Fig. 15: excess over the mean, iteration by iteration, and interruptions."""
    rows = table("traces")
    figure = style.new_figure(11, 6.4, "Device loads of a drifting mixture: DeepSeek-V3, decode, 256 dies")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    iteration = column(rows, "iteration")
    for key in ("none", "greedy", "topology_aware", "non_invasive"):
        name = TRACES[key]
        upper.plot(iteration, column(rows, f"{key}_excess"), color=COLOURS[name], label=name, linewidth=1.6)
        waits = column(rows, f"{key}_waits_us") / 1e3
        if waits.any():
            lower.vlines(iteration[waits > 0], 0, waits[waits > 0], color=COLOURS[name], linewidth=2)
    for key, level in PAPER_EXCESS.items():
        upper.axhline(level, color=COLOURS[TRACES[key]], linestyle=":", linewidth=1.2)
        upper.text(iteration[-1], level, f" paper, {TRACES[key]}", va="bottom", ha="right", fontsize=style.TICK_SIZE)
    style.dress(upper, "", "largest load over mean, minus 1")
    style.dress(lower, "iteration", "inference waits, ms")
    upper.set_ylim(bottom=0)
    style.legend_below(figure, [upper])
    style.save(figure, out / "moentwine_balancing_traces.png")


def draw_balance(out: Path) -> None:
    """Fig. 16: balance, experts, all-to-all and migration of every balancer, mixed scenarios."""
    rows = select(table("balance"), scenario="mixed")
    measures = (
        ("excess", "largest load over mean, minus 1", 1.0),
        ("compute_us", "experts, µs a layer", 1.0),
        ("all_to_all_us", "all-to-all, µs a layer", 1.0),
        ("migration_share", "migration, % of an iteration", 100.0),
    )
    figure = style.new_figure(4.4 * 4, 7.4, "Balancers on the drifting mixture, DeepSeek-V3")
    panels = figure.subplots(2, 4)
    for line, devices in zip(panels, distinct(rows, "devices"), strict=True):
        mine = select(rows, devices=devices)
        for axes, (key, label, factor) in zip(line, measures, strict=True):
            _bars(axes, mine, key, factor)
            style.dress(axes, "", label)
            title(axes, f"EP = {devices}")
            if key == "migration_share":
                for place, phase in enumerate(distinct(mine, "phase")):
                    ends, level = [place - 0.4, place + 0.4], PAPER_SHARE[phase]
                    axes.plot(ends, [level] * 2, ":", color=style.INK, label="paper, baseline not named")
    style.legend_below(figure, [panels[0, 3]], columns=6)
    style.save(figure, out / "moentwine_balancing.png")


def _bars(axes: Axes, rows: Rows, key: str, factor: float) -> None:
    """A group of bars for each phase, one for each balancer."""
    shown = [(NAMES[name], "invasive", trigger) for name, trigger in _shown_invasive()]
    shown += [(HIDDEN, "non_invasive", "always"), ("oracle", "non_invasive", "oracle")]
    phases = distinct(rows, "phase")
    width = 0.8 / len(shown)
    for index, (name, migration, trigger) in enumerate(shown):
        known = {label: key for key, label in NAMES.items()}
        found = select(rows, migration=migration, trigger=trigger, balancer=known.get(name, "topology_aware"))
        places = np.arange(len(phases)) + (index - (len(shown) - 1) / 2) * width
        axes.bar(places, factor * column(found, key), width, color=COLOURS[name], label=name)
    axes.set_xticks(range(len(phases)), phases)


def _shown_invasive() -> list[tuple[str, str]]:
    return [("none", "never"), ("eplb", "every_ten"), ("greedy", "every_ten"), ("topology_aware", "every_ten")]


def draw_parts(out: Path) -> None:
    """Fig. 17: from NVL72 to four wafers with every method, by part."""
    rows = table("parts")
    phases = distinct(rows, "phase")
    figure = style.new_figure(13, 5.4, "Parts of a layer, from NVL72 to four wafers: DeepSeek-V3")
    panels = figure.subplots(1, len(phases))
    for axes, phase in zip(panels, phases, strict=True):
        mine = select(rows, phase=phase)
        steps = [row["step"] for row in mine]
        colours = style.stage_colours(PARTS.values())
        for index, (key, name) in enumerate(PARTS.items()):
            places = np.arange(len(steps)) + (index - 1) * 0.27
            axes.bar(places, column(mine, key), 0.27, color=colours[name], label=name)
        axes.set_xticks(range(len(steps)), steps, rotation=35, ha="right")
        style.dress(axes, "", "µs a layer")
        title(axes, phase)
    style.legend_below(figure, panels)
    style.save(figure, out / "moentwine_balancing_parts.png")


def draw_gradient(out: Path) -> None:
    """Balance, and time of a layer with waiting, over the bytes that every balancer moves at every trigger."""
    rows = table("gradient")
    figure = style.new_figure(12, 5.4, "What balance costs in bytes: DeepSeek-V3, decode, 256 dies")
    panels = figure.subplots(1, 2)
    measures = (("excess", "largest load over mean, minus 1"), ("total_us", "a layer with what it waits, µs"))
    for axes, (key, label) in zip(panels, measures, strict=True):
        for index, name in enumerate(distinct(rows, "balancer")[1:]):
            mine = select(rows, balancer=name)
            moved, found = column(mine, "moved_GB"), column(mine, key)
            style.marked_line(axes, moved, found, name, style.PALETTE[index], style.MARKERS[index])
            for row, x, y in zip(mine, moved, found, strict=True):
                axes.annotate(f" {row['every']}", (x, y), fontsize=style.TICK_SIZE, va="bottom")
        axes.set_xscale("log")
        style.log_ticks(axes.xaxis)
        style.dress(axes, "weights moved in an iteration, GB", label, grid="both")
        title(axes, "numbers: iterations from one migration to the next")
    panels[0].set_ylim(bottom=0)
    panels[0].axhline(PAPER_EXCESS["greedy"], color=style.INK, linestyle=":", label="paper, greedy")
    style.legend_below(figure, list(panels), columns=4)
    style.save(figure, out / "moentwine_balancing_gradient.png")


def draw_stream(out: Path) -> None:
    """Two layers with the stream of weights, after Fig. 11e: which part of links is busy with what."""
    rows = table("stream")
    figure = style.new_figure(11, 6.6, "Two layers in the event simulator with experts that migrate, 4x4 dies, ER")
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2, 2))
    colours = style.stage_colours(distinct(rows, "stage"))
    for axes, links in zip(panels, distinct(rows, "links")[::-1][:1] + distinct(rows, "links")[:2], strict=True):
        mine = select(rows, links=links)
        base = 0.0
        for stage in distinct(mine, "stage"):
            time, busy = (column(select(mine, stage=stage), key) for key in ("time_us", "busy_share"))
            axes.fill_between(
                time, base, base + 100 * busy, step="post", color=colours[stage], label=stage, linewidth=0
            )
            base = base + 100 * busy
        style.dress(
            axes, "time, µs" if axes is panels[-1] else "", "dies at work, %" if links == "dies" else "links busy, %"
        )
        axes.set_ylim(0, 100)
        title(axes, links if links == "dies" else f"links {links}")
    style.legend_below(figure, list(panels))
    style.save(figure, out / "moentwine_balancing_stream.png")


DRAWINGS = (draw_traces, draw_balance, draw_parts, draw_gradient, draw_stream)


def main() -> None:
    out = images_folder(__doc__)
    for draw in DRAWINGS:
        draw(out)


if __name__ == "__main__":
    main()
