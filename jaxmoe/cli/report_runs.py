"""The page that compares several folders of results."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmoe.report.html import Block, ComparedRun, Page, ReportError, picture, runs_blocks

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
