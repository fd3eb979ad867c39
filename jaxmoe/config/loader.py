"""From a YAML file, the files it names and `--set` overrides to a validated description."""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from jaxmoe.config.base import ConfigError, Section
from jaxmoe.config.explain import ConfigSource, Draft, explain
from jaxmoe.config.files import (
    find_file,
    label_of,
    named_files,
    parse_yaml,
    put_file,
    read_formatted,
    shipped,
    shipped_kernels,
    undecided_links,
)
from jaxmoe.config.model import ModelConfig, describe_read
from jaxmoe.config.networks import HardwareConfig
from jaxmoe.config.schema import Scenario
from jaxmoe.models import ModelError
from jaxmoe.models.hugging_face import name_of, read_fields, read_json

# Keys of a scenario that may name a file, and the folder it is in.
FOLDERS = {"hardware": "hardware", "model": "models", "workload": "workloads"}

# Keys of paths to files, which start where they were written.
PATHS = (
    ("workload", "trace", "path"),
    ("hardware", "die", "gemm", "path"),
    ("system", "profile"),
    ("tuning", "topics"),
    ("serving", "arrivals", "path"),
    ("serving", "topics", "path"),
)

SomeSection = TypeVar("SomeSection", bound=Section)
Override = tuple[tuple[str, ...], object]


def load_scenario(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario in a YAML file, given by its path or by the name of a shipped one. Raises `ConfigError`.

    `hardware`, `model` and `workload` are mappings or names of files: NAME stands for `hardware/NAME.yaml`
    (`models/`, `workloads/`) in the nearest folder above the scenario that has it, or else for a shipped one. They may
    also be the path of a .yaml file, from the folder of the file that has it, or with `--set` from the working folder.
    `model` may be that of a .json file; it, or one with a key `model_type`, is read as a config.json of Hugging Face.

    `overrides` are texts `key.path=value`, the value in YAML. Shorter key paths are applied first, then the
    order is as given. So `hardware=nmp_8x8` swaps the file, `hardware.link.bandwidth_GB_per_s=75` reaches
    into it, and both together do so in either order.
    """
    return _with_overrides(find_file(path, "scenarios"), _parse_overrides(overrides), ConfigSource("--set", Path.cwd()))


def load_scenario_with(path: str | Path, values: Mapping[str, object], source: ConfigSource) -> Scenario:
    """The scenario in a YAML file, or a shipped one by name, with these values by dotted key. Raises `ConfigError`.

    `source` says where the values were written: errors name it, and relative paths start in its folder.
    """
    given = [(tuple(key.split(".")), value) for key, value in values.items()]
    return _with_overrides(find_file(path, "scenarios"), sorted(given, key=lambda override: len(override[0])), source)


def _with_overrides(path: Path, overrides: list[Override], source: ConfigSource) -> Scenario:
    """The scenario with overrides, shorter key paths first."""
    draft = _read(path)
    _apply(draft, [override for override in overrides if len(override[0]) == 1], source)
    inner = [override for override in overrides if len(override[0]) > 1]
    given = {keys[1]: value if len(keys) == 2 else None for keys, value in inner if keys[0] == "model"}
    for key, folder in FOLDERS.items():
        _resolve(draft, key, folder, path, given)
    _apply(draft, inner, source)
    for keys in PATHS:
        _anchor(draft, keys)
    if str(draft.get("system", "plan")).endswith(".npz"):  # else it is the name of a strategy
        _anchor(draft, ("system", "plan"))
    return validated(Scenario, draft)


def load_hardware(path: str | Path, overrides: Sequence[str] = ()) -> HardwareConfig:
    """The machine in a YAML file of its own, or a shipped one by name; overrides from the top of this file."""
    draft = _read(find_file(path, "hardware"))
    _apply(draft, _parse_overrides(overrides), ConfigSource("--set", Path.cwd()))
    _anchor(draft, ("die", "gemm", "path"))
    return validated(HardwareConfig, draft)


def load_section(schema: type[SomeSection], path: str | Path) -> SomeSection:
    """A YAML file of another kind, such as the study of a sweep. Raises `ConfigError`."""
    return validated(schema, _read(Path(os.path.abspath(path))))


def load_model(name: str, option: str) -> ModelConfig:
    """The model that an option names: a .yaml or .json file by its path from the working folder, or NAME for
    `models/NAME.yaml`, there, in its folder `configs`, above or shipped. Raises `ConfigError`.
    """
    model: ModelConfig = load_named(ModelConfig, "model", name, option)
    return model


def load_named(schema: object, key: str, name: str, option: str) -> Any:
    """The section that an option names: `schema` from a file, or from NAME in the folder of `key`, as in `load_model`.

    Raises `ConfigError`, whose message names the option.
    """
    here = Path.cwd()
    draft = Draft({key: name}, ConfigSource(option, here))
    _resolve(draft, key, FOLDERS[key], here / "configs" / "any.yaml", {})
    return validated(schema, Draft(draft.data[key], draft.source((key,))))  # type: ignore[arg-type]


def resolved(section: Section) -> dict[str, Any]:
    """The whole scenario or machine, defaults and references filled in, as JSON would have it.

    It is itself a valid one: `Scenario.model_validate` gives back an equal scenario.
    """
    return section.model_dump(mode="json", by_alias=True)


def _read(path: Path) -> Draft:
    draft = Draft({}, ConfigSource(label_of(path), path.parent))
    put_file(draft, (), path)
    return draft


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


def _apply(draft: Draft, overrides: list[Override], source: ConfigSource) -> None:
    for keys, value in overrides:
        _check_links(keys, value, source)
        draft.put(keys, value, source)


def _check_links(keys: tuple[str, ...], value: object, source: ConfigSource) -> None:
    """Raise `ConfigError` for a link that does not say whether it is one way: a value alone is of no format."""
    nested: Any = value
    for key in reversed(keys):
        nested = {key: nested}
    for where, _ in undecided_links(nested):
        raise ConfigError(
            f"{source.label}: {where} has no one_way; expected it, for such a link is both ways, but one way in files "
            "of format 1. Write one_way: false for both ways, or one_way: true."
        )


def _resolve(draft: Draft, key: str, folder: str, scenario: Path, given: Mapping[str, object]) -> None:
    """Put the content of the file in the place of its name. A part without a name gets that of its file.

    `given` are keys of the model that are put over its file, so that a config.json need not tell them.
    """
    part = draft.get(key)
    if isinstance(part, str):
        is_path = part.endswith((".yaml", ".yml", ".json") if key == "model" else (".yaml", ".yml"))
        file = _at_path(draft, key, part, folder) if is_path else _find(draft, key, part, folder, scenario)
        draft.put((key,), {}, ConfigSource(label_of(file), file.parent, depth=1))
        put_file(draft, (key,), file, _model_reader(given) if key == "model" else read_formatted)
    elif isinstance(part, dict):
        part.setdefault("name", scenario.stem)


def _model_reader(given: Mapping[str, object]) -> Callable[[Path], dict[str, object]]:
    """Reads descriptions of a model, from files that hold one or a config.json of Hugging Face.

    Files are read before their base: what they state, and `given`, a config.json below them need not tell.
    """
    stated = dict(given)

    def read(file: Path) -> dict[str, object]:
        try:
            is_json = file.suffix == ".json"
            content = read_json(file) if is_json else read_formatted(file)
            if "model_type" in content or (is_json and not {"base", "moe_layer_ids"} & content.keys()):
                return describe_read(read_fields(content, name_of(file), stated))
            stated.update(content)
            return content if "base" in content else {"name": name_of(file)} | content
        except ModelError as error:
            raise ConfigError(f"{label_of(file)}: {error}") from error

    return read


def _at_path(draft: Draft, key: str, path: str, names: str) -> Path:
    """The file at a path that starts where it was written."""
    folder = draft.source((key,)).folder
    file = Path(os.path.abspath(folder / Path(path).expanduser()))
    if not file.is_file():
        raise ConfigError(
            f"{draft.place((key,))} is {path!r}; expected the path of a file from {label_of(folder)}, and there is "
            f"none at {label_of(file)}. Correct the path, or write the name of a file in {names}/."
        )
    return file


def _find(draft: Draft, key: str, name: str, folder: str, scenario: Path) -> Path:
    """The file that a name stands for: above the scenario, above the file that has the name, or shipped."""
    above = (*scenario.parents, *(draft.source((key,)).folder / "any").parents)
    places = [names for parent in above if (names := named_files(parent / folder))]
    own, ours = places[0] if places else {}, named_files(shipped() / folder)
    for names in (*places, ours):
        if name in names:
            return names[name]
    place = f"{draft.place((key,))} is {name!r}"
    last = name.rpartition("/")[2].lower()  # of a name at Hugging Face
    close = [near for said in (name, last) for near in difflib.get_close_matches(said, [*own, *ours], n=1)]
    guess = f"Did you mean {close[0]}? " if close else ""
    if own:
        there = label_of(next(iter(own.values())).parent)
        raise ConfigError(
            f"{place}; expected the name of a file in {there}, or of one that ships with jaxmoe. {guess}Write one of "
            f"{', '.join(dict.fromkeys((*own, *ours)))}; or add {there}/{name}.yaml."
        )
    raise ConfigError(
        f"{place}; expected the name of a file in a folder '{folder}' beside or above the scenario, and there is "
        f"none with YAML files, or of one that ships with jaxmoe. {guess}Write one of {', '.join(ours)}. "
        f"Make {folder}/{name}.yaml, or write its content in place of the name."
    )


def _anchor(draft: Draft, keys: tuple[str, ...]) -> None:
    """Make a path, or each of a list, absolute: it starts where it was written. What ships keeps its short name."""
    path = draft.get(*keys)
    source = draft.source(keys)
    if isinstance(path, str) and path:
        here = source.folder / Path(path).expanduser()
        # Of os.path, for which what cannot be a name, such as one that is too long, is not there.
        if os.path.exists(here) or not os.path.isfile(shipped_kernels(path)):
            draft.put(keys, str(here), source)
    if isinstance(path, list):
        each = [str(source.folder / Path(one).expanduser()) if isinstance(one, str) and one else one for one in path]
        draft.put(keys, each, source)
