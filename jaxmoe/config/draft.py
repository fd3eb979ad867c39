"""Configuration data before validation, with a memory of where every part of it was written."""

from dataclasses import dataclass
from pathlib import Path

from jaxmoe.config.base import ConfigError

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Source:
    """A file, or the command line. `depth` leading keys of a full path are not part of the file."""

    label: str
    folder: Path  # where relative paths start
    depth: int = 0


class Draft:
    """A mapping that is put together from files and overrides."""

    def __init__(self, data: dict[str, object], source: Source) -> None:
        self.data = data
        self._sources: dict[Keys, Source] = {(): source}

    def get(self, *keys: str) -> object:
        """The value at a key path, `None` where there is none."""
        node: object = self.data
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def put(self, keys: tuple[str, ...], value: object, source: Source) -> None:
        """Set the value at a key path; missing and empty mappings on the way are made."""
        node = self.data
        for depth, key in enumerate(keys[:-1], start=1):
            child = node.get(key)
            if child is None:
                self._sources[keys[:depth]] = source
            elif not isinstance(child, dict):
                raise ConfigError(
                    f"{source.label}: {'.'.join(keys)} cannot be set: {'.'.join(keys[:depth])} is {child!r}, "
                    f"not a mapping. Set {'.'.join(keys[:depth])} as a whole."
                )
            # A YAML alias may hold the same mapping in several places: change only this one.
            copied: dict[str, object] = dict(child) if isinstance(child, dict) else {}
            node[key] = copied
            node = copied
        node[keys[-1]] = value
        self._sources[keys] = source

    def source(self, keys: Keys) -> Source:
        """Where the value at a key path was written, or, if it is missing, the mapping that lacks it."""
        return next(self._sources[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in self._sources)

    def place(self, keys: Keys) -> str:
        """Source and key path for a message, the path as that source has it."""
        source = self.source(keys)
        return f"{source.label}: {'.'.join(map(str, keys[source.depth :]))}"
