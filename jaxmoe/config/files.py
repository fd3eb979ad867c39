"""Files of configuration: YAML as plain data, with numbers such as 5e9; the base of a file; shipped files."""

import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from jaxmoe.config.base import ConfigError
from jaxmoe.config.explain import ConfigSource, Draft

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
        return deepcopy(_parsed(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{label}, line {mark.line + 1}, column {mark.column + 1}" if mark else label
        what = error.problem or error.context
        raise ConfigError(f"{where}: not valid YAML: {what}. Correct the text there.") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{label}: not valid YAML: {error}. Correct the text.") from error
    except (KeyError, IndexError, AttributeError, TypeError) as error:  # as the loader takes what it cannot convert
        raise ConfigError(f"{label}: not valid YAML: a value does not fit its tag. Leave out tags with !!.") from error


@lru_cache(maxsize=128)  # sweeps read the same few files at every layout
def _parsed(text: str) -> object:
    data = yaml.load(text, Loader=_Loader)  # _Loader is a SafeLoader
    if _values(data, {}) > MOST_VALUES:
        raise ValueError(f"aliases make it more than {MOST_VALUES} values")
    return data


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


FORMAT = 2  # of YAML files that this version writes; it reads those of all formats up to this one


def read_formatted(path: Path) -> dict[str, object]:
    """The mapping in a YAML file, as the present format has it. Its key `format` says which format it is of.

    Until format 2 a link of a mesh was one way. A file without `format` is of the present one, but where that matters
    it has to say so.
    """
    data = read_mapping(path)
    stated = data.pop("format", None)
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int) or not 1 <= stated <= FORMAT):
        newer = isinstance(stated, int) and stated > FORMAT
        remedy = "Install a newer jaxmoe, or write" if newer else "Write"
        raise ConfigError(
            f"{label_of(path)}: format is {stated!r}; expected {FORMAT}, the newest that this jaxmoe reads. "
            f"{remedy} format: {FORMAT} and the keys of that format."
        )
    for where, link in undecided_links(data):
        if stated is None:
            raise ConfigError(
                f"{label_of(path)}: format is missing, and {where} has no one_way; expected a format, for such a link "
                f"is both ways since format 2 and was one way before. Write format: {FORMAT}, or format: 1 in a file "
                "of before."
            )
        if stated == 1:
            link["one_way"] = True
    return data


def undecided_links(data: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Links of a mesh from node [x, y] to another that do not say whether they are one way, and where they stand."""
    for above, machine in (("", data), ("hardware.", data.get("hardware"))):
        links = machine.get("links") if isinstance(machine, dict) else None
        for index, link in enumerate(links if isinstance(links, list) else ()):
            if isinstance(link, dict) and isinstance(link.get("from"), list) and "one_way" not in link:
                yield f"{above}links.{index}", link


def label_of(path: Path) -> str:
    """An absolute path as a user would write it: from the working folder where it lies inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _nearby(path: Path) -> str:
    names = sorted(file.name for file in path.parent.glob("*.yaml"))
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]}?"
    there = f"YAML files there: {', '.join(names) or 'none'}."
    if not path.parent.is_dir():
        there = f"There is no folder {label_of(path.parent)} either; check the path."
    if path.suffix:
        return there
    ours, typed = [*shipped_names("scenarios"), *shipped_names("hardware")], label_of(path)
    near = [name for name in ours if name.startswith(typed)] or difflib.get_close_matches(typed, ours, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    if typed in ours:
        guess = f"The {typed} that ships is of another kind: give the path of a file. "
    return f"{guess}{there} What ships is named by jaxmoe list scenarios and jaxmoe list machines."


# A file may be another one, its base, with some keys of its own.


def put_file(
    draft: Draft, at: tuple[str, ...], path: Path, read: Callable[[Path], dict[str, object]] = read_formatted
) -> None:
    """Puts the content of a file at a key path, that of its base under it.

    Mappings are merged key by key, and anything else is replaced. Every part keeps the file that has it as its source.
    A part without a name has that of the file.
    """
    chain = [*_bases(path, read)]
    for file, content in reversed(chain):
        _merge(draft, at, content, ConfigSource(label_of(file), file.parent, depth=len(at)))
    named = {"name": path.stem} | {key: value for key, value in chain[0][1].items() if key == "name"}
    _merge(draft, at, named, draft.source(at))


def _bases(path: Path, read: Callable[[Path], dict[str, object]]) -> Iterator[tuple[Path, dict[str, object]]]:
    """The file, its base, the base of that and so on, with what each has itself."""
    seen = [path]
    while True:
        content = dict(read(path))
        base = content.pop("base", None)
        yield path, content
        if base is None:
            return
        place = f"{label_of(path)}: base is {base!r}"
        if not isinstance(base, str) or not base:
            raise ConfigError(f"{place}; expected the path of a file from {label_of(path.parent)}. Correct it.")
        path = _base_of(path, base)
        if path in seen:
            circle = " -> ".join(label_of(file) for file in (*seen[seen.index(path) :], path))
            raise ConfigError(f"{place}; but files cannot be their own base: {circle}. Leave one of the bases out.")
        if not os.path.isfile(path):  # unlike the method, no error for a name that is too long
            ours = shipped_by_name(Path(base).stem)
            named = f"Write base: {Path(base).stem} for the one that ships with jaxmoe." if ours else _nearby(path)
            raise ConfigError(f"{place}; there is no file {label_of(path)}. {named}")
        seen.append(path)


def _base_of(path: Path, base: str) -> Path:
    """The file that a base stands for: a path from the folder of the file that has it, or a name there or shipped."""
    at = Path(os.path.abspath(path.parent / Path(base).expanduser()))
    named = (at, at.with_name(f"{at.name}.yaml"))
    own = next((file for file in named if os.path.isfile(file) and file != path), None)
    return own or shipped_by_name(base) or at


def _merge(draft: Draft, at: tuple[str, ...], content: dict[str, object], source: ConfigSource) -> None:
    """Puts a mapping over that at a key path. What lacks a key is from then on the mapping of this source."""
    known = draft.get(*at) if at else draft.data
    known = known if isinstance(known, dict) else {}
    if at:
        written = {key: draft.source((*at, key)) for key in known}
        draft.put(at, {}, source)
        for key, value in known.items():
            draft.put((*at, key), value, written[key])
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(known.get(key), dict):
            _merge(draft, (*at, key), value, source)
        else:
            draft.put((*at, key), value, source)


# Files that ship with the package are found by name, wherever it is installed.


def shipped() -> Path:
    """The folder of the shipped files: inside of the installed package, or beside it in the source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "_configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_kernels(path: str) -> Path:
    """A file of fitted kernels, or the shipped one of its name where there is none at the path."""
    given, own = Path(path), shipped_kernels(path)
    return own if not os.path.exists(given) and os.path.isfile(own) else given


def shipped_kernels(path: str) -> Path:
    """Where the shipped file of fitted kernels of this name is, if there is one."""
    return shipped() / "hardware" / "kernels" / Path(path).name


def named_files(folder: Path) -> dict[str, Path]:
    """The YAML files of a folder by name."""
    return {file.name.removesuffix(".yaml"): file for file in sorted(folder.glob("*.yaml"))}


def shipped_names(folder: str) -> dict[str, Path]:
    """The shipped files of a folder by the names that find them, such as `hd_moe/mixtral-8x7b_4x4_5TFLOPs_50GBps`."""
    top = shipped() / folder
    return {file.relative_to(top).as_posix().removesuffix(".yaml"): file for file in sorted(top.rglob("*.yaml"))}


def shipped_by_name(name: str) -> Path | None:
    """The shipped machine, model, workload or scenario of this name; `None` where there is none."""
    places = (shipped() / folder / f"{name}.yaml" for folder in ("hardware", "models", "scenarios", "workloads"))
    return next((place for place in places if os.path.isfile(place)), None)


def comment_of(path: Path) -> str:
    """The first sentence of the comment that a file begins with, empty without one."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return re.split(r"(?<!Fig\.)(?<=\.) ", " ".join(line.lstrip("# ") for line in lines))[0]


def read_with_base(path: Path) -> dict[str, object]:
    """The content of a file merged with its base, before anything is checked or names in it are followed."""
    draft = Draft({}, ConfigSource(label_of(path), path.parent))
    put_file(draft, (), path)
    return draft.data


def find_file(path: str | Path, folder: str) -> Path:
    """The absolute path of a file, or of the shipped file in `folder` that a name such as `dojo_5x5` stands for.

    The path has no `..`, so that its parents are the folders above it.
    """
    found = Path(os.path.abspath(path))
    by_name = shipped() / folder / f"{path}.yaml"
    is_name = not found.exists() and not Path(path).is_absolute() and Path(path).suffix not in (".yaml", ".yml")
    return by_name if is_name and os.path.isfile(by_name) else found
