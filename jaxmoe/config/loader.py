"""From YAML files and overrides to a validated description. YAML is plain data here, with numbers such as 5e9."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from jaxmoe.config.base import ConfigError, Section
from jaxmoe.config.explain import Draft, Source, explain
from jaxmoe.config.model import ModelConfig, describe_model
from jaxmoe.config.networks import HardwareConfig
from jaxmoe.config.schema import Scenario
from jaxmoe.models import ModelError
from jaxmoe.models.hugging_face import from_hugging_face, name_of, read_json

# YAML as configuration needs it: plain data, text keys, no key twice, and numbers such as 5e9.

MOST_VALUES = 100_000  # of a file


class _Loader(yaml.SafeLoader):
    """The safe loader without its two silent traps."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # The safe loader keeps the last of equal keys and takes a bare `on` as the key True.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                problem = f"the key {getattr(key, 'value', '')!r} is not text; put it in quotes"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value!r} is there twice; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


# YAML 1.1 wants a dot and a sign in the exponent: it takes 5e9 and 1e-3 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def parse_yaml(text: str, label: str) -> object:
    """The data of one YAML document. `label` names its source in errors."""
    try:
        data = yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
        if _values(data, {}) > MOST_VALUES:
            raise ValueError(f"aliases make it more than {MOST_VALUES} values")
        return data
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{label}, line {mark.line + 1}, column {mark.column + 1}" if mark else label
        what = error.problem or error.context
        raise ConfigError(f"{where}: not valid YAML: {what}. Correct the text there.") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{label}: not valid YAML: {error}. Correct the text.") from error
    except (KeyError, IndexError, AttributeError, TypeError) as error:  # as the loader takes what it cannot convert
        raise ConfigError(f"{label}: not valid YAML: a value does not fit its tag. Leave out tags with !!.") from error


def _values(data: object, known: dict[int, int]) -> int:
    """How many values data has, aliases written out; `known` by the identity of what holds others."""
    if not isinstance(data, dict | list | tuple | set):
        return 1
    if id(data) not in known:
        known[id(data)] = 0
        known[id(data)] = 1 + sum(
            _values(value, known) for value in (data.values() if isinstance(data, dict) else data)
        )
    if known[id(data)] == 0:
        raise ValueError("an alias is inside of what it stands for")
    return known[id(data)]


def read_mapping(path: Path) -> dict[str, object]:
    """The mapping in a YAML file, given by its absolute path."""
    label = label_of(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{label}: no such file. {_nearby(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{label}: cannot be read: {reason}. Give the path of a YAML file.") from error
    data = parse_yaml(text, label)
    if not isinstance(data, dict):
        got = "empty" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{label}: the file is {got}; expected a mapping. Write one 'key: value' on each line.")
    return data


FORMAT = 1  # of YAML files that this version writes; it reads those of all formats up to this one


def read_formatted(path: Path) -> dict[str, object]:
    """The mapping in a YAML file whose key `format`, 1 where it is left out, says which keys it may have."""
    data = read_mapping(path)
    stated = data.pop("format", FORMAT)
    if isinstance(stated, bool) or not isinstance(stated, int) or not 1 <= stated <= FORMAT:
        newer = isinstance(stated, int) and stated > FORMAT
        remedy = "Install a newer jaxmoe, or write" if newer else "Write"
        raise ConfigError(
            f"{label_of(path)}: format is {stated!r}; expected {FORMAT}, the newest that this jaxmoe reads. "
            f"{remedy} format: {FORMAT} and the keys of that format."
        )
    return data


def label_of(path: Path) -> str:
    """An absolute path as a user would write it: from the working folder where it lies inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f"There is no folder {label_of(path.parent)} either; check the path."
    names = sorted(file.name for file in path.parent.glob("*.yaml"))
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"YAML files there: {', '.join(names) or 'none'}."


# From a YAML file, the files it names and `--set` overrides to a validated description.

# Keys of a scenario that may name a file, and the folder it is in.
FOLDERS = {"hardware": "hardware", "model": "models", "workload": "workloads"}

# Keys of paths to files, which start where they were written.
PATHS = (
    ("workload", "trace", "path"),
    ("hardware", "die", "gemm", "path"),
    ("system", "profile"),
    ("tuning", "topics"),
)

SomeSection = TypeVar("SomeSection", bound=Section)
Override = tuple[tuple[str, ...], object]


def load_scenario(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario in a YAML file. Raises `ConfigError`.

    `hardware`, `model` and `workload` are mappings or names of files: NAME stands for
    `hardware/NAME.yaml` (`models/`, `workloads/`) in the nearest folder above the scenario in which that
    subfolder has YAML files. `model` may also be the path of a .yaml or .json file, from the folder of the file
    that has it, or with `--set` from the working folder; one with a key `model_type` is read as a config.json of
    Hugging Face.

    `overrides` are texts `key.path=value`, the value in YAML. Shorter key paths are applied first, then the
    order is as given. So `hardware=nmp_8x8` swaps the file, `hardware.link.bandwidth_GB_per_s=75` reaches
    into it, and both together do so in either order.
    """
    return _with_overrides(_normal(path), _parse_overrides(overrides), Source("--set", Path.cwd()))


def load_scenario_with(path: str | Path, values: Mapping[str, object], source: Source) -> Scenario:
    """The same with values by dotted key that `source` states, for its errors and its relative paths."""
    given = [(tuple(key.split(".")), value) for key, value in values.items()]
    return _with_overrides(_normal(path), sorted(given, key=lambda override: len(override[0])), source)


def _with_overrides(path: Path, overrides: list[Override], source: Source) -> Scenario:
    """The scenario with overrides, shorter key paths first."""
    draft = _read(path)
    _apply(draft, [override for override in overrides if len(override[0]) == 1], source)
    for key, folder in FOLDERS.items():
        _resolve(draft, key, folder, path)
    _apply(draft, [override for override in overrides if len(override[0]) > 1], source)
    for keys in PATHS:
        _anchor(draft, keys)
    if str(draft.get("system", "plan")).endswith(".npz"):  # else it is the name of a strategy
        _anchor(draft, ("system", "plan"))
    return validated(Scenario, draft)


def load_hardware(path: str | Path, overrides: Sequence[str] = ()) -> HardwareConfig:
    """The machine in a YAML file of its own; overrides as in `load_scenario`, from the top of this file."""
    draft = _read(_normal(path))
    _apply(draft, _parse_overrides(overrides), Source("--set", Path.cwd()))
    _anchor(draft, ("die", "gemm", "path"))
    return validated(HardwareConfig, draft)


def load_section(schema: type[SomeSection], path: str | Path) -> SomeSection:
    """A YAML file of another kind, such as the study of a sweep. Raises `ConfigError`."""
    return validated(schema, _read(_normal(path)))


def load_model(name: str, option: str) -> ModelConfig:
    """The model that an option names: a .yaml or .json file by its path from the working folder, or NAME for
    `models/NAME.yaml`, there or in its folder `configs` or above. Raises `ConfigError`.
    """
    model: ModelConfig = load_named(ModelConfig, "model", name, option)
    return model


def load_named(schema: Any, key: str, name: str, option: str) -> Any:
    """What an option names: NAME for `hardware/NAME.yaml`, or that folder of `key`, as `load_model` finds it."""
    here = Path.cwd()
    draft = Draft({key: name}, Source(option, here))
    _resolve(draft, key, FOLDERS[key], here / "configs" / "any.yaml")
    return validated(schema, Draft(draft.data[key], draft.source((key,))))  # type: ignore[arg-type]


def resolved(section: Section) -> dict[str, Any]:
    """The whole scenario or machine, defaults and references filled in, as JSON would have it.

    It is itself a valid one: `Scenario.model_validate` gives back an equal scenario.
    """
    return section.model_dump(mode="json", by_alias=True)


def _normal(path: str | Path) -> Path:
    """The absolute path without `..`, so that its parents are the folders above it."""
    return Path(os.path.abspath(path))


def _read(path: Path) -> Draft:
    data = read_formatted(path)
    data.setdefault("name", path.stem)
    return Draft(data, Source(label_of(path), path.parent))


def validated(schema: Any, draft: Draft) -> Any:
    """An object of the schema, a section or a union of them. Raises `ConfigError`."""
    try:
        return TypeAdapter(schema).validate_python(draft.data)
    except ValidationError as error:
        raise explain(error, schema, draft) from error


def _parse_overrides(overrides: Sequence[str]) -> list[Override]:
    parsed = [_parse_override(text) for text in overrides]
    return sorted(parsed, key=lambda override: len(override[0]))


def override_values(overrides: Sequence[str]) -> dict[str, object]:
    """The values of texts `key.path=value`, by dotted key. Raises `ConfigError`."""
    return {".".join(keys): value for keys, value in _parse_overrides(overrides)}


def _parse_override(text: str) -> Override:
    path, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in path.split("."))
    if not equals or not value.strip() or not all(keys):
        raise ConfigError(
            f"--set: {text!r} is not an override; expected key.path=value. "
            "Write for example --set hardware.link.bandwidth_GB_per_s=75"
        )
    return keys, parse_yaml(value, f"--set {path.strip()}")


def _apply(draft: Draft, overrides: list[Override], source: Source) -> None:
    for keys, value in overrides:
        draft.put(keys, value, source)


def _resolve(draft: Draft, key: str, folder: str, scenario: Path) -> None:
    """Put the content of the file in the place of its name. A part without a name gets that of its file."""
    part = draft.get(key)
    if isinstance(part, str):
        is_path = key == "model" and part.endswith((".yaml", ".json"))
        file = _at_path(draft, key, part) if is_path else _find(draft, key, part, folder, scenario)
        content = _read_model(file) if key == "model" else read_formatted(file)
        draft.put((key,), {"name": name_of(file), **content}, Source(label_of(file), file.parent, depth=1))
    elif isinstance(part, dict):
        part.setdefault("name", scenario.stem)


def _read_model(file: Path) -> dict[str, object]:
    """The description of a model, from a file that holds one or a config.json of Hugging Face."""
    try:
        content = read_json(file) if file.suffix == ".json" else read_formatted(file)
        return describe_model(from_hugging_face(content, name_of(file))) if "model_type" in content else content
    except ModelError as error:
        raise ConfigError(f"{label_of(file)}: {error}") from error


def _at_path(draft: Draft, key: str, path: str) -> Path:
    """The file at a path that starts where it was written."""
    folder = draft.source((key,)).folder
    file = _normal(folder / Path(path).expanduser())
    if not file.is_file():
        raise ConfigError(
            f"{draft.place((key,))} is {path!r}; expected the path of a file from {label_of(folder)}, and there is "
            f"none at {label_of(file)}. Correct the path, or write the name of a file in models/."
        )
    return file


def _find(draft: Draft, key: str, name: str, folder: str, scenario: Path) -> Path:
    """The file that a name stands for."""
    place = f"{draft.place((key,))} is {name!r}"
    for above in scenario.parents:
        names = sorted(file.name.removesuffix(".yaml") for file in (above / folder).glob("*.yaml"))
        if name in names:
            return above / folder / f"{name}.yaml"
        if names:
            close = difflib.get_close_matches(name, names, n=1)
            guess = f"Did you mean {close[0]}? " if close else ""
            there = label_of(above / folder)
            raise ConfigError(
                f"{place}; expected the name of a file in {there}. {guess}Write one of {', '.join(names)}; "
                f"or add {there}/{name}.yaml."
            )
    raise ConfigError(
        f"{place}; expected the name of a file in a folder '{folder}' beside or above the scenario, and there is "
        f"none with YAML files. Make {folder}/{name}.yaml, or write its content in place of the name."
    )


def _anchor(draft: Draft, keys: tuple[str, ...]) -> None:
    """Make a path, or each of a list, absolute: it starts where it was written."""
    path = draft.get(*keys)
    source = draft.source(keys)
    if isinstance(path, str) and path:
        draft.put(keys, str(source.folder / Path(path).expanduser()), source)
    if isinstance(path, list):
        each = [str(source.folder / Path(one).expanduser()) if isinstance(one, str) and one else one for one in path]
        draft.put(keys, each, source)
