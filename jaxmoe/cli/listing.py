"""`jaxmoe list`: what can be named, in a word each, or a kind of it with a line for each."""

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator

import typer

from jaxmoe import registry
from jaxmoe.config import ConfigError, load_hardware, load_model
from jaxmoe.config.files import comment_of, read_with_base, shipped_names
from jaxmoe.methods.settings import METHODS, STATEMENTS
from jaxmoe.placement.exchange import EXCHANGES, Gather, Registered, exchange_of
from jaxmoe.registry import ENGINES, LOADS, TRACES, Registry, example_of

WIDTH = 120  # of the list of parts, where neither a terminal nor COLUMNS says
INDENT = 4  # of the further lines of one that a terminal is too narrow for

Line = tuple[str, str]
"""A name, and what it stands for."""


def run(kind: str | None) -> None:
    """Print every part by kind, or the lines of one kind, as wide as the terminal. What is piped has a line for each.

    Raises `ConfigError` for an unknown kind.
    """
    columns = shutil.get_terminal_size((WIDTH, 0)).columns
    wrapped = textwrap.TextWrapper(columns, subsequent_indent=" " * INDENT, break_on_hyphens=False)
    if kind is None:
        for name, parts in _every():
            typer.echo(wrapped.fill(f"{name}: {parts}"))
        typer.echo(f"A line for each: jaxmoe list {'|'.join(KINDS)}")
        return
    if kind not in KINDS:
        raise ConfigError(f"KIND is {kind!r}, expected one of {', '.join(KINDS)}. Write one of them, or leave it out.")
    lines = [*KINDS[kind]()]
    width = max(len(name) for name, _ in lines)
    for name, about in lines:
        line = f"{name:{width}}  {about}".rstrip()
        typer.echo(wrapped.fill(line) if sys.stdout.isatty() else line)


def _every() -> Iterator[Line]:
    registries = [METHODS, *(each for each in vars(registry).values() if isinstance(each, Registry)), EXCHANGES]
    named = {each.kind: each.shown() for each in registries}
    named |= {kind: ", ".join(shipped_names(folder)) for kind, folder in FOLDERS.items()}
    yield from sorted(named.items())


FOLDERS = {"machine": "hardware", "model": "models", "scenario": "scenarios"}


def _machines() -> Iterator[Line]:
    for name, file in shipped_names("hardware").items():
        machine = load_hardware(file)
        yield name, f"{machine.kind}, {machine.num_nodes} nodes. {comment_of(file)}"


def _models() -> Iterator[Line]:
    for name, file in shipped_names("models").items():
        model = load_model(str(file), "list")
        layers = len(model.moe_layer_ids.ids)
        yield name, f"{layers} layers of {model.num_experts} experts, {model.top_k} a token. {comment_of(file)}"


def _scenarios() -> Iterator[Line]:
    """The command that suits each, its model and machine, and where it is from."""
    for name, file in shipped_names("scenarios").items():
        told = read_with_base(file)
        system = told.get("system")
        runs = f"simulate: {system['name']}" if isinstance(system, dict) else "tune, evaluate"
        runs = "serve, evaluate --phase" if "serving" in told else f"{runs} --phase" if "deployment" in told else runs
        yield name, f"{runs}; {told['model']} on {told['hardware']}. {comment_of(file)}".rstrip()


def _systems() -> Iterator[Line]:
    for name in METHODS:
        yield name, _first_line(STATEMENTS[name] if name in STATEMENTS else METHODS[name])


def _exchanges() -> Iterator[Line]:
    for name in EXCHANGES:
        shown = example_of(name)
        described = exchange_of(shown)
        if isinstance(described, Registered):
            yield shown, _first_line(EXCHANGES[name])
            continue
        about = _first_line(type(described)).removesuffix(".")
        if isinstance(described, Gather):
            about += f", {_said_of(described.home, Gather)}; {_said_of(described.route, Gather)}"
        yield shown, about + "; has to know the batch" * (getattr(described, "knows", "nothing") == "batch")


def _formats() -> Iterator[Line]:
    for name in dict.fromkeys((*TRACES, *LOADS)):
        kinds = " and ".join(kind for kind, parts in (("trace", TRACES), ("loads", LOADS)) if name in parts)
        part = TRACES[name] if name in TRACES else LOADS[name]
        yield name, f"{kinds}: {_first_line(sys.modules[part.read.__module__])}"
    for name in ENGINES:
        yield name, f"placement: {ENGINES[name].suffix}"
    yield "plan", "placement: .npz, jaxmoe's own"


KINDS: dict[str, Callable[[], Iterator[Line]]] = {
    "machines": _machines,
    "models": _models,
    "scenarios": _scenarios,
    "exchanges": _exchanges,
    "systems": _systems,
    "formats": _formats,
}


def _said_of(value: str, part: type) -> str:
    """The words of a part's description about a value, up to the first sign."""
    found = re.search(rf"`{value}`: ([^.;:(+]+)", " ".join((inspect.getdoc(part) or "").split()))
    return value if found is None else found[1].strip()


def _first_line(part: object) -> str:
    return (inspect.getdoc(part) or "").partition("\n")[0]
