"""Errors of a configuration file for people: where every part was written, what was expected, and the remedy."""

import difflib
import json
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from jaxmoe.config.base import ConfigError, Section
from jaxmoe.config.composition import foreign_key
from jaxmoe.config.open_section import OpenSection
from jaxmoe.errors import RuleError

# Configuration data before validation, with a memory of where every part of it was written.

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class ConfigSource:
    """The place where a value was written: a file, or an option of the command line.

    `depth`: leading keys of a full key path that are not part of the file.
    """

    label: str
    folder: Path  # where relative paths start
    depth: int = 0


class Draft:
    """A mapping that is put together from files and overrides."""

    def __init__(self, data: dict[str, object], source: ConfigSource) -> None:
        self.data = data
        self._sources: dict[Keys, ConfigSource] = {(): source}

    def get(self, *keys: str) -> object:
        """The value at a key path, `None` where there is none."""
        node: object = self.data
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def put(self, keys: tuple[str, ...], value: object, source: ConfigSource) -> None:
        """Set the value at a key path; missing mappings on the way are made, and entries of lists go by name."""
        node: Any = self.data
        path: Keys = ()
        for depth, key in enumerate(keys[:-1], start=1):
            at = _entry(node, key)
            child, path = node.get(at) if isinstance(node, dict) else node[at], (*path, at)
            if child is None:
                self._sources[path] = source
            elif not isinstance(child, dict) and _entry(child, keys[depth]) is None:
                raise ConfigError(
                    f"{source.label}: {'.'.join(keys)} cannot be set: {'.'.join(keys[:depth])} is {child!r}, "
                    f"not a mapping. Set {'.'.join(keys[:depth])} as a whole."
                )
            # A YAML alias may hold the same mapping in several places: change only this one.
            node[at] = copy(child) if child is not None else {}
            node = node[at]
        last = _entry(node, keys[-1])
        node[last] = value
        self._sources[(*path, last)] = source

    def source(self, keys: Keys) -> ConfigSource:
        """Where the value at a key path was written, or, if it is missing, the mapping that lacks it."""
        return next(self._sources[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in self._sources)

    def place(self, keys: Keys) -> str:
        """Source and key path for a message, the path as that source has it."""
        source = self.source(keys)
        above = source.depth - self._sources[()].depth  # of a part alone, such as a model that an option names, none
        return f"{source.label}: {'.'.join(map(str, keys[above:]))}"


def _entry(node: object, key: str) -> Any:
    """The key of a mapping, or the index of the entry of a list that has this name; `None` where there is none."""
    if isinstance(node, dict):
        return key
    entries = node if isinstance(node, list) else []
    names = (index for index, entry in enumerate(entries) if isinstance(entry, dict) and entry.get("name") == key)
    return next(names, None)


# Turns what pydantic found into messages for people: place, value, what was expected, and the remedy.

MOST_LINES = 5

# By pydantic's type of error; braces are filled from its context.
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "some text",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "union_tag_invalid": "one of {expected_tags}",
    "union_tag_not_found": "a mapping with a key {discriminator}",
}


def explain(error: ValidationError, root: object, draft: Draft) -> ConfigError:
    """The error for the user, one line for each thing that is wrong. `root` is a section or a union of them."""
    # Unknown keys first: a misspelt key is also a missing one, and then only its line is of use.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    lines: list[str] = []
    meant: set[Keys] = set()
    written_in: set[str] = set()
    for problem in problems:
        rule = problem.get("ctx", {}).get("error")
        keys = _key_path(problem["loc"], root, draft.data) + (rule.keys if isinstance(rule, RuleError) else ())
        written_in.add(draft.source(keys).label)
        if problem["type"] == "extra_forbidden":
            line, guess = _unknown_key(keys, problem["input"], root, draft)
            meant.add((*keys[:-1], guess))
            lines.append(line)
        elif problem["type"] != "missing":
            lines.append(_wrong_value(keys, problem, root, draft))
        elif keys not in meant:
            lines.append(f"{draft.place(keys)} is missing. {_advice(_look_up(root, keys, draft.data)[1])}.")
    rest = [f"... and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return ConfigError("\n".join(lines[:MOST_LINES] + rest), written_in)


def _unknown_key(keys: Keys, value: object, root: object, draft: Draft) -> tuple[str, str]:
    """The line, and the key that was probably meant (or nothing)."""
    section, _ = _look_up(root, keys[:-1], draft.data)
    known = [_spelling(name, field) for name, field in section.model_fields.items()] if section else []
    if keys[:-1] == ("system",) and (why := foreign_key(str(draft.get("system", "name")), str(keys[-1]))):
        return f"{draft.place(keys)} {why}. Remove it, or change system.name. Known here: {', '.join(known)}.", ""
    close = difflib.get_close_matches(str(keys[-1]), known, n=1)
    remedy = f"Did you mean {close[0]}?" if close else "Remove it."
    line = f"{draft.place(keys)} is not a known key (its value is {_show(value)}). {remedy} Known here: "
    return line + ", ".join(known) + ".", close[0] if close else ""


def _wrong_value(keys: Keys, problem: ErrorDetails, root: object, draft: Draft) -> str:
    context: dict[str, Any] = problem.get("ctx", {})
    rule = context.get("error")
    if isinstance(rule, RuleError):
        default = "" if _is_given(keys, draft.data) else " (the default)"
        return f"{draft.place(keys)} is {_show(rule.value)}{default}; expected {rule.expected}. {rule.remedy}."
    value, advice = problem["input"], _advice(_look_up(root, keys, draft.data)[1])
    if problem["type"] == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        keys, value = (*keys, tag), value[tag]
        advice = advice if len(keys) > 1 else "Write one of them"
    # What the table does not know is still told, in pydantic's words.
    expected = EXPECTED[problem["type"]].format(**context) if problem["type"] in EXPECTED else problem["msg"]
    if isinstance(value, bool) and problem["type"] in ("literal_error", "string_type"):
        advice += ". YAML takes a bare on, off, yes and no as true and false: quote a word that is meant as text"
    return f"{draft.place(keys)} is {_show(value)}; expected {expected}. {advice}."


def _advice(field: FieldInfo | None) -> str:
    if field is None or field.description is None:
        return "Correct it"
    example = f", for example {_show(field.examples[0])}" if field.examples else ""
    without = "" if field.is_required() else "; or leave the key out for its default"
    return f"Write {field.description}{example}{without}"


def _show(value: object) -> str:
    """The value as YAML would have it, in one short line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _key_path(location: tuple[str | int, ...], root: object, data: object) -> Keys:
    """Pydantic's location without the tags it adds where a kind or name chose the section."""
    keys: Keys = ()
    tag_follows = _is_union(root)
    for key in location:
        if tag_follows:
            tag_follows = False
        else:
            keys = (*keys, key)
            field = _look_up(root, keys, data)[1]
            tag_follows = field is not None and _is_union(field.annotation)
    return keys


def _child(data: object, key: str | int) -> object:
    if isinstance(data, dict):
        return data.get(key)
    return data[key] if isinstance(data, list) and isinstance(key, int) and key < len(data) else None


def _is_given(keys: Keys, data: object) -> bool:
    for key in keys:
        data = _child(data, key)
    return data is not None


def _spelling(name: str, field: FieldInfo) -> str:
    return field.alias or name


def _look_up(root: object, keys: Keys, data: object) -> tuple[type[Section] | None, FieldInfo | None]:
    """The section class at a key path, `None` if it is no mapping; and the field of the path's last name, if any."""
    section = _pick(root, data)
    field: FieldInfo | None = None
    for key in keys:
        data = _child(data, key)
        if isinstance(key, str):  # what is said of a list holds for its entries
            fields = section.model_fields if section else {}
            field = next((f for name, f in fields.items() if _spelling(name, f) == key), None)
        section = _pick(field.annotation, data) if field else None
    return section, field


def _pick(annotation: object, data: object) -> type[Section] | None:
    """The class of these mappings; where there are several, the one of the kind or name that the data state."""
    classes = list(_classes(annotation))
    if len(classes) > 1:
        stated = data.get("kind") if isinstance(data, dict) else None
        classes = [c for c in classes if stated in get_args(c.model_fields["kind"].annotation)]
    section = classes[0] if classes else None
    return section.chosen(data) if section and issubclass(section, OpenSection) and section.is_open() else section


def _is_union(annotation: object) -> bool:
    return len(list(_classes(annotation))) > 1


def _classes(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _classes(part)
