"""`jaxmoe calibrate` with a folder of measured GPU kernels, and `jaxmoe calibrate predict`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.table import Table

from jaxmoe.cli.comparison_output import print_table, print_warnings
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder, command_line
from jaxmoe.config import HardwareConfig, commented, load_hardware, resolved
from jaxmoe.config.dies import FittedGemmConfig
from jaxmoe.config.files import find_kernels
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.calibration import KernelFit, calibrate_tables, kernel_file
from jaxmoe.experiment.measured_kernels.exchange_fit import ExchangeFit, exchange_file, exchange_scores, fit_exchanges
from jaxmoe.experiment.measured_kernels.exchange_tables import exchange_table, is_exchange
from jaxmoe.experiment.measured_kernels.prediction import predict, predict_exchanges
from jaxmoe.experiment.measured_kernels.scores import by_kernel, by_kind
from jaxmoe.experiment.measured_kernels.tables import (
    BACKENDS,
    read_columns,
    read_exchange_folder,
    read_folder,
    read_table,
    write_columns,
)
from jaxmoe.experiment.measured_kernels.transfer import transfer_tables
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.files import atomic_write, write_table
from jaxmoe.hardware.gpu.deepep import Links
from jaxmoe.hardware.gpu.deepep_files import beside, read_exchanges, write_exchanges
from jaxmoe.hardware.gpu.files import KernelFile, KnownKernel, at_sheet, read_kernels, write_kernels
from jaxmoe.hardware.gpu.sheet import SHEETS, sheet_of
from jaxmoe.report.scatter import plot_model_vs_simulation

KERNELS = "kernels.json"
DRAWN = 4000  # rows of a picture, evenly chosen
SHOWN = ("error", "median", "base", "roofline", "floor", "covered")


def calibrate_folder(
    folder: OutputFolder,
    interrupts: Interrupts,
    hardware: HardwareConfig,
    name: str,
    measured: Path,
    base: Path | None,
    seed: int,
) -> None:
    """Fit every kernel of a folder, and write kernels, machine, scores and a picture.

    With the machine `base`, its kernels are moved by few of the rows instead.
    """
    system = measured.resolve().name
    if system not in SHEETS:
        raise OptionError(f"--measured {measured}: the folder is named {system}, expected one of {', '.join(SHEETS)}")
    sheet = sheet_of(system)
    known = None if base is None else at_sheet(_kernels_of(_gemm_of(base)), system)
    folder.check(KERNELS)
    with StageTimer() as clock:
        with clock.stage("read"):
            tables = read_folder(measured)
            exchanged = read_exchange_folder(measured)
        with clock.stage("fit"), progress_bars(interrupts.check) as report:
            fits = (
                calibrate_tables(tables, sheet, seed, report)
                if known is None
                else transfer_tables(tables, known, report)
            )
            exchanges = fit_exchanges(exchanged, system)
        file = kernel_file(system, fits, _kept(hardware, system, fits)) if fits else _own_kernels(hardware, measured)
        with atomic_write(folder.target(KERNELS)) as aside:
            write_kernels(aside, file)
        if exchanges:
            keep_exchanges(folder, system, exchanges)
        machine = _with_kernels(hardware, fits, file)
        with atomic_write(folder.target("machine.yaml")) as aside:
            aside.write_text(f"# Written by {command_line.get()}\n\n{commented(machine)}", encoding="utf-8")
        if fits:
            write_table(folder.target("kernels.csv"), list(by_kernel(fits)))
            _draw(folder, fits, name)
        kinds = list(by_kind(fits))
        summary = {"command": "calibrate", **surroundings(), "hardware": resolved(machine), "seed": seed}
        folder.write_json("summary.json", summary | {"source": file.source, "errors": kinds, "wall_s": clock.report()})
    _print(kinds, name)
    print_exchanges(exchanges, name)
    print_warnings(_odd(fits))


def _own_kernels(hardware: HardwareConfig, measured: Path) -> KernelFile:
    """The kernels that a machine has, where the folder has exchanges alone."""
    gemm = None if hardware.die is None else hardware.die.gemm
    if not isinstance(gemm, FittedGemmConfig):
        raise OptionError(f"{measured}: has exchanges alone, and the machine no fitted kernels; add tables of kernels")
    return read_kernels(find_kernels(gemm.path))


def _kept(hardware: HardwareConfig, system: str, fits: Sequence[KernelFit]) -> tuple[KnownKernel, ...]:
    """Kernels that the machine has of this GPU, of kinds that the folder has none of."""
    gemm = None if hardware.die is None else hardware.die.gemm
    own = _kernels_of(gemm) if isinstance(gemm, FittedGemmConfig) else None
    if own is None or own.system != system:
        return ()
    measured = {fit.kind.name for fit in fits}
    return tuple(kernel for kernel in own.kernels if kernel.kind not in measured)


def _with_kernels(hardware: HardwareConfig, fits: Sequence[KernelFit], file: KernelFile) -> HardwareConfig:
    """The machine with the fused MoE kernel that was measured most, or with its own where none was."""
    fused = [fit for fit in fits if fit.kind.name == "moe" and fit.kernel["framework"] in BACKENDS[:3]]
    if hardware.die is None:
        return hardware
    gemm = hardware.die.gemm
    if fused:
        names = max(fused, key=lambda fit: len(fit.measured)).kernel
        told = {"backend": names["framework"], "precision": names["moe_dtype"], "kernel": names["kernel_source"]}
        gemm = FittedGemmConfig.model_validate({"kind": "fitted", "path": KERNELS, **told})
    elif isinstance(gemm, FittedGemmConfig) and any(kernel.kind == "moe" for kernel in file.kernels):
        gemm = gemm.model_copy(update={"path": KERNELS})
    return hardware.model_copy(update={"die": hardware.die.model_copy(update={"gemm": gemm})})


def _odd(fits: Iterable[KernelFit]) -> list[str]:
    """Oddities in the rows of kernels, a line each."""
    notes = []
    for fit in fits:
        name = f"{fit.kind.name} {' '.join(filter(None, fit.kernel.values()))}"
        if fit.kernel.get("framework", "") not in BACKENDS:
            notes.append(f"{name}: the backend is none of {', '.join(filter(None, BACKENDS))}")
        if fit.slow.any():
            part = 100 * fit.slow.mean()
            notes.append(f"{name}: {fit.slow.sum()} rows ({part:.0f} %) are of series that are slow by a factor")
        if fit.repeated.any():
            notes.append(f"{name}: {fit.repeated.sum()} rows repeat the inputs of one before")
        if not fit.of_shapes and fit.kind.shape != (fit.kind.size,):
            notes.append(f"{name}: measured at too few shapes to tell its error on others")
    return notes


def _draw(folder: OutputFolder, fits: Sequence[KernelFit], name: str) -> None:
    measured, told = (np.concatenate([getattr(fit, key) for fit in fits]) for key in ("measured", "held_out"))
    kinds = np.array([fit.kind.name for fit in fits for _ in fit.measured])
    known = np.flatnonzero(np.isfinite(told))
    known = known[np.linspace(0, len(known) - 1, min(DRAWN, len(known))).astype(int)] if len(known) else known
    if not len(known):
        return
    plot_model_vs_simulation(
        folder.target("calibration.png"),
        measured[known],
        told[known],
        kinds[known].tolist(),
        f"{name}: measured times of held-out rows and what the model says",
        labels=("measured time", "time by the model"),
    )


def _print(rows: Sequence[Mapping[str, object]], name: str) -> None:
    table = Table(title=f"{name}: off on rows that were held out, %")
    for heading in ("kind", "backend", "rows", *SHOWN):
        table.add_column(heading, justify="left" if heading in ("kind", "backend") else "right")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("kind", "backend", "held_out", *SHOWN)))
    print_table(table)


def _gemm_of(config: Path) -> FittedGemmConfig:
    """The section of a machine that names its fitted kernels."""
    hardware = load_hardware(config)
    gemm = None if hardware.die is None else hardware.die.gemm
    if not isinstance(gemm, FittedGemmConfig):
        raise OptionError(f"{config}: has no fitted kernels at die.gemm; calibrate it with --measured FOLDER")
    return gemm


def _kernels_of(gemm: FittedGemmConfig) -> KernelFile:
    return at_sheet(read_kernels(find_kernels(gemm.path)), gemm.sheet)


def run_predict(config: Path, table: Path, out: Path) -> None:
    """Write the rows of a table with their predicted times."""
    gemm, columns = _gemm_of(config), read_columns(table)
    if is_exchange(columns):
        run_predict_exchanges(find_kernels(str(beside(Path(gemm.path)))), _kernels_of(gemm), table, columns, out)
        return
    rows = read_table(table, timed=False)
    found = predict(rows, _kernels_of(gemm))
    unit = rows.kind.unit
    told = {"latency": found.seconds, "low": found.lower, "high": found.upper}
    write_columns(out, {**rows.given, **{f"predicted_{name}": part / unit for name, part in told.items()}})
    print_warnings(found.notes)


def keep_exchanges(folder: OutputFolder, system: str, fits: Sequence[ExchangeFit]) -> None:
    """Write fitted exchanges of DeepEP and their scores."""
    with atomic_write(folder.target(beside(Path("kernels.json")).name)) as aside:
        write_exchanges(aside, exchange_file(system, fits))
    write_table(folder.target("exchanges.csv"), list(exchange_scores(fits)))


def print_exchanges(fits: Sequence[ExchangeFit], name: str) -> None:
    """Their errors as a table, where there are any."""
    if not fits:
        return
    table = Table(title=f"{name}: DeepEP, off on rows that were held out, %")
    rows = list(exchange_scores(fits))
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*map(str, row.values()))
    print_table(table)


def run_predict_exchanges(
    exchanges: Path, kernels: KernelFile, path: Path, columns: Mapping[str, np.ndarray], out: Path
) -> None:
    """Write the rows of a table with their predicted times, over the links of the GPU that the kernels are of."""
    table = exchange_table(path, columns, timed=False)
    sheet = kernels.sheet
    file = replace(
        read_exchanges(exchanges),
        system=kernels.system,
        links=Links(float(sheet.link)),
        processors=int(sheet.processors),
        node=sheet.node,
    )
    found, notes = predict_exchanges(table, file)
    write_columns(out, {**table.given, **found})
    print_warnings(notes)
