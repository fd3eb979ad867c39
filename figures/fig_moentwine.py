"""Figures of moentwine's mapping, drawn from the tables of the study `moentwine` alone.

python figures/fig_moentwine.py
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch, Rectangle
from panels import GroupPanel, ScatterPanel, plot_bar_panels, plot_scatter_panels
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import MeshPanel, plot_mesh_loads, style
from jaxmoe.report.style import Measure

STUDY = STUDIES / "moentwine"
NAMES = {
    "successive": "DGX",
    "baseline": "WSC, baseline",
    "er": "WSC, ER",
    "her": "WSC, HER",
    "her_blocks": "WSC, blocks on every wafer",
    "baseline_esp": "WSC, baseline, sliced",
    "esp": "WSC, ER, sliced",
}
MODELS = {
    "deepseek-v3": "DeepSeek-V3",
    "qwen3-235b-a22b": "Qwen3",
    "deepseek-v2": "DeepSeek-V2",
    "dbrx": "DBRX",
    "mixtral-8x22b": "Mixtral",
}
RULES = {"eq_1": "Eq. 1", "congestion": "congestion"}
LEGEND = "number: TP group; shade: full token domain; arrows: rings of the first and of the last group"
PHASES = {"all_reduce": "all-reduce", "dispatch": "dispatch", "combine": "combine"}
MACHINES = {
    "moentwine_4x4": "4x4",
    "moentwine_6x6": "6x6",
    "moentwine_8x8": "8x8",
    "moentwine_4x8x8": "4 x (8x8)",
    "moentwine_4x8x8:grid=[2, 3]": "6 x (8x8)",
}


def table(name: str) -> Rows:
    return read_table(STUDY / f"{name}.csv")


def drawn(rows: Rows) -> list[tuple[str, str, str]]:
    """Machine, layout and TP of every picture."""
    return list(dict.fromkeys((row["machine"], row["layout"], row["tp"]) for row in rows))


def draw_layouts(out: Path) -> None:
    """Groups, domains and rings, after Fig. 8 and 10b."""
    cases = drawn(table("layouts"))
    figure = style.new_figure(4.2 * 3, 4.4 * 2, "Token layouts: groups, full token domains and rings")
    for axes, (machine, name, tp) in zip(figure.subplots(2, 3).ravel(), cases, strict=True):
        rows = select(table("layouts"), machine=machine, layout=name, tp=tp)
        draw_layout(axes, rows)
        title = f"{MACHINES[machine]}, TP = {tp}, {'ER' if name == 'er' else name}"
        axes.set_title(title, fontsize=style.PANEL_SIZE, color=style.INK)
    figure.supxlabel(LEGEND, fontsize=style.LABEL_SIZE)
    style.save(figure, out / "moentwine_layouts.png")


def draw_layout(axes: Axes, rows: Rows) -> None:
    """One mesh: rows `x` downwards, columns `y` to the right."""
    x, y, group, domain, place = (column(rows, key).astype(int) for key in ("x", "y", "group", "domain", "place"))
    for node in range(len(rows)):
        colour = to_rgba(style.PALETTE[domain[node] % len(style.PALETTE)], 0.35)
        axes.add_patch(Rectangle((y[node] - 0.46, x[node] - 0.46), 0.92, 0.92, facecolor=colour, edgecolor="white"))
        axes.text(y[node] - 0.26, x[node] - 0.22, group[node], ha="center", va="center", fontsize=9, color=style.INK)
    for shown, colour, bend in ((0, style.PALETTE[1], 0.12), (group.max(), style.PALETTE[0], -0.12)):
        members = np.flatnonzero(group == shown)
        members = members[np.argsort(place[members])]
        for start, end in zip(members, np.roll(members, -1), strict=True):
            ends = (y[start], x[start]), (y[end], x[end])
            arrow = {"arrowstyle": "-|>", "mutation_scale": 11, "connectionstyle": f"arc3,rad={bend}"}
            axes.add_patch(FancyArrowPatch(*ends, color=colour, linewidth=1.6, shrinkA=4, shrinkB=4, **arrow))
    axes.set_xlim(-0.6, y.max() + 0.6)
    axes.set_ylim(x.max() + 0.6, -0.6)
    axes.set_aspect("equal")
    axes.set_xlabel("column", fontsize=style.LABEL_SIZE)
    axes.set_ylabel("row", fontsize=style.LABEL_SIZE)
    axes.set_xticks(range(y.max() + 1))
    axes.set_yticks(range(x.max() + 1))
    axes.spines[:].set_visible(False)


def draw_found(out: Path) -> None:
    """Mappings by gradient that are faster than all known ones."""
    rows = table("found")
    cases = drawn(rows)
    figure = style.new_figure(4.6 * len(cases), 5.0, "Mappings found by gradient, faster than baseline and ER")
    for axes, (machine, name, tp) in zip(np.atleast_1d(figure.subplots(1, len(cases))), cases, strict=True):
        draw_layout(axes, select(rows, machine=machine, layout=name, tp=tp))
        case = select(table("mapping"), machine=machine, tp=tp, rule="congestion", tuned_layout="flat")[-1]
        saved = f"{100 * (1 - float(case['tuned_over_best'])):.0f} % less time under congestion"
        axes.set_title(f"{MACHINES[machine]}, TP = {tp}: {saved}", fontsize=style.PANEL_SIZE, color=style.INK)
    figure.supxlabel(LEGEND, fontsize=style.LABEL_SIZE)
    style.save(figure, out / "moentwine_found.png")


def draw_heat(out: Path) -> None:
    """How busy links are in each phase, after Fig. 11."""
    rows = table("heat")
    share = Measure("busy part of the phase", lambda _: (100.0, "%"))
    domain = Measure("number of the full token domain", lambda _: (1.0, ""), number=True)
    for machine, sides in (("moentwine_4x4", (4, 4)), ("moentwine_6x6", (6, 6)), ("moentwine_8x8", (8, 8))):
        panels = []
        for _, name, tp in (case for case in drawn(rows) if case[0] == machine):
            nodes = select(table("layouts"), machine=machine, layout=name, tp=tp)
            for phase in ("all_reduce", "dispatch"):
                busy = column(select(rows, machine=machine, layout=name, tp=tp, phase=phase), "busy")
                title = f"{'ER' if name == 'er' else name}, TP = {tp}: {PHASES[phase]}"
                panels.append(MeshPanel(title, column(nodes, "domain"), busy))
        title = f"Links of a {MACHINES[machine]} wafer by phase"
        path = out / f"moentwine_links_{MACHINES[machine]}.png"
        plot_mesh_loads(path, sides, panels, title, (domain, share))


def relative(rows: Rows, groups: list[str], key: str, old: str) -> dict[str, np.ndarray]:
    """Total times of all layouts over those of one, for every value of a column."""
    time = {(row["layout"], row[key]): float(row["total_us"]) for row in rows}
    layouts = [name for name in distinct(rows, "layout") if name != old]
    return {
        NAMES[name]: np.array([time.get((name, group), np.nan) / time[old, group] for group in groups])
        for name in layouts
    }


def draw_pressure(out: Path) -> None:
    """Fig. 6: all-reduce against all-to-all on ever larger wafers, without entwined rings."""
    rows, panels = select(table("communication"), figure="6"), []
    for tokens, phase in (("64", "decode"), ("2048", "prefill")):
        for rule, shown in RULES.items():
            chosen = select(rows, tokens=tokens, rule=rule)
            sent = column(chosen, "dispatch_us") + column(chosen, "combine_us")
            series = {"all-reduce": column(chosen, "all_reduce_us"), "all-to-all": sent}
            title = f"{phase}, {tokens} tokens a group, {shown}"
            names = [MACHINES[row["machine"]] for row in chosen]
            panels.append(GroupPanel(title, names, series, "time of a layer [µs]", scale="log"))
    title = "Fig. 6: baseline mapping, DeepSeek-V3, TP = 4, 200 ns a hop"
    plot_bar_panels(out / "moentwine_pressure.png", panels, title, columns=2)


def draw_models(out: Path) -> None:
    """Fig. 13b, 14a: communication over DGX, by model."""
    rows, panels = table("communication"), []
    paper = {"13b": "paper: WSC 0.44 on average", "14a": "paper: WSC 0.50 on average"}
    for figure, what in (("13b", "experts on devices"), ("14a", "experts sliced")):
        for rule, shown in RULES.items():
            chosen = select(rows, figure=figure, rule=rule)
            models = distinct(chosen, "model")
            series = relative(chosen, models, "model", "successive")
            reference = (float(paper[figure].split()[2]), paper[figure])
            title = f"Fig. {figure}, {what}, {shown}"
            labels = [MODELS[model] for model in models]
            panels.append(GroupPanel(title, labels, series, "time / DGX's", reference=reference))
    title = "Communication of a 6x6 wafer over that of four DGX nodes, 256 tokens a group"
    plot_bar_panels(out / "moentwine_models.png", panels, title, columns=2)


def draw_tokens(out: Path) -> None:
    """Fig. 13a: gain over DGX by tokens of a group."""
    rows = select(table("communication"), figure="13a")
    figure = style.new_figure(11, 7.2, "Fig. 13a: communication saved over DGX (DeepSeek-V3, TP = 4)")
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for line, latency in zip(grid, ("0", "200"), strict=True):
        for axes, rule in zip(line, RULES, strict=True):
            for index, (wafer, cluster) in enumerate((("6x6", "dgx_b200_4x8"), ("8x8", "dgx_b200_8x8"))):
                chosen = select(rows, rule=rule, latency_ns=latency)
                old = select(chosen, machine=cluster)
                for layout in ("baseline", "er"):
                    new = select(chosen, machine=f"moentwine_{wafer}", layout=layout)
                    gain = 100 * (1 - column(new, "total_us") / column(old, "total_us"))
                    label, place = f"{NAMES[layout]}, {wafer}", 2 * index + (layout == "er")
                    style.marked_line(
                        axes, column(new, "tokens"), gain, label, style.PALETTE[place], style.MARKERS[place]
                    )
            for value, text in ((54, "paper: WSC 54 %"), (73, "paper: ER 73 %")):
                axes.axhline(value, color=style.INK, linestyle="--" if value == 54 else ":", linewidth=1.2, label=text)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            style.dress(axes, "tokens of a group", "time saved [%]")
            axes.set_title(f"{RULES[rule]}, {latency} ns a hop", fontsize=style.PANEL_SIZE)
            axes.label_outer()
    style.legend_below(figure, list(grid.ravel()), columns=3)
    style.save(figure, out / "moentwine_tokens.png")


def draw_scales(out: Path) -> None:
    """Fig. 13c and d: wafers, TP and several wafers; time over the baseline's."""
    rows, panels = table("communication"), []
    for rule, shown in RULES.items():
        chosen = [
            dict(row, case=f"{MACHINES[row['machine']]}\nTP {row['tp']}")
            for row in select(rows, figure="13c", rule=rule)
        ]
        cases = distinct(chosen, "case")
        series = relative(chosen, cases, "case", "baseline")
        panels.append(
            GroupPanel(
                f"Fig. 13c, one wafer, {shown}",
                cases,
                series,
                "time / baseline's",
                reference=(0.54, "paper's best: ER 0.54"),
            )
        )
    for rule, shown in RULES.items():
        chosen = select(rows, figure="13d", rule=rule)
        degrees = distinct(chosen, "tp")
        series = relative(chosen, degrees, "tp", "baseline")
        panels.append(
            GroupPanel(
                f"Fig. 13d, 4 x (8x8), {shown}",
                [f"TP {tp}" for tp in degrees],
                series,
                "time / baseline's",
                reference=(0.38, "paper's best: HER 0.38"),
            )
        )
    plot_bar_panels(
        out / "moentwine_scales.png", panels, "Communication over the baseline mapping's (Qwen3)", columns=1
    )


def draw_claims(out: Path) -> None:
    """The paper's gains beside ours."""
    panels = []
    for title, figures in (
        ("one wafer", ("13a", "13b", "13c")),
        ("several wafers, slices, all-gather", ("13d", "14a", "14b")),
    ):
        rows = [row for row in table("claims") if row["claim"].split(":")[0] in figures]
        names = [row["claim"].replace(": ", ":\n").replace(" over ", "\nover ").replace(", ", ",\n") for row in rows]
        series = {
            "paper": column(rows, "paper_%"),
            "Eq. 1": column(rows, "eq_1_%"),
            "congestion": column(rows, "congestion_%"),
        }
        panels.append(GroupPanel(title, names, series, "time saved [%]"))
    plot_bar_panels(out / "moentwine_claims.png", panels, "Gains in communication: paper and here", columns=1)


def draw_performance(out: Path) -> None:
    """Fig. 1a and 4: experts and all-to-all on ever more devices."""
    panels = []
    for tokens in ("64", "256"):
        rows = select(table("performance"), rule="eq_1", tokens=tokens, memory_and_products="overlap")
        names = [f"{short(row['machine'])}\nEP {row['devices']}" for row in rows]
        series = {"experts": column(rows, "experts_us"), "all-to-all": column(rows, "all_to_all_us")}
        panels.append(
            GroupPanel(f"{tokens} tokens a group of four devices", names, series, "time of a layer [µs]", scale="log")
        )
    plot_bar_panels(
        out / "moentwine_parallelism.png",
        panels,
        "DeepSeek-V3: experts against all-to-all (Fig. 1a), Eq. 1 on wafers",
        columns=1,
    )


def draw_adding(out: Path) -> None:
    """Experts alone by tokens a device, where memory and products overlap and where they add up."""
    rows = select(table("performance"), rule="eq_1")
    pairs = (("nvl72", "dgx_b200_4x8", (35, 37)), ("moentwine_4x8x8", "nvl72", (39, 39)))
    figure = style.new_figure(11, 4.4, "DeepSeek-V3: experts alone, by how a die's memory and products combine (VI-D)")
    for axes, (new, old, paper) in zip(figure.subplots(1, 2, sharey=True), pairs, strict=True):
        for name, label in (("overlap", "the longer counts"), ("add", "they add up")):
            own = select(rows, memory_and_products=name)
            before, now = (column(select(own, machine=machine), "experts_us") for machine in (old, new))
            tokens = column(select(own, machine=new), "tokens") / 4
            axes.plot(tokens, 100 * (before / now - 1), marker="o", label=label)
        axes.axhspan(paper[0] - 0.5, paper[1] + 0.5, color="0.6", alpha=0.6, label="paper")
        axes.set_title(f"{short(new)} over {short(old)}", fontsize=style.PANEL_SIZE)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        style.dress(axes, "tokens of a device", "faster by [%]", grid="both")
        axes.legend(fontsize=style.TICK_SIZE, frameon=False)
    style.save(figure, out / "moentwine_adding.png")


def short(machine: str) -> str:
    """A machine's name for an axis."""
    if machine.startswith("dgx"):
        return {"dgx_b200_4x8": "4 DGX", "dgx_b200_8x8": "8 DGX"}.get(machine, f"{machine[-1]} DGX")
    return MACHINES.get(machine, machine.upper())


def draw_agreement(out: Path) -> None:
    """Line 7: model against simulator."""
    rows = table("agreement")
    points = {}
    for machine in distinct(rows, "machine"):
        chosen = select(rows, machine=machine)
        points[short(machine)] = (column(chosen, "simulated_total_us"), column(chosen, "model_total_us"))
    seen, told = column(rows, "simulated_total_us"), column(rows, "model_total_us")
    error = 100 * np.abs(told / seen - 1).mean()
    r2 = 1 - ((seen - told) ** 2).sum() / ((seen - seen.mean()) ** 2).sum()
    title = f"{len(rows)} cases: R2 {r2:.4f}, mean error {error:.2f} %"
    panel = ScatterPanel(title, points, "simulated [µs]", "model [µs]", logarithmic=True)
    plot_scatter_panels(out / "moentwine_agreement.png", [panel], "All-reduce, dispatch and combine of a layer")


def main() -> None:
    """Draw all."""
    out = images_folder(__doc__)
    for draw in (
        draw_layouts,
        draw_found,
        draw_heat,
        draw_pressure,
        draw_models,
        draw_tokens,
        draw_scales,
        draw_claims,
        draw_performance,
        draw_adding,
        draw_agreement,
    ):
        draw(out)


if __name__ == "__main__":
    main()
