"""The application: gathers the verbs."""

from importlib.metadata import version
from typing import Annotated

import typer

from jaxmoe.cli.evaluate import command as evaluate
from jaxmoe.cli.network import command as network
from jaxmoe.cli.simulate import command as simulate
from jaxmoe.cli.trace.app import app as trace
from jaxmoe.cli.tune import command as tune
from jaxmoe.cli.validate import command as validate

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="How long Mixture-of-Experts layers take on meshes of chips, and where their experts should live.",
)
app.command("tune")(tune)
app.command("evaluate")(evaluate)
app.command("validate")(validate)
app.command("simulate")(simulate)
app.command("network")(network)
app.add_typer(trace, name="trace")


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"jaxmoe {version('jaxmoe')}")
        raise typer.Exit()
    return wanted


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Global options."""
