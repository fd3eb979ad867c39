"""Figures of the study `data_movement`, drawn from its tables and arrays alone.

python figures/fig_data_movement.py
"""

from pathlib import Path

import numpy as np
from activation import plot_recall
from tables import STUDIES, Rows, images_folder, read_table

from jaxmoe.report import (
    plot_coactivation,
    plot_conditional,
    plot_coverage,
    plot_expert_load,
    plot_long_tail,
    plot_node_load,
    plot_reuse,
    plot_stage_correlation,
    plot_top_experts,
    plot_trace_comparison,
)

STUDY = STUDIES / "data_movement"
MODELS = {
    "deepseek-v2-lite/summary": "DeepSeek-V2-Lite, summaries",
    "gpt-oss-20b/gpqa_main": "GPT-OSS-20B, GPQA",
    "mixtral-8x7b/reasoning": "Mixtral-8x7B, reasoning",
}
PHASES = {  # no trace here marks prefill: what stands in for it and for decode
    "deepseek-v2-lite": "the first quarter of requests and the rest",
    "gpt-oss-20b": "the first quarter of requests and the rest",
    "mixtral-8x7b": "re-run context and new tokens of a turn",
}
MARK, MARK_TOGETHER = 0.2, 0.1
WINDOW_TOKENS = 256  # of the study's node loads
BATCH_TOKENS = (16, 32, 64, 128, 256, 512)
TOPIC_LAYER = 12  # a layer in the middle, where topics differ most


def table(name: str) -> Rows:
    """A table of the study."""
    return read_table(STUDY / f"{name}.csv")


def of(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The arrays of every shown trace, by its title."""
    return {title: arrays[f"{trace}/{name}"] for trace, title in MODELS.items()}


def draw_heatmaps(out: Path, arrays: dict[str, np.ndarray]) -> None:
    """Fig. 4, 5 and 8 of the wafer-scale study, on the trace with most experts: a low, a middle and a high layer."""
    trace, title = next(iter(MODELS.items()))
    layers = arrays[f"{trace}/layer_ids"]
    low, middle, high = layers[0], layers[len(layers) // 2], layers[-1]
    names = [f"layer {layer}" for layer in (low, middle, high)]
    above = [f"layers {low} to {layers[1]}", f"layers {middle} to {layers[len(layers) // 2 + 1]}"]
    above.append(f"layers {layers[-2]} to {high}")
    for kind, panels, axes, what in (
        ("token", names, ("expert of token t", "expert of token t + 1"), "Experts of the next token"),
        ("layer", above, ("expert", "expert in the next layer"), "Experts of the next layer"),
    ):
        maps = arrays[f"{trace}/{kind}_heatmaps"].astype(float)
        plot_conditional(
            out / f"data_movement_{kind}_heatmaps.png",
            dict(zip(panels, maps, strict=True)),
            f"{what}, given those chosen: {title}",
            axes,
        )
    together = dict(zip(names, arrays[f"{trace}/together"], strict=True))
    plot_coactivation(out / "data_movement_together.png", together, f"Experts chosen together: {title}")


def draw_coverage(out: Path, arrays: dict[str, np.ndarray]) -> None:
    """Fig. 4(c), 5(d) and 8(c): how much of all events the most frequent pairs are."""
    for kind, what in (("layer", "neighbouring layers"), ("token", "neighbouring tokens")):
        plot_coverage(
            out / f"data_movement_{kind}_coverage.png",
            of(arrays, f"{kind}_curve"),
            of(arrays, f"{kind}_curve_shuffled"),
            f"Pairs of experts in {what}, mean over layers (by chance: tokens shuffled)",
            MARK,
        )
    plot_coverage(
        out / "data_movement_together_coverage.png",
        of(arrays, "together_curve"),
        of(arrays, "together_curve_independent"),
        "Pairs of experts that a token chose together, mean over layers (by chance: products of their loads)",
        MARK_TOGETHER,
    )


def draw_by_layer(out: Path, arrays: dict[str, np.ndarray]) -> None:
    """Reuse by layer of every model (Ob2), and Spearman's correlation of prompt and answer (Fig. 6)."""
    for trace, title in MODELS.items():
        model = trace.split("/")[0]
        layers = arrays[f"{trace}/layer_ids"]
        plot_reuse(
            out / f"data_movement_reuse_{model}.png",
            layers,
            {"recorded": arrays[f"{trace}/reuse"]},
            {"recorded": arrays[f"{trace}/reuse_shuffled"]},
            f"Reuse between neighbouring tokens: {title}",
        )
        names = {"token": "from token to token", "layer": "to the next layer"}
        plot_stage_correlation(
            out / f"data_movement_phases_{model}.png",
            layers,
            {name: padded(arrays[f"{trace}/spearman_{kind}"], len(layers)) for kind, name in names.items()},
            {name: padded(arrays[f"{trace}/spearman_{kind}_shuffled"], len(layers)) for kind, name in names.items()},
            f"Heatmaps of {PHASES[model]}: {title}",
            PHASES[model],
        )


def padded(values: np.ndarray, layers: int) -> np.ndarray:
    """Values [layer], NaN for layers at the end that have none."""
    return np.append(values, np.full(layers - len(values), np.nan))


def draw_loads(out: Path, arrays: dict[str, np.ndarray]) -> None:
    """Loads of experts and nodes, their long tail in small batches, and how they change with the topic."""
    for trace, title in MODELS.items():
        model = trace.split("/")[0]
        layers = arrays[f"{trace}/layer_ids"]
        plot_expert_load(
            out / f"data_movement_load_{model}.png", layers, arrays[f"{trace}/load"], f"Loads of experts: {title}"
        )
        tails = dict(zip(BATCH_TOKENS, arrays[f"{trace}/long_tail"], strict=True))
        plot_long_tail(
            out / f"data_movement_long_tail_{model}.png",
            tails,
            f"Tokens of experts in batches, layer {layers[len(layers) // 2]}: {title}",
        )
        ratio = arrays[f"{trace}/node_ratio"]
        plot_node_load(
            out / f"data_movement_nodes_{model}.png",
            WINDOW_TOKENS * np.arange(1, len(ratio) + 1),
            ratio,
            f"Loads of nodes with experts in runs, layer {layers[len(layers) // 2]}: {title}",
        )
        topics = {name.split("/")[1]: array[TOPIC_LAYER] for name, array in loads_of(arrays, model).items()}
        plot_top_experts(
            out / f"data_movement_topics_{model}.png",
            topics,
            f"Most popular experts by topic, layer {layers[TOPIC_LAYER]}: {model}",
            top=max(1, min(10, len(next(iter(topics.values()))) // 4)),
        )


def loads_of(arrays: dict[str, np.ndarray], model: str) -> dict[str, np.ndarray]:
    """Loads [layer, expert] of every trace of a model."""
    return {
        name.removesuffix("/load"): array
        for name, array in arrays.items()
        if name.startswith(f"{model}/") and name.endswith("/load")
    }


def draw_synthesis(out: Path) -> None:
    """The figures of recorded traces, of traces drawn from their fits, and of a Zipf-only generator."""
    rows = table("synthesis")
    for trace, title in MODELS.items():
        members = [row for row in rows if row["trace"] == trace]
        if members:
            plot_trace_comparison(
                out / f"data_movement_synthesis_{trace.split('/')[0]}.png",
                [row["figure"].replace("_", " ") for row in members],
                {kind: [float(row[kind]) for row in members] for kind in ("recorded", "synthetic", "zipf")},
                f"Recorded, drawn from the fit (mean of three draws), and Zipf alone: {title}",
            )


def draw_recall(out: Path) -> None:
    """Recall of the predictors of the next choices, fitted and scored on different requests."""
    for trace, title in MODELS.items():
        model, topic = trace.split("/")
        rows = [
            row
            for row in table("prediction")
            if (row["model"], row["fitted_on"], row["scored_on"]) == (model, topic, topic)
        ]
        top_k = {"deepseek-v2-lite": 6, "gpt-oss-20b": 4, "mixtral-8x7b": 2}[model]
        recall = {row["predictor"]: [float(row[f"recall_{n}"]) for n in ("K", "2K", "4K")] for row in rows}
        plot_recall(
            out / f"data_movement_recall_{model}.png",
            top_k * np.array([1, 2, 4]),
            {name: np.array(values) for name, values in recall.items()},
            top_k,
            f"Predicting a token's experts, fitted on other requests: {title}",
        )


def main() -> None:
    """Draw everything."""
    out = images_folder(__doc__)
    with np.load(STUDY / "arrays.npz") as file:
        arrays = {name: file[name] for name in file.files}
    draw_heatmaps(out, arrays)
    draw_coverage(out, arrays)
    draw_by_layer(out, arrays)
    draw_loads(out, arrays)
    draw_synthesis(out)
    draw_recall(out)


if __name__ == "__main__":
    main()
