"""`jaxmoe init`: a first scenario of one's own, with every key explained."""

from pathlib import Path

import typer

from jaxmoe.cli.session import Interrupts, OutputFolder, command_line
from jaxmoe.config import ConfigError, commented, new_scenario
from jaxmoe.files import atomic_write

SCENARIO = "scenario.yaml"


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    machine: str,
    model: str,
    trace: Path | None,
    system: str,
    batch_tokens: int | None,
) -> None:
    """Write the scenario. Raises `ConfigError` for what is not known, and where there is one already."""
    path = folder.path / SCENARIO
    if path.exists():
        raise ConfigError(f"--out: there is a scenario already, {path}. Give another folder, or remove it first.")
    name = f"{Path(model).stem}_{Path(machine).stem}"
    text = commented(new_scenario(name, machine, model, trace, system, batch_tokens))
    with atomic_write(folder.target(SCENARIO)) as aside:
        aside.write_text(f"# Written by {command_line.get()}\n\n{text}", encoding="utf-8")
    verb = "evaluate" if system == "static" else "simulate"
    typer.echo(f"{path} is ready; try: jaxmoe {verb} {path} --out {folder.path / 'results'}")
