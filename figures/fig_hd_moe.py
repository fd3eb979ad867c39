"""Figures of the study `hd_moe` beside those of its paper, drawn from its tables alone.

python figures/fig_hd_moe.py
"""

from pathlib import Path

import numpy as np
from activation import plot_activation
from panels import GroupPanel, ScatterPanel, plot_bar_panels, plot_scatter_panels
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.report import MeshPanel, plot_mesh_loads

MODELS = {
    "mixtral-8x7b": "Mixtral-8x7B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "qwen2-57b-a14b": "Qwen2's shape, trace like DeepSeek's",
}
DEEPSEEK = "deepseek-v2-lite"
NAMES = {
    "tp": "TP",
    "ep": "EP",
    "hybrid": "hybrid",
    "hybrid_ring": "hybrid, ring",
    "node": "node balance",
    "node_link": "HD-MoE",
    "gradient": "gradient",
}
OPTIMISERS = {"milp-bayes": "HD-MoE", "gradient": "gradient"}
COUNTINGS = {
    "equations": "4 bytes per element, drawn batches",
    "mean_frequencies": "4 bytes per element, mean frequencies",
    "one_byte": "1 byte where results gather, drawn batches",
    "published": "1 byte where results gather, mean frequencies",
}
POWERS = (("4x8", "2.5", "75"), ("4x8", "5", "50"), ("4x8", "10", "25"))
MESHES = (("4x4", "5", "50"), ("4x8", "5", "50"), ("8x8", "5", "50"))
MACHINES = (*POWERS, MESHES[0], MESHES[2])
PAPER_DYNAMIC = {"2": 1.15, "5": 1.25}  # mean speed-up by the number of experts broadcast
MICRO = 1e6
Machine = tuple[str, str, str]  # mesh, TFLOP/s, GB/s


def table(name: str) -> Rows:
    """A table of the study."""
    return read_table(STUDIES / "hd_moe" / f"{name}.csv")


def on(machine: Machine) -> dict[str, str]:
    """The columns that say which machine it is."""
    return dict(zip(("mesh", "TFLOPs_per_s", "GB_per_s"), machine, strict=True))


def machine_title(machine: Machine) -> str:
    return "{}, {} TFLOP/s, {} GB/s".format(*machine)


# Fig. 3


def draw_activation(out: Path) -> None:
    """Fig. 3: how experts are activated, one image for each model with a recorded trace."""
    for model in distinct(table("activation"), "model"):
        of = {panel: select(table("activation"), model=model, figure=panel) for panel in ("3a", "3b", "3c", "3d")}
        layers = distinct(of["3a"], "layer")
        what = ("middle", "most uneven")[: len(layers)]
        frequency = {
            f"layer {layer}, {name}": column(select(of["3a"], layer=layer), "value")
            for layer, name in zip(layers, what, strict=True)
        }
        experts = len(next(iter(frequency.values())))
        plot_activation(
            out / f"hd_moe_fig3_{model}.png",
            np.array([int(layer) for layer in distinct(of["3b"], "layer")]),
            frequency,
            by_name(of["3b"]),
            column(of["3c"], "value").reshape(experts, experts),
            by_name(of["3d"]),
            f"Fig. 3, how experts are activated: {MODELS[model]} (affinity: layer {of['3c'][0]['layer']})",
        )


def by_name(rows: Rows) -> dict[str, np.ndarray]:
    """Values by layer, [layer], of every name."""
    return {name: column(select(rows, name=name), "value") for name in distinct(rows, "name")}


# Fig. 5 and Table III


def draw_estimates(out: Path) -> None:
    """Fig. 5: the node estimate and the link model beside the simulator, one row for each model."""
    panels = []
    for model in distinct(table("estimates"), "model"):
        rows, fits = select(table("estimates"), model=model), select(table("gamma"), model=model)
        kinds = {fit["kind"]: fit for fit in fits}
        for key, name, r2 in (
            ("node_estimate_s", "node estimate", "node_r2"),
            ("link_model_s", "link model", "link_r2"),
        ):
            points, labels = {}, {}
            for kind in distinct(rows, "kind"):
                of_kind = select(rows, kind=kind)
                points[kind] = (MICRO * column(of_kind, key), MICRO * column(of_kind, "simulated_s"))
                gamma = f"gamma {float(kinds[kind]['gamma']):.2f}, " if r2 == "node_r2" else ""
                within = select(table("gamma_by_batch"), model=model, kind=kind)
                inside = np.median(column(within, "r2" if r2 == "node_r2" else "link_r2"))
                labels[kind] = f"{kind}: {gamma}R2 {float(kinds[kind][r2]):.4g} ({inside:.2f})"
            slopes = {kind: float(kinds[kind]["gamma"]) for kind in points} if r2 == "node_r2" else {"equal": 1.0}
            title = f"{MODELS[model]}: {name}\n(R2 of all kinds and batch sizes {kinds['all'][r2]})"
            panels.append(
                ScatterPanel(title, points, f"{name} [µs]", "simulated combine [µs]", slopes, labels, logarithmic=True)
            )
    plot_scatter_panels(
        out / "hd_moe_fig5.png",
        panels,
        "Fig. 5, communication: estimates against simulation (R2 in brackets: median within one batch size)",
        columns=2,
    )


def draw_table_iii(out: Path) -> None:
    """Table III: the paper's columns, our formula and our simulator."""
    rows = table("table_iii")
    names = {
        "paper_analytical_us": "analytical (paper)",
        "paper_astra_sim_us": "ASTRA-sim (paper)",
        "formula_us": "formula (ours)",
        "simulated_us": "simulated (ours)",
    }
    panel = GroupPanel(
        "",
        [f"{row['latency_us']} µs, {row['bandwidth_Gb_per_s']} Gb/s" for row in rows],
        {name: column(rows, key) for key, name in names.items()},
        "time [µs]",
        "latency and bandwidth of a link",
        notes={name: [f"{value:.0f}" for value in column(rows, key)] for key, name in names.items()},
    )
    plot_bar_panels(out / "hd_moe_table_iii.png", [panel], "Table III, ring all-reduce")


# Fig. 8 to 11 and 13


def draw_whole_models(out: Path) -> None:
    """Fig. 8 and 9: time between tokens over that of TP, by hardware and by mesh."""
    for figure, machines, what in (("fig8", POWERS, "hardware"), ("fig9", MESHES, "mesh")):
        for counting, counted in COUNTINGS.items():
            panels = [
                batch_panel(
                    f"{MODELS[model]}\n{machine_title(machine)}",
                    {
                        NAMES[name]: 1 / column(select(rows, strategy=name), "speedup_over_tp")
                        for name in ("tp", "ep", "hybrid_ring", "node_link", "gradient")
                    },
                    rows,
                    "TBT over TP's (less is better)",
                    "TP's time",
                )
                for model in MODELS
                for machine in machines
                if (rows := select(table("whole_model"), model=model, counting=counting, **on(machine)))
            ]
            title = f"{figure.replace('fig', 'Fig. ')}, time between tokens of the whole model by {what}; {counted}"
            plot_bar_panels(out / f"hd_moe_{figure}_{counting}.png", panels, title)


def draw_stages(out: Path) -> None:
    """Fig. 10, 11 and 13: what node balance, and then link balance, add on DeepSeek's layer."""
    node = {NAMES[name]: (name, "node") for name in ("tp", "ep", "hybrid", "hybrid_ring")}
    compute = {NAMES[name]: ("ep", name) for name in ("node_link", "gradient")}
    network = {NAMES[name]: (name, "tp") for name in ("tp", "hybrid_ring", "node", "node_link", "gradient")}
    for figure, what, ratios, ylabel, line, title in (
        (
            "fig10",
            "total",
            node,
            "time over node balance's",
            "as fast",
            "speed-up of node balance, by baseline (paper: 1.0-3.0 over TP and EP, 1.5 over hybrid)",
        ),
        (
            "fig11",
            "compute",
            compute,
            "EP's time over the plan's",
            "as fast",
            "less compute time than EP, by plan (paper: 2.0 on average)",
        ),
        (
            "fig13",
            "network",
            network,
            "time over TP's",
            "TP's time",
            "communication (paper: link balance 1.2 times less than node balance alone, on average)",
        ),
    ):
        panels = [
            ratio_panel(machine, counting, what, ratios, f"{ylabel}\n({counting})", line)
            for counting in COUNTINGS
            if what != "compute" or counting == "equations"  # the bytes of messages are none of compute's
            for machine in MACHINES
        ]
        title = f"{figure.replace('fig', 'Fig. ')}, {title}: {MODELS[DEEPSEEK]}"
        plot_bar_panels(out / f"hd_moe_{figure}.png", panels, title, columns=len(MACHINES))


def ratio_panel(
    machine: Machine,
    counting: str,
    what: str,
    ratios: dict[str, tuple[str, str]],
    ylabel: str,
    line: str,
) -> GroupPanel:
    """Ratios of two strategies' seconds by batch size, on one machine."""
    rows = select(table("times"), model=DEEPSEEK, counting=counting, **on(machine))
    series = {name: part(rows, above, what) / part(rows, below, what) for name, (above, below) in ratios.items()}
    return batch_panel(machine_title(machine).replace(", ", "\n", 1), series, rows, ylabel, line)


def part(rows: Rows, strategy: str, what: str) -> np.ndarray:
    """Seconds of a part of the layer by batch size, [batch]."""
    columns = ("dispatch_s", "combine_s") if what == "network" else (f"{what}_s",)
    return np.sum([column(select(rows, strategy=strategy), name) for name in columns], axis=0)


def batch_panel(title: str, series: dict[str, np.ndarray], rows: Rows, ylabel: str, line: str) -> GroupPanel:
    """Values by batch size, with a line at 1."""
    return GroupPanel(title, distinct(rows, "batch_tokens"), series, ylabel, "tokens of the batch", (1.0, line))


def draw_published(out: Path) -> None:
    """Speed-ups of HD-MoE's plans beside the published ones: every machine and batch size, all countings."""
    panels = []
    for model in distinct(table("published"), "model"):
        for over in ("tp", "ep", "hybrid"):
            rows = select(table("published"), model=model, over=over)
            points = {
                counted: (column(rows, "published"), column(rows, f"ours_{counting}"))
                for counting, counted in COUNTINGS.items()
            }
            title = f"{MODELS[model]}: over {NAMES[over]}"
            panels.append(ScatterPanel(title, points, "published speed-up", "our speed-up"))
    plot_scatter_panels(out / "hd_moe_published.png", panels, "Speed-up of HD-MoE, whole model: ours and published")


# Fig. 12 and 14


def draw_loads(out: Path) -> None:
    """Fig. 12: loads of nodes before and after node balance; Fig. 14: loads of links before and after link balance."""
    rows = table("loads")
    x, y = (int(side) for side in rows[0]["mesh"].split("x"))
    for figure, what, names in (
        ("fig12", "loads of nodes", ("ep", "node", "gradient")),
        ("fig14", "loads of links", ("node", "node_link", "gradient")),
    ):
        panels = []
        for name in names:
            node, link = (column(select(rows, strategy=name, kind=kind), "seconds") for kind in ("node", "link"))
            panels.append(MeshPanel(NAMES[name], node, link))
        title = f"{figure.replace('fig', 'Fig. ')}, {what}: {MODELS[rows[0]['model']]}"
        plot_mesh_loads(out / f"hd_moe_{figure}.png", (x, y), panels, title)


# Fig. 15


def draw_dynamic(out: Path) -> None:
    """Fig. 15: static and dynamic deployment by topic, an image for each model and plan."""
    for model in distinct(table("dynamic"), "model"):
        for plan in ("published", "gradient"):
            rows = select(table("dynamic"), model=model, plan=plan)
            both = [times_and_speedups(select(rows, experts=experts)) for experts in PAPER_DYNAMIC]
            panels = [pair[i] for i in (0, 1) for pair in both]
            title = f"Fig. 15, {MODELS[model]}, {plan} plan: pre-broadcast experts on other topics"
            plot_bar_panels(out / f"hd_moe_fig15_{model}_{plan}.png", panels, title, columns=2)


def times_and_speedups(rows: Rows) -> tuple[GroupPanel, GroupPanel]:
    """Two panels of one number of experts: times of a layer and speed-ups, by topic."""
    experts = rows[0]["experts"]
    of = {name: select(rows, forecast=name) for name in ("moving average", "perfect")}
    topics = distinct(rows, "topic")
    static = {"static": MICRO * column(of["perfect"], "static_s")}
    dynamic = {f"dynamic, {name}": MICRO * column(chosen, "dynamic_s") for name, chosen in of.items()}
    speedup = {f"dynamic, {name}": column(chosen, "speedup") for name, chosen in of.items()}
    notes = {name: [f"{value:.2f}" for value in values] for name, values in speedup.items()}
    machine = "{TFLOPs_per_s} TFLOP/s, {GB_per_s} GB/s".format(**rows[0])
    window = column(rows, "experts_in_window")
    fits = f"free; {window.min():.1f} to {window.max():.1f} fit the window"
    title = f"({'a' if experts == '2' else 'b'}) {experts} experts, {machine}\n{fits}"
    paper = (PAPER_DYNAMIC[experts], f"paper's mean, {PAPER_DYNAMIC[experts]}")
    return (
        GroupPanel(title, topics, static | dynamic, "time of a MoE layer [µs]", notes=notes),
        GroupPanel("", topics, speedup, "speed-up over static", reference=paper),
    )


def main() -> None:
    """Draw everything."""
    out = images_folder(__doc__)
    draw_activation(out)
    draw_estimates(out)
    draw_table_iii(out)
    draw_whole_models(out)
    draw_stages(out)
    draw_published(out)
    draw_loads(out)
    draw_dynamic(out)


if __name__ == "__main__":
    main()
