"""How right the answers of sweeps are: slopes, explanations and pages, as rows of `robust.csv`; see README.md."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.config import load_hardware, resolved
from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.strategies import standard_strategies
from jaxmoe.registry import METRICS
from jaxmoe.sweep import Space, Study, read_study, run_sweep
from jaxmoe.sweep.analysis import Elasticities, elasticities
from jaxmoe.sweep.explanation import explained

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"
Row = dict[str, Any]


def row(part: str, figure: str, value: Any, wanted: Any = "", met: bool | None = None) -> Row:
    """A row of the table. Without `met`, the value has to be the one that is wanted, where one is."""
    if met is None and wanted != "":
        met = value == wanted
    return {"part": part, "figure": figure, "value": value, "wanted": wanted, "met": "" if met is None else met}


# Slopes and explanations on a machine of each kind.

SAME = 1e-5  # two ways to a time, in single precision, differ by no more
STEP = 0.005  # of a number, below and above
WRONG, SMALL = 0.01, 0.02  # what a slope may be off, relatively; smaller slopes by so much of the smallest one above
STRATEGIES = ["tp_both_ways", "ep_balanced", "hybrid_complete"]
ENERGY = {"hardware.die.idle_W": 5, "hardware.die.energy_pJ_per_FLOP": 0.5, "hardware.link.energy_pJ_per_B": 4}
PORTS = {"hardware.ports.injection_GB_per_s": 40, "hardware.ports.ejection_GB_per_s": 30}
HBM, LINK = "hardware.die.memory_bandwidth_GB_per_s", "hardware.link.bandwidth_GB_per_s"
ROUTER = "hardware.router."
TIMED = {f"{ROUTER}chunk_B", f"{ROUTER}endpoint_latency_ns"}  # of a router without buffers
EVALUATED = "quick start: largest relative difference of a node or link to jaxmoe evaluate"


class Case(NamedTuple):
    """A shipped machine, numbers that it leaves out or has at 0, and what else is set."""

    machine: str
    numbers: dict[str, float]
    more: dict[str, Any]


CASES = {
    "mesh": Case("nmp_4x4", {"hardware.link.latency_ns": 20, HBM: 500}, {}),
    "mesh, cut through, ports": Case("nmp_4x4", PORTS, {"hardware.router.switching": "cut_through"}),
    "mesh, pipelined, energy": Case("nmp_4x4", ENERGY | {HBM: 500}, {"schedule": "pipelined(2)"}),
    "mesh, overlap": Case("nmp_4x4", {HBM: 500}, {"schedule": "overlap"}),
    "mesh, levels of memory": Case("tsmc_sow_3x8", {}, {}),
    "chiplets, tiled products": Case("chiplets_2x2", {}, {}),
    "torus": Case("torus_8x8", {"hardware.link.latency_ns": 20}, {}),
    "switch": Case("nvl72", {}, {}),
    "clusters": Case("dgx_b200_4x8", {}, {}),
    "wafers": Case("moentwine_4x8x8", {"hardware.border.latency_ns": 100}, {"hardware.wafer_shape": [2, 2]}),
    "graph": Case("camoe_4nodes", {}, {}),
}


def study_of(case: Case, axes: dict[str, list[Any]], zipped: bool = False) -> Study:
    """One layer of Mixtral on the machine, 64 tokens; the file is where paths start, and is not read."""
    read = read_study(HERE / "quickstart.yaml")
    given = {
        "hardware": case.machine,
        "model": "mixtral-8x7b",
        "workload.batch_tokens": 64,
        "evaluation.batches": 8,
        "strategies.hybrid_regions": 4,
    }
    update = {
        "set": given | case.more,
        "axes": axes | {"strategy": STRATEGIES},
        "zip": (tuple(axes),) if zipped else (),
    }
    return Study(read.path, read.config.model_copy(update=update))


def numbers_of(case: Case) -> dict[str, float]:
    """Numbers of a machine that a small step can be made from, by key, and those of the case.

    Neither zeros nor counts, nor those of finite buffers, which none of these machines has.
    """
    whole = resolved(load_hardware(CONFIGS / "hardware" / f"{case.machine}.yaml"))
    found = dict(_leaves(whole, "hardware"))
    found = {key: value for key, value in found.items() if value > (1 / STEP if isinstance(value, int) else 0)}
    found = {key: value for key, value in found.items() if key in TIMED or not key.startswith(ROUTER)}
    return found | case.numbers


def _leaves(node: Any, key: str) -> Iterator[tuple[str, float]]:
    """Numbers below a key; entries of a list are found by their name."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}")
    elif isinstance(node, list):
        for each in node:
            if isinstance(each, dict) and each.get("name"):
                yield from _leaves(each, f"{key}.{each['name']}")
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield key, node


def swept(name: str, keys: Sequence[str], folder: Path) -> dict[str, list[Row]]:
    """By strategy, the row of a case, then those a step below and above each of these numbers."""
    base = numbers_of(CASES[name])
    axes: dict[str, list[float]] = {key: [value] for key, value in base.items()}
    for changed in keys:
        for sign in (-1, 1):
            for key, value in base.items():
                stepped = value * (1 + sign * STEP * (key == changed))
                is_count = key not in CASES[name].numbers and isinstance(value, int)
                axes[key].append(round(stepped) if is_count else stepped)
    out = folder / "slopes" / name.replace(", ", "_").replace(" ", "_")
    out.mkdir(parents=True, exist_ok=True)
    rows = run_sweep(study_of(CASES[name], axes, zipped=True), out, lambda done, total: None).rows
    return {strategy: rows[at :: len(STRATEGIES)] for at, strategy in enumerate(STRATEGIES)}


def space_of(name: str) -> Space:
    return Space(study_of(CASES[name], {key: [value] for key, value in numbers_of(CASES[name]).items()}))


def slopes(folder: Path, names: Iterable[str] = CASES) -> list[Row]:
    """Elasticities of every metric to every number, against differences over a step below and above.

    Where the step below and the one above tell slopes that differ by more than may be wrong, the time has a corner, as
    where a node begins to wait for memory; there any slope between the two is right.
    """
    rows = []
    for name in names:
        space = space_of(name)
        answers = elasticities(space, space.points(), lambda done, total: None)
        keys = list(dict.fromkeys(key for answer in answers for key in answer.keys))
        beside = swept(name, keys, folder)
        told = [each for answer in answers for each in against(answer, keys, beside)]
        slope, change, below, above = np.array(told).T
        large = np.abs(change) >= SMALL
        corner = large & (np.abs(below - above) > WRONG * np.abs(change))
        low, high = (np.where(corner, least(below, above), change) for least in (np.minimum, np.maximum))
        error = np.maximum(np.maximum(low - slope, slope - high), 0)
        relative = float(np.max(error[large] / np.abs(change[large])))
        absolute = float(np.max(error[~large], initial=0.0))
        rest = f"{name}: largest error of slopes below {SMALL:g}"
        rows += [
            row("slopes", f"{name}: slopes compared", len(told)),
            *([row("slopes", f"{name}: at a corner", int(corner.sum()))] if corner.any() else []),
            row("slopes", f"{name}: largest relative error", relative, f"<= {WRONG:g}", relative <= WRONG),
            row("slopes", rest, absolute, f"<= {WRONG * SMALL:g}", absolute <= WRONG * SMALL),
        ]
    return rows


def against(answer: Elasticities, keys: Sequence[str], beside: Mapping[str, list[Row]]) -> Iterator[tuple[float, ...]]:
    """Of every metric that there is, by every number: its slope, the difference, and that below and above alone."""
    own = beside[answer.points[0].values["strategy"]]
    for at, key in enumerate(answer.keys):
        first = 1 + 2 * keys.index(key)
        low, high = own[first : first + 2]
        for slope, metric in zip(answer.values[0, :, at].tolist(), METRICS.values(), strict=True):
            if np.isfinite(slope):
                pairs = ((high, low), (own[0], low), (high, own[0]))
                yield (
                    slope,
                    *(float(np.log(a[metric.column] / b[metric.column]) / np.log(a[key] / b[key])) for a, b in pairs),
                )


def explanations(folder: Path) -> list[Row]:
    """What explanations say against the rows of a sweep, and every resource against an evaluation's.

    The sweep has another path through the code: all points at once, with the machine's numbers as arguments.
    """
    rows = []
    for name in CASES:
        space, beside = space_of(name), swept(name, (), folder)
        gaps = []
        for point in space.points():
            told, (has,) = explained(space, point), beside[point.values["strategy"]]
            times = {"total": told.total, "busiest": told.resources[0].total} | told.stages
            gaps += [abs(value / has[f"{key}_s"] - 1) for key, value in times.items() if has[f"{key}_s"]]
        told_as = f"{name}: largest relative difference to the sweep"
        rows.append(row("explanations", told_as, max(gaps), f"<= {SAME:g}", max(gaps) <= SAME))
    gap = _to_evaluation()
    return [*rows, row("explanations", EVALUATED, gap, f"<= {SAME:g}", gap <= SAME)]


def _to_evaluation() -> float:
    """The largest relative difference of a node or link of the quick start's points to what `evaluate` times."""
    space = Space(read_study(HERE / "quickstart.yaml"))
    first = [point for point in space.points() if point.values[LINK] == space.points()[0].values[LINK]]
    sets = space.fixed | {LINK: first[0].values[LINK]}
    given = [f"{key}={value}" for key, value in sets.items()]
    inputs = read_inputs(space.study.scenario, given, None, str(space.study.layers))
    strategies, worst = {each.name: each for each in standard_strategies(inputs)}, 0.0
    for point in first:
        time = score(inputs, strategies[point.values["strategy"]], inputs.evaluation_batches)
        for each in explained(space, point).resources:
            seconds = sum(of[each.kind][0, each.index] for of in time.busy.values() if each.kind in of)
            worst = max(worst, abs(each.total - seconds) / max(seconds, 1e-12))
    return float(worst)


def jaxmoe(*given: str) -> None:
    """Run the command."""
    subprocess.run([sys.executable, "-m", "jaxmoe", *given], check=True, stdout=subprocess.DEVNULL)


# Pages: how large they are, and how long a browser takes to open and draw them.

LARGEST_MB, SLOWEST_S = 8.0, 2.0
OPENED = 5  # times, each without what was opened before
SCREENS = {"small": (400, 800), "wide": (1600, 900)}
COMMANDS = {
    "tune": ("tune", str(CONFIGS / "scenarios" / "quickstart.yaml")),
    "sweep": ("sweep", str(HERE / "quickstart.yaml"), "--pareto", "total,utilisation", "--elasticities"),
}


def pages(folder: Path) -> list[Row]:
    """The pages of the two quick starts, opened without a network on a small and a wide screen; and their pictures."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if find_spec("playwright") is None or browser is None:
        return [row("pages", "not run", "needs a browser, and playwright: pip install '.[test]'")]
    rows = []
    for name, given in COMMANDS.items():
        out = folder / f"page_{name}"
        jaxmoe(*given, "--out", str(out))
        jaxmoe("report", str(out))
        size = (out / "report.html").stat().st_size / 1e6
        rows.append(row("pages", f"{name}: MB", size, f"< {LARGEST_MB:g}", size < LARGEST_MB))
        for screen, (width, height) in SCREENS.items():
            shown, drawn, wrong = _opened(out / "report.html", browser, width, height)
            for what, seconds in (("text and tables are shown", shown), ("all figures are drawn", drawn)):
                told_as = f"{name}, {screen} screen: seconds until {what}, median of {OPENED}"
                rows.append(row("pages", told_as, median(seconds), f"< {SLOWEST_S:g}", median(seconds) < SLOWEST_S))
            rows.append(row("pages", f"{name}, {screen} screen: errors, and requests to a network", wrong, 0))
    return rows


def _opened(page_file: Path, browser: str, width: int, height: int) -> tuple[list[float], list[float], int]:
    """Seconds until text and tables are shown and until all is drawn; how much went wrong. Leaves a picture."""
    from playwright.sync_api import sync_playwright

    shown, drawn, wrong = [], [], []
    # WebGL in software where there is no GPU; and no sandbox for root, who has none in a container.
    given = ["--enable-unsafe-swiftshader", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=given)
        for _ in range(OPENED):
            context = started.new_context(viewport={"width": width, "height": height}, offline=True)
            page = context.new_page()
            page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("request", lambda asked: wrong.append(asked.url) if asked.url.startswith(("http", "ws")) else None)
            start = time.perf_counter()
            page.goto(page_file.as_uri())
            page.wait_for_selector("body[data-drawn=yes]", timeout=120_000)
            drawn.append(time.perf_counter() - start)
            shown.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1e3)
            page.screenshot(path=str(page_file.with_name(f"{width}.png")), full_page=True)
            context.close()
        started.close()
    return shown, drawn, len(wrong)
