"""The verb `trace`: gathers its commands."""

import typer

from jaxmoe.cli.trace.compare import command as compare
from jaxmoe.cli.trace.convert import command as convert
from jaxmoe.cli.trace.fit import command as fit
from jaxmoe.cli.trace.stats import command as stats
from jaxmoe.cli.trace.synth import command as synth

app = typer.Typer(no_args_is_help=True, help="What traces and load counts tell, and how they compare.")
app.command("stats")(stats)
app.command("compare")(compare)
app.command("convert")(convert)
app.command("fit")(fit)
app.command("synth")(synth)
