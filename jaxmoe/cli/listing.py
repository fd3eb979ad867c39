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
        typer.echo(wrapped.fill(f"jaxmoe list KIND has a line for each: {', '.join(KINDS)}"))
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


STRATEGIES_SAY = {
    "tp": "every expert cut over all nodes, results added up along a ring one way",
    "tp_both_ways": "the same, both ways round",
    "ep_random": "whole experts, as many on every node, at random",
    "ep_balanced": "whole experts, the hottest first, each on the node that is done with it first",
    "ep": "as ep_balanced, but fewer experts than nodes are cut over equal parts of the nodes",
    "hybrid": "whole experts dealt by load to strategies.hybrid_regions groups of nodes, each cut over its group",
    "hybrid_ring": "the same, added up by rings inside the groups; what groups send each other is left out (hd_moe)",
    "hybrid_complete": "the same, by rings inside the groups and between them",
    "ep_runs": "whole experts in equal runs by number; where it is asked for",
}
METRICS_SAY = {
    "total": "time of a layer, mean over layers and batches",
    "p95": "time of a layer that 95 % of batches do not exceed",
    "dispatch": "time until tokens are where their experts are",
    "compute": "time of the slowest node's experts",
    "combine": "time until results are back and added up",
    "utilisation": "part of the time in which the mean node computes or waits for memory; more is better",
    "communication_share": "part of dispatch and combine in all stages",
    "busiest": "time of the resource that is busy longest; which one is in busiest_kind and busiest_index",
    "energy": "energy of a layer, of all that the machine states",
    "energy_per_token": "the same over tokens of a batch",
    "area": "area of the machine's dies",
    "price": "price of the machine",
    "bound": "time that no placement beats, by search",
    "tuned": "time of the best of the usual strategies and a short descent, by search",
}


def _strategies() -> Iterator[Line]:
    for name in registry.STRATEGIES:
        if name in STRATEGIES_SAY or name in registry.STRATEGIES.added:
            yield name, STRATEGIES_SAY.get(name) or _first_line(registry.STRATEGIES[name])
        else:
            yield example_of(name), "copies of every expert, one in each region of a mesh; cut, whole, or both inside"


def _metrics() -> Iterator[Line]:
    for name in dict.fromkeys((*registry.METRICS, *METRICS_SAY)):
        yield name, METRICS_SAY.get(name) or _first_line(registry.METRICS[name])


KINDS: dict[str, Callable[[], Iterator[Line]]] = {
    "machines": _machines,
    "models": _models,
    "scenarios": _scenarios,
    "strategies": _strategies,
    "exchanges": _exchanges,
    "systems": _systems,
    "metrics": _metrics,
    "formats": _formats,
}


def _said_of(value: str, part: type) -> str:
    """The words of a part's description about a value, up to the first sign."""
    found = re.search(rf"`{value}`: ([^.;:(+]+)", " ".join((inspect.getdoc(part) or "").split()))
    return value if found is None else found[1].strip()


def _first_line(part: object) -> str:
    return (inspect.getdoc(part) or "").partition("\n")[0]
