"""Runs side by side: times of their strategies or systems, and what their configurations differ in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmoe.report.html.blocks import Block, Cell, Figure, Note, TableBlock, axis, figure, seconds_unit
from jaxmoe.report.style import PALETTE

LONGEST = 60  # characters of a value in the table of differences
ROW = 22  # CSS pixels for a bar
ABSENT = object()


@dataclass(frozen=True)
class ComparedRun:
    """A run by its name, with what its command wrote as a summary."""

    name: str
    summary: Mapping[str, Any]

    @property
    def seconds(self) -> dict[str, float]:
        """Mean time of a layer of every strategy under its best exchange, or of an iteration of every system, s.

        Strategies that leave traffic out are not there.
        """
        if self.is_simulated:
            return {name: of["mean"]["total_s"] for name, of in self.summary["runs"].items()}
        strategies = self.summary["strategies"].items()
        return {name: of["mean"]["best_total_s"] for name, of in strategies if of["comparable"]}

    @property
    def is_simulated(self) -> bool:
        """Whether it has iterations of systems, not layers of strategies."""
        return bool(self.summary["command"] == "simulate")

    @property
    def setting(self) -> dict[str, Any]:
        """Its settings, by key: the resolved configuration, its layers and its version."""
        versions = {f"version of {name}": self.summary.get("versions", {}).get(name) for name in ("jaxmoe", "jax")}
        about = {"command": self.summary["command"], "layers": self.summary.get("layer_ids"), **versions}
        return about | _flat(self.summary["scenario"])


def runs_blocks(runs: Sequence[ComparedRun]) -> dict[str, list[Block]]:
    """Blocks by heading: times, and differences. The runs are of one kind; the first is what others are compared to."""
    simulated = runs[0].is_simulated
    seconds = {run.name: run.seconds for run in runs}
    names = list(dict.fromkeys(name for of in seconds.values() for name in of))
    what = "an iteration, all layers together" if simulated else "a layer under the best exchange, mean over layers"
    factor, unit = seconds_unit(value for of in seconds.values() for value in of.values())
    return {
        "Systems" if simulated else "Strategies": [
            _times(seconds, names, f"Time of {what} [{unit}]", factor),
            _bars(seconds, names, f"time [{unit}]", factor),
            _fastest(runs, factor, unit),
        ],
        "What differs": _differences(runs),
    }


def _times(seconds: Mapping[str, Mapping[str, float]], names: Sequence[str], title: str, factor: float) -> TableBlock:
    first, *others = seconds
    rows: list[list[Cell]] = []
    for name in names:
        times = [of.get(name) for of in seconds.values()]
        ratios = [
            seconds[other][name] / seconds[first][name] if _both(seconds, first, other, name) else None
            for other in others
        ]
        rows.append([name, *(None if time is None else time * factor for time in times), *ratios])
    columns = ["", *seconds, *(f"{other}: times as long as {first}" for other in others)]
    return TableBlock(title, columns, rows, "A dash is what a run does not have, or does not compare.")


def _both(seconds: Mapping[str, Mapping[str, float]], first: str, other: str, name: str) -> bool:
    return name in seconds[other] and seconds[first].get(name, 0.0) > 0


def _bars(seconds: Mapping[str, Mapping[str, float]], names: Sequence[str], label: str, factor: float) -> Figure:
    """A group of bars for every strategy or system, a bar for every run."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": run,
            "y": names,
            "x": [of[name] * factor if name in of else None for name in names],
            "marker": {"color": PALETTE[at % len(PALETTE)]},
            "hovertemplate": "%{y}<br>%{fullData.name} %{x:.4g}<extra></extra>",
        }
        for at, (run, of) in enumerate(seconds.items())
    ]
    shown = figure(
        traces,
        barmode="group",
        xaxis=axis(label, rangemode="tozero"),
        yaxis=axis("", autorange="reversed", gridcolor="rgba(0,0,0,0)"),
    )
    height = 130 + ROW * len(names) * (len(seconds) + 1)
    return Figure("Run by run", "Click a name to hide it.", {"figure": shown}, height=height, wide=True)


def _fastest(runs: Sequence[ComparedRun], factor: float, unit: str) -> TableBlock:
    """The fastest of every run, what limits it, and tokens a second of the whole model."""
    rows: list[list[Cell]] = []
    for run in runs:
        name = min(run.seconds, key=lambda name: run.seconds[name])
        of = run.summary["runs" if run.is_simulated else "strategies"][name]
        limit = of.get("limit" if run.is_simulated else "best_limit")
        steps = run.summary.get("whole_model", {}).get("runs" if run.is_simulated else "best", {})
        rows.append([run.name, name, run.seconds[name] * factor, limit, steps.get(name, {}).get("tokens_per_s")])
    return TableBlock("The fastest of each run", ["run", "fastest", f"time [{unit}]", "limit", "tokens/s"], rows)


def _differences(runs: Sequence[ComparedRun]) -> list[Block]:
    """Keys whose values are not the same in all runs; a key that a run does not have differs as well."""
    settings = [run.setting for run in runs]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    apart = [key for key in keys if any(_value(each, key) != _value(settings[0], key) for each in settings[1:])]
    if not apart:
        return [Note("Nothing: the resolved configurations, layers and versions are the same.")]
    rows = [[key, *(_text(setting.get(key, ABSENT)) for setting in settings)] for key in apart]
    blocks: list[Block] = []
    if "layers" in apart or any(key.startswith(("workload", "evaluation")) for key in apart):
        blocks.append(Note("The runs do not have the same layers, text or batches: times differ for that too."))
    columns = ["key", *(run.name for run in runs)]
    return [*blocks, TableBlock("Keys that differ", columns, rows, "A dash is a key that a run does not have.")]


def _value(setting: Mapping[str, Any], key: str) -> Any:
    return setting.get(key, ABSENT)


def _text(value: object) -> str | None:
    """A value for a cell, cut where it is long."""
    if value is ABSENT:
        return None
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    return dict(_leaves(value, prefix))


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _leaves(each, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", each
