"""`jaxmoe list`: names of all parts that can be named, those of installed packages included."""

import textwrap

import typer

from jaxmoe import registry
from jaxmoe.methods.settings import METHODS
from jaxmoe.registry import Registry

WIDTH = 120


def run() -> None:
    """Print the names of parts, kind by kind. Raises `PartError` where two parts have one name."""
    registries = [METHODS, *(each for each in vars(registry).values() if isinstance(each, Registry))]
    for each in sorted(registries, key=lambda one: one.kind):
        typer.echo("\n".join(textwrap.wrap(f"{each.kind}: {each.shown()}", WIDTH, subsequent_indent="  ")))
