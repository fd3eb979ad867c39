"""Figures of the study `camoe`, drawn from its tables alone.

python figures/fig_camoe.py
"""

from pathlib import Path

import numpy as np
from panels import GroupPanel, plot_bar_panels
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import style

BLUE, RED, GREEN, GREY = style.PALETTE[0], style.PALETTE[1], style.PALETTE[2], style.GUIDE


def line(axes, x, y, colour: str, marker: str, label: str, dashed: bool = False) -> None:
    """A line with markers; the paper's are dashed."""
    axes.plot(x, y, color=colour, marker=marker, markersize=5, linestyle="--" if dashed else "-", label=label)


def draw_table1(rows: Rows, path: Path) -> None:
    """Latency, selectivity and change of routing by lambda, beside the paper's values."""
    counted, without = (select(rows, own_node=own) for own in ("counted", "left_out"))
    figure = style.new_figure(11.0, 6.4, "Qwen3-30B-A3B on camoe's four nodes: the all-to-all of a layer by lambda")
    panels = figure.subplots(2, 3)
    for axes, name, label in zip(
        panels.flat,
        ("mean_ms", "p95_ms", "cv", "avg_layer_cv", "kl", "avg_layer_kl"),
        ("mean latency [ms]", "95th percentile [ms]", "cv", "avg_layer_cv", "KL [nats]", "avg_layer_kl [nats]"),
        strict=True,
    ):
        x = column(counted, "lambda")
        line(axes, x, column(counted, f"paper_{name}"), style.INK, "s", "paper", dashed=True)
        line(axes, x, column(counted, name), BLUE, "o", "own node counted, as in the paper")
        line(axes, x, column(without, name), RED, "^", "own node left out")
        style.dress(axes, "lambda", label)
        if name in ("mean_ms", "p95_ms", "cv"):
            axes.set_ylim(0, 1.1 * column(counted, f"paper_{name}").max())
        if name == "avg_layer_cv":
            axes.set_ylim(1.4, 1.6)
    style.legend_below(figure, [*panels.flat], columns=4)
    style.save(figure, path)


def draw_gradient(rows: Rows, path: Path) -> None:
    """Latency saved against gate mass lost: the Pareto front of lambda and of the table."""
    titles = {"training": "training tokens", "unseen": "unseen tokens", "other_topics": "other topics"}
    figure = style.new_figure(11.5, 4.2, "A bias by gradient beside lambda: latency saved for what routing loses")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(panels, titles, strict=True):
        for form, colour, marker, label in (
            ("rule", GREY, "s", "lambda, the rule of camoe"),
            ("scalar", style.PALETTE[4], "D", "lambda by gradient"),
            ("layer", style.PALETTE[3], "v", "a lambda for each layer"),
            ("source", GREEN, "^", "a lambda for each source"),
            ("table", BLUE, "o", "the whole table by gradient"),
        ):
            some = select(rows, form=form, tokens=name)
            lost = 100 * (1 - column(some, "retained"))
            line(axes, lost, column(some, "saved_percent"), colour, marker, label)
        style.dress(axes, "gate mass lost [%]", "latency saved [%]", grid="both")
        axes.set_title(titles[name], fontsize=style.PANEL_SIZE)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    style.legend_below(figure, [*panels], columns=3)
    style.save(figure, path)


def draw_joint(rows: Rows, path: Path) -> None:
    """Bias and placement, alone and together."""
    labels = {
        "neither": "neither",
        "rule": "lambda",
        "bias": "bias",
        "placement": "placement",
        "in_turn": "in turn",
        "at_once": "at once",
    }
    titles = {"camoe_4nodes": "camoe's four nodes", "spine_leaf": "spine-leaf, 32 nodes", "wafer": "4x8 wafer"}
    panels = []
    for name in distinct(rows, "network"):
        by_corner = {corner: column(select(rows, network=name, corner=corner), "mean_ms") for corner in labels}
        relative = np.array([(times / by_corner["neither"]).mean() for times in by_corner.values()])
        groups = [*labels.values()]
        panels.append(GroupPanel(titles[name], groups, {"latency": relative}, "latency, relative to neither"))
    plot_bar_panels(path, panels, "Bias and placement by gradient, with as much gate mass retained: mean over seeds")


def draw_traffic(rows: Rows, slow: Rows, path: Path) -> None:
    """Errors of Eq. 9 and of the congestion model by class, and the slow endpoint of Fig. 5."""
    names = {
        "camoe_4nodes": "camoe, 4",
        "switch_8": "switch, 8",
        "spine_leaf": "spine-leaf, 32",
        "wafer_4x8": "wafer, 32",
    }
    figure = style.new_figure(12.0, 4.4, "Eq. 9 and the congestion model against the event simulator; a slow endpoint")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    classes, place, ticks = distinct(rows, "class"), 0.0, []
    for network, label in names.items():
        for kind in classes:
            some = select(rows, network=network, **{"class": kind})
            seen = column(some, "simulated_s")
            for offset, model, colour, marker in ((-0.12, "eq9", RED, "s"), (0.12, "congestion", BLUE, "o")):
                ratio = column(some, f"{model}_s") / seen
                told = {"eq9": "Eq. 9", "congestion": "congestion model"}[model] if not ticks else None
                spot = np.full(len(ratio), place + offset)
                left.scatter(spot, ratio, s=9, color=colour, marker=marker, alpha=0.6, label=told)
            ticks.append((place, kind.replace("_", " ")))
            place += 1
        left.text(place - 3, 1.25, label, ha="center", fontsize=style.TICK_SIZE)
        place += 0.8
    left.axhline(1, color=GREY, linewidth=1)
    left.set_yscale("log")
    left.set_ylim(0.03, 1.8)
    style.log_ticks(left.yaxis)
    left.set_xticks([at for at, _ in ticks], [text for _, text in ticks], rotation=60, fontsize=7.5)
    style.dress(left, "", "model over simulator")
    left.tick_params(axis="x", labelsize=7.5)
    left.legend(frameon=False, fontsize=style.TICK_SIZE)
    for others, colour, marker, label in (
        ("1", BLUE, "o", "others as they are"),
        ("2", RED, "s", "others twice as fast"),
    ):
        some = select(slow, others=others)
        line(right, column(some, "slowdown"), column(some, "simulated_ms"), colour, marker, label, dashed=others == "2")
    style.dress(right, "how many times one endpoint is slower", "all-to-all, simulated [ms]")
    right.legend(frameon=False, fontsize=style.TICK_SIZE)
    style.save(figure, path)


def draw_controller(rows: Rows, path: Path) -> None:
    """Latency round the change of a link, with the controller and without, and what it believes."""
    iteration = column(rows, "iteration")
    figure = style.new_figure(10.0, 4.2, "A bottleneck link at half its rate from iteration 200 on")
    left, right = figure.subplots(1, 2)
    smooth = np.ones(15) / 15
    for name, colour, label in (
        ("not_controlled_ms", GREY, "bias of the old network"),
        ("for_the_network_ms", style.INK, "bias made for the network"),
        ("controlled_ms", BLUE, "controller"),
    ):
        dashed = "--" if name == "for_the_network_ms" else "-"
        values = np.convolve(column(rows, name), smooth, "valid")
        left.plot(iteration[7:-7], values, color=colour, linestyle=dashed, linewidth=1.4, label=label)
    style.dress(left, "iteration", "dispatch and combine, mean of 15 [ms]")
    left.legend(frameon=False, fontsize=style.TICK_SIZE)
    near = (iteration >= 180) & (iteration < 260)
    right.plot(
        iteration[near], column(rows, "believed_slowness")[near], color=BLUE, label="believed slowness of the link"
    )
    right.plot(iteration[near], 10 * column(rows, "lambda")[near], color=RED, linestyle="--", label="10 x lambda")
    right.axvline(200, color=GREY, linewidth=1)
    style.dress(right, "iteration", "times, and 10 x lambda")
    right.legend(frameon=False, fontsize=style.TICK_SIZE)
    style.save(figure, path)


def draw_fits(rows: Rows, path: Path) -> None:
    """The four lines of Fig. 6: the paper's fits, and those of the simulated network of A.3."""
    figure = style.new_figure(9.6, 6.4, "Section 4.3's four fits, and those of A.3's network in the event simulator")
    panels = figure.subplots(2, 2)
    size = 4096.0 * np.array([128, 1024])
    cases = select(rows, network="without buckets")
    for axes, row in zip(panels.flat, cases, strict=True):
        same = {key: row[key] for key in ("phase", "source", "destination")}
        bucket = select(rows, network="token buckets", **same)[0]
        paper = float(row["paper_alpha_ms"]) + float(row["paper_beta_ms_per_B"]) * size
        line(axes, size / 1e6, paper, style.INK, "s", "paper", dashed=True)
        for given, colour, marker, label in ((row, BLUE, "o", "without buckets"), (bucket, RED, "^", "token buckets")):
            time = float(given["alpha_ms"]) + float(given["beta_ms_per_B"]) * size
            line(axes, size / 1e6, time, colour, marker, label)
        style.dress(axes, "message [MB]", "time [ms]")
        axes.set_title(f"{row['phase']} {row['source']} to {row['destination']}", fontsize=style.PANEL_SIZE)
        axes.set_ylim(bottom=0)
    style.legend_below(figure, [*panels.flat], columns=3)
    style.save(figure, path)


def main() -> None:
    """Draw all."""
    out = images_folder(__doc__)
    table = {path.stem: read_table(path) for path in sorted((STUDIES / "camoe").glob("*.csv"))}
    draw_table1(table["table1"], out / "camoe_table1.png")
    draw_gradient(table["gradient"], out / "camoe_gradient.png")
    draw_traffic(table["traffic"], table["slow_endpoint"], out / "camoe_traffic.png")
    draw_controller(table["controller"], out / "camoe_controller.png")
    draw_fits(table["fits"], out / "camoe_fits.png")
    draw_joint(table["joint"], out / "camoe_joint.png")


if __name__ == "__main__":
    main()
