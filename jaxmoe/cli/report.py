"""`jaxmoe report`: one HTML page of a folder of results, of several side by side, or of the studies of a folder."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from jaxmoe.report.html import (
    Block,
    ComparedRun,
    Folded,
    Note,
    Page,
    ReportError,
    TableBlock,
    check_installed,
    comparison_blocks,
    gallery,
    hardware_blocks,
    is_gallery,
    iterations_blocks,
    loads_block,
    network_blocks,
    picture,
    plain_blocks,
    read_loads,
    runs_blocks,
    trace_blocks,
    validation_blocks,
    write_page,
)
from jaxmoe.run_folders import COMPARED, PAGE, SUMMARY

Sections = dict[str, list[Block]]
LOADS, MANIFEST = "loads.npz", "manifest.json"
BUILDERS: dict[str, Callable[[Mapping[str, Any]], Sections]] = {
    "tune": comparison_blocks,
    "tune --hardware": hardware_blocks,
    "evaluate": comparison_blocks,
    "validate": validation_blocks,
    "simulate": iterations_blocks,
    "network": network_blocks,
    "trace stats": trace_blocks,
    "trace compare": trace_blocks,
    "trace fit": trace_blocks,
    "trace synth": trace_blocks,
    "trace convert": trace_blocks,
}
PLAIN = (
    "calibrate",
    "network profile",
    "plan place",
    "plan advise",
    "plan convert",
    "plan diff",
    "plan show",
    "plan check",
    "serve",
    "serve rates",
)
WITH_LOADS = ("tune", "evaluate", "network")  # another command in the folder leaves theirs there
SHOWN_BY_DEFAULT = ("ep_balanced", "tuned")  # machines side by side


def run(results: Sequence[Path], out: Path | None) -> None:
    """Read one folder, or several to compare, and write the page. Raises `ReportError` or `OSError`."""
    for folder in results:
        if not folder.is_dir():
            raise ReportError(f"there is no folder {folder}; give one that a command has written with --out")
    name = PAGE if len(results) == 1 else COMPARED
    target = results[0] / name if out is None else out
    if target.is_dir():
        raise ReportError(f"--out is {target}, a folder; give the name of a file, such as {target / name}")
    if not target.parent.is_dir():
        raise ReportError(f"--out is {target}, but there is no folder {target.parent}; make it or give another file")
    page = _page_of(results[0], target) if len(results) == 1 else _runs_page(results, target)
    try:
        write_page(target, page)
    except OSError as error:
        raise ReportError(f"--out: cannot write {target}: {error.strerror or error}; give another file") from error
    print(target)


def _runs_page(results: Sequence[Path], target: Path) -> Page:
    check_installed()
    return runs_page(results, [_summary(folder) for folder in results], target)


def _page_of(results: Path, target: Path) -> Page:
    """Page for the content of the folder, which is studies, a sweep, or the run of a command."""
    if not (results / SUMMARY).exists() and is_gallery(results):
        return gallery(results, target)
    check_installed()
    summary = _summary(results)
    return _sweep_page(results, summary) if (results / MANIFEST).exists() else _page(results, summary)


def _summary(results: Path) -> dict[str, Any]:
    """Read `summary.json`; an empty dict for a sweep that was stopped before it wrote one.

    Raises `ReportError` for a summary that is missing or damaged, or that names no command.
    """
    path = results / SUMMARY
    if not path.exists():
        if (results / MANIFEST).exists():
            return {}
        raise ReportError(f"{results} holds no {SUMMARY}: it is no folder of results; give one written with --out")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is damaged ({error}); run the command again") from None
    if not isinstance(summary, dict) or not isinstance(summary.get("command"), str):
        raise ReportError(f"{path} does not say which command wrote it; run the command again")
    return summary


def _page(results: Path, summary: dict[str, Any]) -> Page:
    """The page of a run of a command."""
    command = summary["command"]
    builder = partial(plain_blocks, results) if command in PLAIN else BUILDERS.get(command)
    if command == "sweep":  # of layers it has a manifest
        raise ReportError(f"{results} is of a sweep over deployments, which has no page; see front.png there")
    if builder is None:
        raise ReportError(
            f"{results / SUMMARY}: command is {command!r}, expected one of {', '.join([*BUILDERS, *PLAIN, 'sweep'])}"
        )
    try:
        sections = builder(summary)
        about = _about(summary)
        facts = _facts(results, summary)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        # Whatever a file holds that no command of this version writes.
        raise ReportError(
            f"{results / SUMMARY} is not as jaxmoe {command} writes it ({type(error).__name__}: {error}); "
            "run the command again"
        ) from error
    if command in WITH_LOADS and (results / LOADS).exists():
        sections = _with_loads(sections, results / LOADS)
    title = f"{_name(summary)}: jaxmoe {command}"
    return Page(title, facts, [*sections.items(), ("How it was made", about)])


def _with_loads(sections: Sections, path: Path) -> Sections:
    """The sections with the machine after the first one."""
    loads = read_loads(path)
    shown = [name for name in SHOWN_BY_DEFAULT if name in loads.names]
    shown += [name for name in loads.names if name not in shown]
    first, *others = sections.items()
    return dict([first, ("Machine", [loads_block(loads, shown[:2])]), *others])


def _name(summary: Mapping[str, Any]) -> str:
    for section in ("scenario", "hardware", "study"):
        of = summary.get(section)
        if isinstance(of, dict) and of.get("name"):
            return str(of["name"])
    return str(summary.get("command"))


def _facts(results: Path, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines for the top of the page."""
    device = summary.get("device", {})
    wall = summary.get("wall_s", {})
    facts = [
        ("Command", summary.get("command_line") or f"jaxmoe {summary['command']} (its options were not written down)"),
        ("Folder", str(results.resolve().name)),
    ]
    if "tokens" in (trace := summary.get("trace") or {}):
        facts.append(("Trace", f"{trace.get('path', 'drawn')}, {trace['tokens']:,} tokens"))
    if device:
        facts.append(("Device", f"{device.get('count')} x {device.get('kind')}, {device.get('cpu_count')} CPU cores"))
    if "total" in wall:
        facts.append(("Wall time", f"{wall['total']:.1f} s"))
    return facts


def _about(summary: Mapping[str, Any]) -> list[Block]:
    """Versions, wall time by stage, and the resolved configuration."""
    blocks: list[Block] = []
    config = next((summary[key] for key in ("scenario", "hardware", "study") if key in summary), None)
    if config is not None:
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        blocks.append(Folded("The resolved configuration", text))
    stages = summary.get("wall_s", {}).get("stages", {})
    if stages:
        rows = [[name, *(round(spent[key], 2) for key in ("run_s", "compile_s"))] for name, spent in stages.items()]
        blocks.append(TableBlock("Wall time [s]", ["stage", "running", "compiling"], rows))
    if "versions" in summary:
        rows = [[name, version] for name, version in summary["versions"].items()]
        blocks.append(TableBlock("Versions", ["package", "version"], rows))
    return blocks or [Note("The summary says nothing about this.")]


def _sweep_page(results: Path, summary: dict[str, Any]) -> Page:
    """The page of a sweep, also of one that was stopped."""
    # The answers of a sweep need JAX, which takes a while to load; no other page does.
    from jaxmoe.cli.report_sweep import sweep_data
    from jaxmoe.report.html import sweep_blocks
    from jaxmoe.sweep.folder import read_sweep

    folder = read_sweep(results)
    name = str(folder.manifest["study"])
    about = _about(summary or {"versions": folder.manifest.get("versions", {})})
    if folder.study:
        about.insert(0, Folded("The study file", folder.study))
    facts = _facts(results, {"command": "sweep"} | summary)
    sections = sweep_blocks(sweep_data(folder, summary))
    return Page(f"{name}: jaxmoe sweep", facts, [*sections.items(), ("How it was made", about)])


KINDS = {"evaluate": "strategies", "tune": "strategies", "simulate": "systems"}  # by command; those of a kind compare


def runs_page(results: Sequence[Path], summaries: Sequence[Mapping[str, Any]], target: Path) -> Page:
    """The page for folders and their summaries. Raises `ReportError` where these cannot be compared."""
    _check_kinds(results, [str(summary.get("command", "sweep")) for summary in summaries])
    runs = [ComparedRun(name, summary) for name, summary in zip(_names(results), summaries, strict=True)]
    try:
        sections = runs_blocks(runs)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        # Whatever a file holds that no command of this version writes.
        told = ", ".join(map(str, results))
        raise ReportError(
            f"a summary of {told} is not as jaxmoe writes it ({type(error).__name__}: {error}); run the commands again"
        ) from error
    facts = [(run.name, str(run.summary.get("command_line") or f"jaxmoe {run.summary['command']}")) for run in runs]
    drawn = _pictures(results, [run.name for run in runs], target)
    pictures = {"Pictures": drawn} if drawn else {}
    return Page(f"{len(runs)} runs side by side", facts, [*sections.items(), *pictures.items()])


def _check_kinds(results: Sequence[Path], commands: Sequence[str]) -> None:
    """Raise `ReportError` for a folder given twice, a command that has no times to compare, or two kinds of times."""
    seen: set[Path] = set()
    for folder in results:
        if folder.resolve() in seen:
            raise ReportError(f"{folder} is given twice; give folders of different runs")
        seen.add(folder.resolve())
    for folder, command in zip(results, commands, strict=True):
        if command not in KINDS:
            raise ReportError(
                f"{folder} holds results of jaxmoe {command}, which cannot be compared; "
                f"give folders of {', '.join(KINDS)}, or one folder alone"
            )
        if KINDS[command] != KINDS[commands[0]]:
            raise ReportError(
                f"{folder} has {KINDS[command]} (jaxmoe {command}), but {results[0]} has {KINDS[commands[0]]} "
                f"(jaxmoe {commands[0]}); compare runs of one kind"
            )


def _names(results: Sequence[Path]) -> list[str]:
    """Names of runs: their folders, with as much of the path as tells them apart."""
    paths = [folder.resolve().parts[1:] for folder in results]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if max(Counter(names).values()) == 1:
            break
    return names


def _pictures(results: Sequence[Path], names: Sequence[str], target: Path) -> list[Block]:
    """Pictures that two runs or more have, those of one file name after each other."""
    found = Counter(path.name for folder in results for path in folder.glob("*.png"))
    blocks: list[Block] = []
    for file in sorted(name for name, count in found.items() if count > 1):
        for at, (folder, name) in enumerate(zip(results, names, strict=True)):
            if (path := folder / file).is_file():
                link = os.path.relpath(path.resolve(), target.resolve().parent)
                shown = picture(path, f"{path.stem.replace('_', ' ')}: {name}", link, folder)
                blocks.append(replace(shown, key=f"{shown.key}-{at}"))
    return blocks
