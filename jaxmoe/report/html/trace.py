"""Blocks for the results of `jaxmoe trace`: figures of every layer, read from its `summary.json`."""

from collections.abc import Mapping
from typing import Any

from jaxmoe.report.html.blocks import Block, Figure, TableBlock, axis, choices, figure
from jaxmoe.report.style import GUIDE, PALETTE

CHANCE = "_baseline"  # ends the name of a figure as it would be by chance


def trace_blocks(summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading: one for every part of the summary that has figures by layer."""
    sections: dict[str, list[Block]] = {}
    for heading, of in _parts("all tokens", summary):
        layers = of["layers"]
        keys = [key for key in layers[0] if key != "layer_id"]
        rows = [[layer["layer_id"], *(layer.get(key) for key in keys)] for layer in layers]
        table = TableBlock("Layers", ["layer", *(key.replace("_", " ") for key in keys)], rows)
        sections[heading.capitalize()] = [*_lines(layers, keys), table]
    return sections


def _parts(name: str, of: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Mappings with a list `layers` of figures by `layer_id`, by what they are called."""
    if not isinstance(of, dict):
        return []
    layers = of.get("layers")
    has_layers = isinstance(layers, list) and bool(layers) and isinstance(layers[0], dict) and "layer_id" in layers[0]
    found: list[tuple[str, Mapping[str, Any]]] = [(name, of)] if has_layers else []
    for key, each in of.items():
        found += _parts(key.replace("_", " "), each)
    return found


def _lines(layers: list[Mapping[str, Any]], keys: list[str]) -> list[Block]:
    """A figure of every layer, beside what it would be by chance; one is chosen from all."""
    numbers = [key for key in keys if isinstance(layers[0].get(key), int | float) and not key.endswith(CHANCE)]
    if not numbers:
        return []

    def both(key: str) -> list[list[Any]]:
        return [[layer.get(name) for layer in layers] for name in (key, key + CHANCE)]

    x = [layer["layer_id"] for layer in layers]
    look = [("recorded", {"color": PALETTE[0]}), ("by chance", {"color": GUIDE, "dash": "dot"})]
    traces = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": values, "line": line}
        for (name, line), values in zip(look, both(numbers[0]), strict=True)
    ]
    shown = figure(traces, xaxis=axis("layer"), yaxis=axis("value of the figure chosen", rangemode="tozero"))
    options = ((key.replace("_", " "), {"y": both(key)}) for key in numbers)
    data = {"figure": shown, "choices": choices("figure", options)}
    return [Figure("By layer", "By chance: the same with all choices drawn independently.", data, height=360)]
