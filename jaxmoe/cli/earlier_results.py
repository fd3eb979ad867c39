"""Results of earlier runs in a folder: whose they are, and which of them a new run may replace."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.errors import InputError
from jaxmoe.files import remove

SUMMARY = "summary.json"
LISTED = "result_files"  # the key of their names, in summaries and records


@dataclass(frozen=True)
class EarlierResults:
    """The command that wrote results to a folder, "" for none, and their names; `None` where it did not list them."""

    command: str
    files: frozenset[str] | None

    def remove(self, folder: Path, kept: Iterable[Path]) -> None:
        """Remove the files and what a crash has left of them, but those that are `kept`."""
        kept = {path.resolve() for path in kept}
        for name in self.files or ():
            if (folder / name).resolve() not in kept:
                for left in (name, f"{name}.part", f"{name}.old"):
                    remove(folder / left)


def earlier_results(folder: Path, record: dict[str, Any]) -> EarlierResults:
    """The results in a folder, by its summary, and by the record of a run that did not come to its end.

    Raises `InputError` for a summary that is not jaxmoe's.
    """
    summary = _summary(folder / SUMMARY)
    if not record.get(LISTED):
        record = {}  # that run ended before it had any result
    command = str((summary or record).get("command", "")).partition(" --")[0]
    listed = [found[LISTED] for found in (summary, record) if found and isinstance(found.get(LISTED), list)]
    if summary and LISTED not in summary:
        return EarlierResults(command, None)
    names = {name for some in listed for name in some if isinstance(name, str) and _is_inside(name)}
    return EarlierResults(command, frozenset(names | ({SUMMARY} if summary else set())))


def _summary(path: Path) -> dict[str, Any] | None:
    """The summary of an earlier run; `None` where there is none."""
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_bytes())
    except (ValueError, OSError):
        summary = None
    if not isinstance(summary, dict) or "command" not in summary:
        raise InputError(f"--out: {path} is not of jaxmoe, and results would take its place; give another folder")
    return summary


def _is_inside(name: str) -> bool:
    return name not in ("", ".", "..") and Path(name).name == name
