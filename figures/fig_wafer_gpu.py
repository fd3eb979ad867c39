"""Figures of the study `wafer_gpu`, drawn from its tables alone: python figures/fig_wafer_gpu.py"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from panels import GroupPanel, plot_bar_panels
from tables import STUDIES, column, distinct, images_folder, read_table, select

from jaxmoe.report import style
from jaxmoe.report.mesh_loads import MeshPanel, plot_mesh_loads

TABLES = STUDIES / "wafer_gpu"
POLICIES = ("base", "pred", "allo", "allo+pred")
COLOURS = dict(zip((*POLICIES, "home"), (style.PALETTE[at] for at in (7, 4, 0, 1, 2)), strict=True))
SPLIT = {"base": "base, 3 dies", "pred": "pred, 3 dies"}  # where base divides every expert over three dies
MACHINES = {"dojo_5x5": "Dojo", "tsmc_sow_3x8": "TSMC-SoW", "dojo_enhanced_5x5": "Dojo-Enhanced"}
SPEEDUP = {"DeepSeek-V3": (5.3, 7.0), "Qwen3-235B": (3.1, 4.1)}  # allo+pred over base, V-C, here and in a later edition
MOST_HOPS = 1000  # reductions above it, where almost no hop is left, are not drawn
PUBLISHED = {"dojo_5x5": (3.7, 6.0), "tsmc_sow_3x8": (4.7, 7.5)}  # the same by machine
HOPS = {"pred": (3.7, 4.4), "allo": (17, 661), "allo+pred": (210, 944)}  # V-D


def draw_throughput(path: Path) -> None:
    """Fig. 11: throughput over base by blocks, and over base on three dies, and hop reduction, by batch."""
    rows = read_table(TABLES / "throughput.csv")
    pairs = [(model, machine) for model in distinct(rows, "model") for machine in list(MACHINES)[:2]]
    figure = style.new_figure(15, 10, "MoE layers in decode: throughput, and hops saved, over base (as Fig. 11)")
    panels = figure.subplots(3, len(pairs), sharex=True, sharey="row")
    for (model, machine), (above, middle, below) in zip(pairs, panels.T, strict=True):
        cases = {name: select(rows, model=model, machine=machine, policy=name) for name in distinct(rows, "policy")}
        for name in (*POLICIES, "home"):
            drawn = {"marker": "o", "color": COLOURS[name], "label": name}
            batch, split = column(cases[name], "batch"), cases.get(SPLIT.get(name, name))
            above.plot(batch, column(cases[name], "speedup"), **drawn)
            middle.plot(batch, column(cases["base, 3 dies"], "layer_us") / column(split, "layer_us"), **drawn)
            if name != "home":
                below.plot(batch, column(cases[name], "hop_reduction"), **drawn)
        for axes in (above, middle):
            for value, line, label in zip(SPEEDUP[model], (":", "--"), ("paper", "its later edition"), strict=True):
                axes.axhline(value, color=COLOURS["allo+pred"], linestyle=line, label=f"{label}, allo+pred")
        for name, (least, most) in HOPS.items():
            below.axhspan(least, most, color=COLOURS[name], alpha=0.15, label="paper, band of its colour")
        above.set_title(f"{model} on {MACHINES[machine]}", fontsize=style.PANEL_SIZE)
        for axes, label in ((above, ""), (middle, ""), (below, "requests in a batch")):
            _batches(axes, label)
        below.set_yscale("log")
        below.set_ylim(0.8, MOST_HOPS)
        style.log_ticks(below.yaxis)
    panels[0, 0].set_ylabel("throughput, base by blocks [times]")
    panels[1, 0].set_ylabel("throughput, base on 3 dies [times]")
    panels[2, 0].set_ylabel("hops of base over own [times]")
    _legend(figure, panels.ravel())
    style.save(figure, path)


def _batches(axes: Axes, label: str) -> None:
    style.dress(axes, label, "", grid="both")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", rotation=45)


def _legend(figure, panels) -> None:
    known = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        known.values(),
        known,
        loc="outside lower center",
        ncols=min(len(known), 6) if len(known) != 4 else 2,
        frameon=False,
        fontsize=style.TICK_SIZE,
    )


def draw_reads(path: Path) -> None:
    """Fig. 13: where bytes come from; Qwen3 on TSMC-SoW at 4,096 requests, and DeepSeek-V3 on Dojo beside it."""
    rows = read_table(TABLES / "throughput.csv")
    figure = style.new_figure(10, 4.2, "HBM traffic of a layer by kind, at 4,096 requests (as Fig. 13)")
    for axes, (model, machine) in zip(
        figure.subplots(1, 2), (("Qwen3-235B", "tsmc_sow_3x8"), ("DeepSeek-V3", "dojo_5x5")), strict=True
    ):
        below = np.zeros(len(POLICIES))
        own = [select(rows, model=model, machine=machine, batch="4096", policy=name)[0] for name in POLICIES]
        for key, colour in (("local_read", 0), ("remote_read", 1), ("local_write", 2)):
            values = column(own, key) / 1e9
            axes.bar(POLICIES, values, bottom=below, color=style.PALETTE[colour], label=key.replace("_", " "))
            below += values
        axes.set_title(f"{model} on {MACHINES[machine]}", fontsize=style.PANEL_SIZE)
        style.dress(axes, "", "traffic of a layer [GB]")
    _legend(figure, [axes])
    style.save(figure, path)


def draw_host(path: Path) -> None:
    """Fig. 14: what allocation on the host adds."""
    rows = read_table(TABLES / "host.csv")
    figure = style.new_figure(9, 4.6, "Allocation on the host: time added to a layer (as Fig. 14)")
    axes = figure.subplots()
    kinds = list(dict.fromkeys((row["model"], row["machine"]) for row in rows))
    for (model, machine), colour, marker in zip(kinds, style.PALETTE, style.MARKERS, strict=False):
        own = select(rows, model=model, machine=machine)
        name = f"{model} on {MACHINES[machine]}"
        axes.plot(column(own, "batch"), column(own, "overhead_percent"), marker=marker, color=colour, label=name)
        axes.axhspan(float(own[0]["published_least"]), float(own[0]["published_most"]), color=colour, alpha=0.2)
    _batches(axes, "requests in a batch")
    axes.set_yscale("log")
    style.log_ticks(axes.yaxis)
    axes.set_ylabel("time added [%]; bands: the paper's ranges")
    _legend(figure, [axes])
    style.save(figure, path)


def draw_sensitivity(path: Path) -> None:
    """What each assumption moves: speed-up and hop reduction of allo+pred, and of allo alone."""
    rows = read_table(TABLES / "sensitivity.csv")
    pairs = list(dict.fromkeys((row["model"], row["machine"], row["batch"]) for row in rows))
    figure = style.new_figure(
        max(8, 5 * len(pairs)), 11, "One assumption changed at a time: gains over base, own base each time"
    )
    panels = figure.subplots(2, len(pairs), sharey=True, squeeze=False)
    for (model, machine, batch), line in zip(pairs, panels.T, strict=True):
        own = select(rows, model=model, machine=machine, batch=batch)
        names = [row["what"] + (f": {row['to']}" if row["to"] else "") for row in select(own, policy="base")]
        for axes, key, label in zip(
            line, ("speedup", "hop_reduction"), ("throughput [times base]", "hops saved [times]"), strict=True
        ):
            for name in POLICIES[1:]:
                values = column(select(own, policy=name), key)
                axes.plot(values, range(len(names)), "o", color=COLOURS[name], label=name, markersize=5)
                axes.axvline(values[0], color=COLOURS[name], linewidth=0.6, alpha=0.6)
            axes.set_yticks(range(len(names)), names, fontsize=7.5)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if key == "speedup" else (1,)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_locator(NullLocator())
            if key == "hop_reduction":
                axes.set_xlim(0.8, 12_000)
            style.dress(axes, label, "", grid="both")
            axes.set_title(f"{model}, {MACHINES[machine]}, {int(batch):,}", fontsize=style.PANEL_SIZE)
        line[0].invert_yaxis() if not line[0].yaxis_inverted() else None
    _legend(figure, panels.ravel()[:1])
    style.save(figure, path)


def draw_readings(path: Path) -> None:
    """Gains over base of whole experts by how many slices a die has outstanding and how links pass them on."""
    rows = select(read_table(TABLES / "readings.csv"), steps="some", seed="0")
    ways = list(dict.fromkeys((row["outstanding"], row["switching"]) for row in rows))
    names = [f"{count}, {way.split('_')[0]}" if count != "stream" else count for count, way in ways]
    panels = []
    for part, known in (("model", SPEEDUP), ("machine", PUBLISHED)):
        for name, (published, _) in known.items():
            own = select(rows, **{part: name})
            series = {policy: [_mean_gain(own, way, policy) for way in ways] for policy in (*POLICIES[1:], "home")}
            told = {policy: np.array(values) for policy, values in series.items()}
            title, reference = MACHINES.get(name, name), (published, "paper, allo+pred")
            panels.append(GroupPanel(title, names, told, "throughput [times base]", reference=reference))
    title = "Base computes whole experts: gains by slices outstanding on a die, stored and forwarded or cut through"
    plot_bar_panels(path, panels, title, columns=2)


def _mean_gain(rows: list[dict[str, str]], way: tuple[str, str], policy: str) -> float:
    """Mean over cases of the time of base over that of a policy, under one reading."""
    own = select(rows, outstanding=way[0], switching=way[1])
    base, other = (column(select(own, policy=name), "layer_us") for name in ("base", policy))
    return float((base / other).mean())


PARTS = {  # of a decode step, and their colours: what the paper counts as MoE's data movement first
    "all_to_all": 1,
    "experts": 0,
    "shared_experts": 5,
    "attention": 2,
    "sums": 4,
    "rest": 7,
}


def draw_breakdown(path: Path) -> None:
    """Fig. 2: parts of a decode step of whole models in serving configurations."""
    rows = read_table(TABLES / "breakdown.csv")
    figure = style.new_figure(10, 9, "Where a decode step's time goes, by measured kernels (as Fig. 2)")
    axes = figure.subplots()
    names = [
        f"{row['model']}, {row['gpus']} {row['machine'].split('_')[0].upper()}, {row['layout']}, "
        f"{float(row['sequences']):g} x {int(row['context']):,}"
        for row in rows
    ]
    left = np.zeros(len(rows))
    for part, colour in PARTS.items():
        values = column(rows, f"{part}_percent")
        axes.barh(names, values, left=left, color=style.PALETTE[colour], label=part.replace("_", " "))
        left += values
    moved = column(rows, "all_to_all_percent") + column(rows, "weights_percent")
    axes.plot(moved, names, "|", color="black", markersize=9, label="all to all, and weights at the full rate of HBM")
    large = [at for at, row in enumerate(rows) if row["model"] == "deepseek-v3"]
    ends = (large[0] - 0.5, large[-1] + 0.5)
    axes.vlines((60, 90), *ends, color="black", linestyle="--", label="paper: 60 to 90 % are the first two")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", labelsize=7.5)
    style.dress(axes, "part of the step [%]; sequences on a GPU x tokens of context", "", grid="x")
    _legend(figure, [axes])
    style.save(figure, path)


def draw_bounds(path: Path) -> None:
    """Line 5: how far Algorithm 1 and the gradient are from the bound."""
    rows = read_table(TABLES / "bounds.csv")
    models = distinct(rows, "model")
    figure = style.new_figure(3 + 4 * len(models), 4.4, "Task allocation: time above the assignment bound")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for machine, marker in zip(MACHINES, style.MARKERS, strict=False):
            own = select(rows, model=model, machine=machine)
            for key, colour, name in (
                ("home_us", 2, "homes"),
                ("allo_us", 0, "Algorithm 1"),
                ("gradient_us", 1, "gradient"),
            ):
                over = 100 * (column(own, key) / column(own, "bound_us") - 1)
                axes.plot(
                    column(own, "batch"),
                    np.maximum(over, 0),
                    marker,
                    color=style.PALETTE[colour],
                    label=f"{name}, {MACHINES[machine]}",
                    alpha=0.8,
                )
        _batches(axes, "requests in a batch")
        axes.set_title(model, fontsize=style.PANEL_SIZE)
        axes.set_ylabel("above the bound [%]")
    _legend(figure, [axes])
    style.save(figure, path)


def draw_loads(path: Path) -> None:
    """How busy links and HBM channels are in one layer under the four policies."""
    rows = read_table(TABLES / "loads.csv")
    panels = []
    for name in POLICIES:
        own = select(rows, policy=name)
        busy = [column(select(own, kind=kind), "busy_us") * 1e-6 for kind in ("hbm", "link")]
        panels.append(MeshPanel(name, *busy))
    title = "Busy time of HBM channels and links in one layer: Qwen3-235B on Dojo, 4,096 requests"
    measures = (style.Measure("HBM channel busy time", style.time_unit), style.LINK_TIME)
    plot_mesh_loads(path, (5, 5), panels, title, measures)


def draw_timeline(path: Path) -> None:
    """The same layer in the event simulator: when HBM channels, dies and links are busy."""
    rows = read_table(TABLES / "timeline.csv")
    figure = style.new_figure(11, 7, "One layer in the event simulator: pred, Qwen3-235B on Dojo, 4,096 requests")
    kinds = (("hbm", "HBM channel", "memory"), ("node", "die computes", "compute"), ("link", "link", "communication"))
    colours = style.stage_colours(stage for *_, stage in kinds)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.6))
    for axes, (kind, label, stage) in zip(panels, kinds, strict=True):
        own = select(rows, kind=kind)
        number, begin, end = (column(own, key) for key in ("number", "begin_us", "end_us"))
        axes.barh(number, end - begin, left=begin, height=0.8, color=colours[stage])
        style.dress(axes, "", label, grid="x")
    panels[-1].set_xlabel("time [µs]")
    style.save(figure, path)


def main() -> None:
    out = images_folder(__doc__)
    draw_throughput(out / "wafer_gpu_throughput.png")
    draw_reads(out / "wafer_gpu_reads.png")
    draw_host(out / "wafer_gpu_host.png")
    draw_sensitivity(out / "wafer_gpu_sensitivity.png")
    draw_bounds(out / "wafer_gpu_bounds.png")
    draw_loads(out / "wafer_gpu_loads.png")
    draw_timeline(out / "wafer_gpu_timeline.png")
    draw_breakdown(out / "wafer_gpu_breakdown.png")
    draw_readings(out / "wafer_gpu_readings.png")


if __name__ == "__main__":
    main()
