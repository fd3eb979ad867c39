"""The folder that results go to."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class OutputFolder:
    """A writable folder; raises `OSError` on entry where there can be none.

    What was made for it and is still empty on leaving is removed, so a failed run leaves no trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []
        self._files: list[Path] = []

    def __enter__(self) -> "OutputFolder":
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._made = missing
            self._probe()
        except OSError as error:
            self._remove_empty()
            reason = "it is a file" if self.path.is_file() else error.strerror or str(error)
            raise OSError(f"--out: cannot write to the folder {self.path}: {reason}; give another one") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove_empty()

    @property
    def written(self) -> list[str]:
        """Names of the files that this run has written."""
        return [file.name for file in self._files if file.exists()]

    def target(self, name: str) -> Path:
        """Where to write the file of this name; whoever writes it does so aside and then renames."""
        self._files.append(self.path / name)
        return self._files[-1]

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all."""
        text = json.dumps(data, indent=1, allow_nan=False)
        aside = self.path / f"{name}.part"
        try:
            aside.write_text(text + "\n", encoding="utf-8")
            aside.replace(self.target(name))
        finally:
            aside.unlink(missing_ok=True)

    def _probe(self) -> None:
        probe = self.path / f".probe-{os.getpid()}"
        try:
            probe.touch()
        finally:
            probe.unlink(missing_ok=True)

    def _remove_empty(self) -> None:
        for folder in self._made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
