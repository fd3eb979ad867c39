"""`jaxmoe calibrate`: numbers of a machine from measurements, with how well each is known."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.calibrate_kernels import calibrate_folder
from jaxmoe.cli.comparison_output import print_table, print_warnings
from jaxmoe.cli.session import Interrupts, OutputFolder, command_line
from jaxmoe.config import commented, load_hardware, resolved
from jaxmoe.experiment.calibration import Calibration, FittedNumber, calibrate, fitted_keys
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measurements import read_measured
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.files import atomic_write
from jaxmoe.report.scatter import plot_model_vs_simulation


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    measured: list[Path],
    fit: str | None,
    base: Path | None,
    overrides: list[str] | None,
    seed: int,
) -> None:
    """Fit a machine's numbers, and write it with them."""
    folders = [path for path in measured if path.is_dir()]
    if folders:
        if len(measured) > 1 or fit is not None:
            raise OptionError(f"--measured {folders[0]}: a folder of kernels stands alone, without --fit; leave it out")
        hardware = load_hardware(config, overrides or ())
        calibrate_folder(folder, interrupts, hardware, config.stem, folders[0], base, seed)
        return
    if base is not None:
        raise OptionError(
            "--base: moves measured kernels, of which there is no folder; give one with --measured FOLDER"
        )
    with StageTimer() as clock:
        hardware = load_hardware(config, overrides or ())
        samples = [read_measured(path, hardware) for path in measured]
        twice = {each.kind for each in samples if [other.kind for other in samples].count(each.kind) > 1}
        if twice:
            raise OptionError(f"--measured: two files have measurements of {', '.join(sorted(twice))}; join them")
        keys = fitted_keys(hardware) if fit is None else [key.strip() for key in fit.split(",")]
        with clock.stage("fit"):
            found = calibrate(hardware, keys, samples, seed)
        with clock.stage("draw"):
            _draw(folder, found, config.stem)
        with atomic_write(folder.target("machine.yaml")) as aside:
            aside.write_text(f"# Written by {command_line.get()}\n\n{commented(found.hardware)}", encoding="utf-8")
        summary = {"command": "calibrate", **surroundings(), "hardware": resolved(found.hardware), "seed": seed}
        summary |= {"numbers": [_number(each) for each in found.numbers], "errors": _errors(found)}
        summary |= {"all_to_all_over_model": found.crowding._asdict()}
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        _print(found, config.stem)


def _number(number: FittedNumber) -> dict[str, object]:
    error = number.error if np.isfinite(number.error) else None
    told = {"key": number.key, "before": number.before, "after": number.after, "relative_error": error}
    return told | {"known": number.known, "cannot_be_told_from": list(number.alike)}


def _errors(found: Calibration) -> dict[str, dict[str, dict[str, float]]]:
    """Mean relative errors by kind: of the description and of the fit, on what was seen and on what was held out."""
    return {
        name: {"seen": found.errors(of, False), "held_out": found.errors(of, True)}
        for name, of in (("before", found.before), ("after", found.after))
    }


def _draw(folder: OutputFolder, found: Calibration, name: str) -> None:
    kinds = [each.kind for each in found.measured for _ in range(len(each))]
    seconds = np.concatenate([each.seconds for each in found.measured])
    plot_model_vs_simulation(
        folder.target("calibration.png"),
        seconds,
        np.concatenate(found.after),
        kinds,
        f"{name}, calibrated: measured times and what the model says",
        "\n".join(
            f"{kind}: {100 * error:.2g} % off, held out" for kind, error in found.errors(found.after, True).items()
        ),
        labels=("measured time", "time by the model"),
    )


def _print(found: Calibration, name: str) -> None:
    table = Table(title=escape(f"{name}: fitted numbers"))
    for heading in ("key", "before", "fitted", "standard error"):
        table.add_column(heading, justify="left" if heading == "key" else "right")
    for number in found.numbers:
        told = f"{100 * number.error:.2g} %" if number.known else "not known"
        table.add_row(number.key, f"{number.before:.5g}", f"{number.after:.5g}", told)
    print_table(table)
    errors = Table(title="mean error of the model")
    for heading in ("measured", "before", "fitted", "held out"):
        errors.add_column(heading, justify="left" if heading == "measured" else "right")
    before, seen, kept = (
        found.errors(of, held_out)
        for of, held_out in ((found.before, False), (found.after, False), (found.after, True))
    )
    for kind in seen:
        errors.add_row(kind, *(_percent(part, kind) for part in (before, seen, kept)))
    print_table(errors)
    print_warnings(_unknown(number) for number in found.numbers if not number.known)
    if "all_to_all" in seen:
        print_warnings(
            [
                f"all-to-alls keep links busy for {found.crowding.load:.3f} times what their loads explain, and "
                f"{found.crowding.path:.2f} of the longest path's delay counts; the errors have both in, "
                "machine.yaml has neither"
            ]
        )


def _percent(errors: Mapping[str, float], kind: str) -> str:
    return f"{100 * errors[kind]:.2f} %" if kind in errors else "-"


def _unknown(number: FittedNumber) -> str:
    if number.alike:
        return f"{number.key} cannot be told from {', '.join(number.alike)}; fix one of them by leaving it out of --fit"
    if np.isinf(number.error):
        return f"{number.key}: nothing measured depends on it, so it stays as it was"
    return f"{number.key}: {100 * number.error:.0f} % standard error; what was measured hardly depends on it"
