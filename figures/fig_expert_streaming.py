"""Figures of the study `expert_streaming`, drawn from its tables alone.

python figures/fig_expert_streaming.py
"""

from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from tables import STUDIES, column, distinct, images_folder, read_table, select

from jaxmoe.report.style import (
    PALETTE,
    dress,
    legend_below,
    log_ticks,
    marked_line,
    new_figure,
    node_colours,
    save,
    stage_colours,
)

TABLES = STUDIES / "expert_streaming"
SHORT = {
    "phi-3.5-moe": "Phi-3.5-MoE",
    "yuan2.0-m32": "Yuan2.0-M32",
    "deepseek-moe-16b": "DeepSeek-MoE-16B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
}
LAYER = (
    *("ep", "hydra", "ep_prefetch", "hydra_prefetch", "fse_tokens", "fse_tokens_prefetch"),
    *("fse_naive", "fse", "fse_paired", "fse_rule5"),
)
KINDS = {"send": "dispatch", "receive": "combine", "DDR": "memory", "compute": "compute"}  # the stages of like colours


def layer(out: Path) -> None:
    """Fig. 9 and 12: time and memory of a layer."""
    rows = read_table(TABLES / "layer.csv")
    figure = new_figure(13, 7.2, "One MoE layer on 2x2 chiplets, event simulator: time and weights held")
    panels = figure.subplots(2, 4, squeeze=False)
    for place, model in enumerate(distinct(rows, "model")):
        tokens = distinct(rows, "tokens")
        for number, strategy in enumerate(LAYER):
            mine = [row for row in select(rows, model=model, strategy=strategy) if row["micro_slices"] in ("", "8")]
            wide = 0.8 / len(LAYER)
            at = np.arange(len(tokens)) + (number - len(LAYER) / 2 + 0.5) * wide
            for row, (key, factor) in enumerate((("simulated_s", 1e3), ("package_memory_MB", 1))):
                style = {"color": PALETTE[number % len(PALETTE)], "hatch": "//" if number >= len(PALETTE) else None}
                panels[row][place].bar(at, column(mine, key) * factor, wide, **style, label=strategy)
        panels[0][place].set_title(SHORT[model], fontsize=11)
        for row, label in enumerate(("layer time [ms]", "weights in the package [MB]")):
            axes = panels[row][place]
            dress(axes, "tokens in an iteration", label if place == 0 else "")
            axes.set_xticks(np.arange(len(tokens)), tokens)
        panels[1][place].axhline(32, color="black", linestyle="--", linewidth=1, label="32 MB, the paper's most")
        panels[1][place].set_yscale("log")
        log_ticks(panels[1][place].yaxis)
    legend_below(figure, [panels[1][0]], columns=6)
    save(figure, out / "expert_streaming_layer.png")


def design(out: Path) -> None:
    """Fig. 16: utilisation over DDR, SRAM and D2D; crosses break Eq. 1 or 2."""
    rows = read_table(TABLES / "grid.csv")
    figure = new_figure(13, 8, "Busy time of the arrays, Qwen3-30B-A3B, 64 tokens (model); x: breaks Eq. 1 or 2")
    tiles = distinct(rows, "tile")
    panels = figure.subplots(2, len(tiles), squeeze=False)
    for row, (panel, key, label) in enumerate(
        (("a", "sram_MB", "SRAM of a die [MB]"), ("b", "d2d_GB_per_s", "D2D of a die [GB/s]"))
    ):
        for place, tile in enumerate(tiles):
            mine = select(rows, panel=panel, tile=tile)
            x, y = distinct(mine, "ddr_GB_per_s"), sorted(distinct(mine, key), key=float)
            values, broken = np.zeros((len(y), len(x))), []
            for each in mine:
                at = y.index(each[key]), x.index(each["ddr_GB_per_s"])
                values[at] = float(each["utilisation"])
                if each["fits"] != "True":
                    broken.append(at)
            axes = panels[row][place]
            image = axes.imshow(values, origin="lower", aspect="auto", cmap=node_colours(), norm=Normalize(0, 1))
            axes.contour(values, levels=[0.6], colors=["#D55E00"])
            axes.scatter([at[1] for at in broken], [at[0] for at in broken], marker="x", color="black", s=14)
            dress(axes, "DDR of a die [GB/s]", label if place == 0 else "")
            axes.set_xticks(range(len(x)), [f"{float(value):g}" for value in x], rotation=45)
            axes.set_yticks(range(len(y)), [f"{float(value):g}" for value in y])
            fixed = "D2D 288 GB/s" if panel == "a" else "SRAM 14 MB"
            tokens = "of one token" if float(tile) == 1 else f"of {float(tile):g} tokens"
            axes.set_title(f"{fixed}; tiles {tokens}", fontsize=10)
            axes.grid(visible=False)
    bar = figure.colorbar(image, ax=panels.ravel().tolist(), fraction=0.03)
    bar.set_label("busy part of the time; line: 0.6 of the paper")
    save(figure, out / "expert_streaming_design.png")


def slices(out: Path) -> None:
    """Fig. 17: time over micro-slices."""
    rows = read_table(TABLES / "slices.csv")
    figure = new_figure(10, 4.2, "Layer time over the micro-slices of a die's slice, 256 tokens (model)")
    panels = figure.subplots(1, 2, squeeze=False)[0]
    for axes, model in zip(panels, distinct(rows, "model"), strict=True):
        for number, sram in enumerate(distinct(rows, "sram_MB")):
            mine = select(rows, model=model, sram_MB=sram)
            marked_line(
                axes,
                column(mine, "micro_slices"),
                column(mine, "layer_s") * 1e3,
                f"{sram} MB a die",
                PALETTE[number],
                "osD^vP"[number],
            )
        dress(axes, "micro-slices", "layer time [ms]")
        axes.axvline(10, color="grey", linestyle="--", linewidth=1, label="10, below which the paper prefers")
        axes.set_title(SHORT[model], fontsize=11)
    legend_below(figure, panels, columns=4)
    save(figure, out / "expert_streaming_slices.png")


def end_to_end(out: Path) -> None:
    """Fig. 14 and 15: throughput and utilisation."""
    rows = read_table(TABLES / "end_to_end.csv")
    names = distinct(rows, "strategy")
    figure = new_figure(13, 7.4, "100 iterations with attention (model): throughput beside serial EP, and busy arrays")
    panels = figure.subplots(2, 4, squeeze=False)
    for place, model in enumerate(distinct(rows, "model")):
        tokens = distinct(rows, "tokens")
        base = column(select(rows, model=model, strategy="ep"), "token_layers_per_s")
        for number, name in enumerate(names):
            mine = select(rows, model=model, strategy=name)
            wide = 0.84 / len(names)
            at = np.arange(len(tokens)) + (number - len(names) / 2 + 0.5) * wide
            colour = PALETTE[number % len(PALETTE)]
            hatch = "//" if number >= len(PALETTE) else None
            values = (column(mine, "token_layers_per_s") / base, column(mine, "utilisation"))
            for row, heights in enumerate(values):
                panels[row][place].bar(at, heights, wide, color=colour, hatch=hatch, label=name)
        panels[0][place].set_title(SHORT[model], fontsize=11)
        for row, label in enumerate(("throughput over EP", "busy part of the arrays' time")):
            dress(panels[row][place], "tokens in an iteration", label if place == 0 else "")
            panels[row][place].set_xticks(np.arange(len(tokens)), tokens)
    legend_below(figure, [panels[0][0]], columns=6)
    save(figure, out / "expert_streaming_end_to_end.png")


def arrays(out: Path) -> None:
    """Fig. 18: utilisation on larger arrays, and time."""
    rows = read_table(TABLES / "arrays.csv")
    tokens = distinct(rows, "tokens")
    figure = new_figure(13, 7, "Qwen3-30B-A3B on larger arrays, event simulator")
    panels = figure.subplots(2, len(tokens), squeeze=False)
    shown = (("utilisation", 1, "busy part of the arrays' time"), ("simulated_s", 1e3, "layer time [ms]"))
    for row, (key, factor, label) in zip(panels, shown, strict=True):
        for axes, count in zip(row, tokens, strict=True):
            for number, name in enumerate(distinct(rows, "strategy")):
                mine = select(rows, tokens=count, strategy=name)
                places, values = np.arange(len(mine)), column(mine, key) * factor
                marked_line(axes, places, values, name, PALETTE[number], "osD^vPX<"[number])
            axes.set_xticks(range(3), distinct(rows, "array"))
            dress(axes, "array", label if axes is row[0] else "")
            axes.set_title(f"{count} tokens", fontsize=11)
            axes.set_ylim(0, 1 if key == "utilisation" else None)
    legend_below(figure, [panels[0][0]], columns=7)
    save(figure, out / "expert_streaming_arrays.png")


def agreement(out: Path) -> None:
    """Model against event simulator."""
    rows = read_table(TABLES / "agreement.csv")
    count = len(distinct(rows, "machine"))
    figure = new_figure(7.4, 5.8, f"Streaming: model against event simulator, {count} random machines")
    axes = figure.subplots()
    for number, name in enumerate(distinct(rows, "strategy")):
        mine = select(rows, strategy=name)
        seen, told = column(mine, "simulated_s") * 1e3, column(mine, "model_s") * 1e3
        label = f"{name}, mean error {100 * np.abs(told / seen - 1).mean():.1f} %"
        axes.scatter(seen, told, s=14, marker="osD^"[number], color=PALETTE[number], label=label, alpha=0.7)
    ends = np.array(axes.get_xlim())
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis, axes.yaxis)
    dress(axes, "simulated layer time [ms]", "modelled layer time [ms]", "both")
    legend_below(figure, [axes], columns=2)
    save(figure, out / "expert_streaming_agreement.png")


def activity(out: Path) -> None:
    """Fig. 13 and 11: what dies do, and how busy they are."""
    rows = read_table(TABLES / "activity.csv")
    figure = new_figure(
        13, 6.4, "Qwen3-30B-A3B, 256 tokens, paired load: activity of four dies, and busy arrays over a layer"
    )
    upper, lower = figure.subplots(2, 1, height_ratios=[2, 1])
    colours = stage_colours(KINDS.values())
    places = [(die, kind) for die in distinct(rows, "die") for kind in KINDS]
    for place, (die, kind) in enumerate(sorted(places)):
        mine = select(rows, die=die, kind=kind)
        begin, end = column(mine, "begin_s") * 1e6, column(mine, "end_s") * 1e6
        upper.barh(np.full(len(mine), place), end - begin, left=begin, height=0.85, color=colours[KINDS[kind]])
    upper.set_yticks(range(len(places)), [f"die {die} {kind}" for die, kind in sorted(places)])
    upper.tick_params(labelsize=7)
    dress(upper, "time [µs]", "", "x")
    for number, strategy in enumerate(distinct(table := read_table(TABLES / "busy.csv"), "strategy")):
        mine = select(table, strategy=strategy)
        lower.plot(column(mine, "time_s") * 1e3, column(mine, "busy"), color=PALETTE[number], label=strategy)
    dress(lower, "time [ms]", "busy arrays")
    lower.set_ylim(0, 1)
    legend_below(figure, [lower])
    save(figure, out / "expert_streaming_activity.png")


def readings(out: Path) -> None:
    """What paired load gains where the paper leaves a choice; the paper says that it gains most at few tokens."""
    rows = read_table(TABLES / "readings.csv")
    figure = new_figure(13, 8.2, "Paired load under readings of the paper, 2x2 chiplets, event simulator")
    names, tokens = distinct(rows, "reading"), distinct(rows, "tokens")
    panels = figure.subplots(2, len(tokens), squeeze=False, sharex=True, sharey="row")
    for place, count in enumerate(tokens):
        for number, model in enumerate(distinct(rows, "model")):
            mine = select(rows, model=model, tokens=count)
            at = np.array([names.index(row["reading"]) for row in mine]) + (number - 1.5) * 0.18
            gain = column(mine, "A2_s") / column(mine, "A3_s")
            spread = np.abs(np.stack([column(mine, "A3_least"), column(mine, "A3_most")]) - gain)
            style = {"color": PALETTE[number], "marker": "osD^"[number], "linestyle": "none", "label": SHORT[model]}
            panels[0][place].errorbar(at, gain, spread, **style)
            panels[1][place].plot(at, column(mine, "ep_s") / column(mine, "A3_s"), **style)
        panels[0][place].set_title(f"{count} tokens", fontsize=11)
        for row, (label, level, said) in enumerate(
            (("A3 over A2, seeds' range", 1, "no gain"), ("A3 over serial EP", 1.22, "1.22, the paper's least"))
        ):
            axes = panels[row][place]
            axes.axhline(level, color="grey", linestyle="--", linewidth=1, label=said)
            dress(axes, "", label if place == 0 else "")
            axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    legend_below(figure, [panels[0][0], panels[1][0]], columns=6)
    save(figure, out / "expert_streaming_readings.png")


FIGURES = {
    "layer": layer,
    "readings": readings,
    "grid": design,
    "slices": slices,
    "end_to_end": end_to_end,
    "arrays": arrays,
    "agreement": agreement,
    "activity": activity,
}


def main() -> None:
    """Draw those whose tables are there."""
    out = images_folder(__doc__)
    for table, draw in FIGURES.items():
        if (TABLES / f"{table}.csv").is_file():
            draw(out)


if __name__ == "__main__":
    main()
