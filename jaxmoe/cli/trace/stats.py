"""`jaxmoe trace stats`: what traces and load counts tell about their model, by layer and on average."""

from pathlib import Path

from jaxmoe.cli.interrupts import Interrupts
from jaxmoe.cli.output import OutputFolder
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.trace.pictures import draw_statistics
from jaxmoe.cli.trace.stats_report import print_statistics, statistics_report, write_table
from jaxmoe.experiment.clock import StageClock
from jaxmoe.experiment.inputs import OptionError, read_files
from jaxmoe.experiment.summary import surroundings
from jaxmoe.experiment.trace_statistics import find, find_topics, node_plan
from jaxmoe.placement import Placement, read_plan


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    files: list[Path],
    seed: int,
    model: str | None,
    placement: Path | None,
    nodes: int | None,
    window: int,
) -> None:
    """Tell loads, pairs of experts over tokens and layers, reuse, and what they would be by chance."""
    with StageClock() as clock:
        with clock.stage("load"):
            sources = read_files(files, model)
            plan = _plan(placement, nodes)
            plans = {name: node_plan(name, source, plan, nodes) for name, source in sources.items()}
            topics = find_topics(sources)
        with progress_bars(interrupts.check) as report, clock.stage("count"):
            findings = {name: find(name, source, plans[name], window, seed, report) for name, source in sources.items()}
        with clock.stage("draw"):
            draw_statistics(folder, findings, topics)
        write_table(folder, "layers.csv", findings)
        paths = [str(path) for path in files]
        about = {"command": "trace stats", "seed": seed, **surroundings(), "paths": paths}
        summary = about | statistics_report(findings, topics)
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        print_statistics(findings)


def _plan(path: Path | None, nodes: int | None) -> Placement | None:
    if path is None:
        return None
    if nodes is not None:
        raise OptionError("--placement and --nodes exclude each other; the plan has its own nodes")
    return read_plan(path)
