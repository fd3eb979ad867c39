"""A scenario written out for people: every key with its value and what it stands for, machine and model in place."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from jaxmoe.config.base import ConfigError, Section
from jaxmoe.config.explain import ConfigSource, Draft
from jaxmoe.config.files import FORMAT
from jaxmoe.config.loader import load_hardware, load_model, load_named, validated
from jaxmoe.config.networks import HardwareConfig
from jaxmoe.config.open_section import OpenSection
from jaxmoe.config.schema import Scenario, divides

WIDTH = 110
_FORMAT = f"format: {FORMAT}  # of this file; newer versions of jaxmoe read it as well"
# Parts of which a template shows what their files state, unless all keys are wanted; of others it shows every key.
AS_STATED = ("hardware", "model")


def new_scenario(
    name: str, machine: str, model: str, trace: Path | None, system: str, batch_tokens: int | None
) -> Scenario:
    """A scenario with defaults for all that is not given.

    `machine` and `model` are names of files in hardware/ and models/, or paths of such files. Raises `ConfigError`.
    """
    if trace is not None and not trace.is_file():
        raise ConfigError(f"--trace: there is no file {trace}. Give a recorded trace, or leave the option out.")
    is_path = machine.endswith(".yaml")
    hardware: HardwareConfig = (
        load_hardware(machine) if is_path else load_named(HardwareConfig, "hardware", machine, "--machine")
    )
    regions = next(count for count in range(2, hardware.num_nodes + 1) if divides(hardware, count))
    stated = {"hardware": hardware, "model": load_model(model, "--model")}
    recorded = {"trace": {"kind": "file", "path": str(trace.absolute())}} if trace is not None else {}
    tokens = {} if batch_tokens is None else {"batch_tokens": batch_tokens}
    data: dict[str, object] = {
        "name": name,
        **{key: part.model_dump(mode="json", by_alias=True, exclude_unset=True) for key, part in stated.items()},
        "workload": {"name": name, **recorded, **tokens},
        "strategies": {"hybrid_regions": regions},
        "system": {"name": system},
    }
    draft = Draft(data, ConfigSource("the new scenario", Path.cwd()))
    for keys, option in ((("system",), "--system"), (("workload", "batch_tokens"), "--batch-tokens")):
        if (value := draft.get(*keys)) is not None:
            draft.put(keys, value, ConfigSource(option, Path.cwd()))
    scenario: Scenario = validated(Scenario, draft)
    return scenario


def commented(section: Scenario | HardwareConfig, all_keys: bool = False) -> str:
    """The scenario, or what a machine's file states, as YAML with a comment for each key; reads back as it was.

    With `all_keys` the scenario shows what the files of its machine and model leave to defaults, too.
    """
    if not isinstance(section, Scenario):
        return "\n".join([_FORMAT, *_entries(section, True, "")]) + "\n"
    lines = [_FORMAT]
    for key in type(section).model_fields:
        lines += ["", *_entry(section, key, key in AS_STATED and not all_keys, "")]
    return "\n".join(lines) + "\n"


def _entry(section: Section, name: str, as_stated: bool, indent: str) -> Iterator[str]:
    """The lines of one key, and of all that is in it."""
    field, value = type(section).model_fields[name], getattr(section, name)
    key = field.alias or name
    if isinstance(value, Section):
        yield from _with_comment(f"{indent}{key}:", _about(field), indent)
        yield from _entries(value, as_stated, indent + "  ")
    elif isinstance(value, tuple) and value and isinstance(value[0], Section):
        yield from _with_comment(f"{indent}{key}:", _about(field), indent)
        for item in value:
            first, *others = _entries(item, as_stated, indent + "    ")
            yield f"{indent}  - {first.strip()}"
            yield from others
    else:
        dumped = section.model_dump(mode="json", by_alias=True, include={name})
        yield from _with_comment(f"{indent}{key}: {_flow(dumped[key])}", _about(field), indent)
        if not as_stated and value in (None, ()):
            for possible in _sections(field.annotation):
                yield from (f"{indent}# {line}" for line in _possible(key, possible, value == ()))


def _sections(annotation: object) -> list[type[Section]]:
    """The sections that a key of this type may hold."""
    if not isinstance(annotation, type) or get_origin(annotation) is not None:
        return [section for inner in get_args(annotation) for section in _sections(inner)]
    if issubclass(annotation, OpenSection) and annotation.is_open():
        return [*annotation.known.values()]
    return [annotation] if issubclass(annotation, Section) else []


def _possible(key: str, section: type[Section], listed: bool) -> Iterator[str]:
    """The lines of a section that could stand at a key: defaults, or else examples."""
    yield f"{key}:"
    for number, (name, field) in enumerate(section.model_fields.items()):
        value = next(iter(field.examples or ()), "..") if field.is_required() else field.get_default()
        plain = value.model_dump(mode="json", by_alias=True) if isinstance(value, Section) else value
        line = f"{'- ' if listed and not number else '  ' * listed}{field.alias or name}: {_flow(plain)}"
        yield from _with_comment(f"  {line}", _about(field), "  ")


def _about(field: FieldInfo) -> str | None:
    """The description of a key, followed by its choices if the description does not name them all."""
    about, choices = field.description, [str(choice) for choice in get_args(field.annotation)]
    if get_origin(field.annotation) is not Literal or about is None or all(choice in about for choice in choices):
        return about
    return f"{about}: {', '.join(choices)}" if len(choices) > 1 else about


def _entries(section: Section, as_stated: bool, indent: str) -> Iterator[str]:
    fields = type(section).model_fields
    for name in sorted(fields, key=lambda name: name not in ("kind", "name")):  # what tells which keys there are
        if not as_stated or name in section.model_fields_set:
            yield from _entry(section, name, as_stated, indent)


def _flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, Mapping | list | tuple):
        value = [*value] if isinstance(value, tuple) else value
        return yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False).strip()
    return yaml.safe_dump([value], default_flow_style=True, width=10**9).strip()[1:-1]


def _with_comment(line: str, about: str | None, indent: str) -> Iterator[str]:
    """The line of a key with its description as a comment: on the line where there is room, else above it."""
    if about and len(line) + len(about) + 4 > WIDTH:
        for part in textwrap.wrap(about, WIDTH - len(indent) - 2):
            yield f"{indent}# {part}"
        about = None
    yield f"{line}  # {about}" if about else line
