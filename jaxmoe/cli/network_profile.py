"""`jaxmoe network profile`: alpha and beta of every pair of nodes, from a simulated network or a table of timings."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.markup import escape
from rich.table import Table

from jaxmoe.cli.comparison_output import print_table, print_warnings
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import build_topology, load_hardware, resolved
from jaxmoe.des import fabric_of
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.profile_fit import Measure, Profiled, Timings, fit_profile, profile_network
from jaxmoe.experiment.profiling import by_simulator, disturbed, read_timings, write_profile, write_timings
from jaxmoe.experiment.stage_timer import Report, StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.network.pairwise import STAGES, Profile
from jaxmoe.report.scatter import plot_fits

SHOWN_ROWS = 24
SMALLEST, LARGEST, COUNT = 1e3, 64e6, 24  # B, and how many sizes


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    overrides: list[str] | None,
    sizes: str | None,
    noise: float,
    outliers: float,
    seed: int,
) -> None:
    """Fit alpha and beta of every pair, phase by phase (camoe Algorithm 1)."""
    with StageTimer() as clock:
        if config.suffix.lower() == ".csv":
            given = {"--set": overrides, "--sizes": sizes, "--noise": noise, "--outliers": outliers}
            if refused := [option for option, value in given.items() if value]:
                raise OptionError(f"{', '.join(refused)} is for simulated times; leave it out for a table of timings")
            with clock.stage("fit"):
                alone = read_timings(config)
                baseline = fit_profile(alone)
            profile = baseline
            about: dict[str, Any] = {"timings": str(config)}
        else:
            hardware = load_hardware(config, overrides or ())
            router, topology = hardware.router, build_topology(hardware)
            chunk = None if router.chunk_B is None else float(router.chunk_B)
            measure = by_simulator(fabric_of(topology, chunk, router.cuts_through))
            if noise > 0 or outliers > 0:
                measure = disturbed(measure, noise, outliers, seed)
            with clock.stage("simulate"), progress_bars(interrupts.check) as report:
                found = _profiled(topology.num_nodes, _sizes(sizes), measure, report)
            alone, baseline, profile = found.alone, found.baseline, found.refined
            about = {"hardware": resolved(hardware), "noise": noise, "outliers": outliers, "seed": seed}
            about |= {"contended_samples": len(found.contended)}
        with clock.stage("draw"):
            plot_fits(folder.target("fits.png"), _panels(alone, baseline), f"{config.stem}: measured and fitted")
        write_profile(folder.target("profile.csv"), profile)
        write_timings(folder.target("timings.csv"), alone)
        summary = {"command": "network profile", **surroundings(), **about, "samples": len(alone)}
        summary |= {"pairs": _report(profile), "wall_s": clock.report()}
        folder.write_json("summary.json", summary)
        _print(profile, config.stem)
        print_warnings(profile.warnings())


def _profiled(nodes: int, sizes: list[float], measure: Measure, report: Report) -> Profiled:
    """Both phases of the algorithm, reported measurement by measurement."""
    total = len(sizes) * (len(STAGES) * nodes * (nodes - 1) + 2 * nodes)
    done = count(1)

    def told(phase: str, traffic: Float[np.ndarray, "node node2"]) -> float:
        report("measure", next(done), total)
        return measure(phase, traffic)

    return profile_network(nodes, sizes, told)


def _sizes(text: str | None) -> list[float]:
    """Bytes of messages, as given or spread evenly over five orders of magnitude."""
    if text is None:
        return np.geomspace(SMALLEST, LARGEST, COUNT).tolist()
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--sizes is {text!r}, expected bytes such as 1e4,1e6,1e8") from None
    if not all(0 < size < np.inf for size in sizes):
        raise OptionError(f"--sizes is {text!r}, expected finite bytes above 0")
    return sizes


def _pairs(profile: Profile) -> list[tuple[int, int, int]]:
    pairs = np.argwhere(~np.eye(profile.num_nodes, dtype=bool)).tolist()
    return [(row, source, destination) for row in range(len(STAGES)) for source, destination in pairs]


def _report(profile: Profile) -> list[dict[str, Any]]:
    """Every pair; an error is null where there are too few samples to tell it."""

    def known(error: float) -> float | None:
        return float(error) if np.isfinite(error) else None

    return [
        {
            "phase": STAGES[at[0]],
            "source": at[1],
            "destination": at[2],
            "alpha_s": float(profile.alpha[at]),
            "alpha_error_s": known(profile.alpha_error[at]),
            "beta_s_per_B": float(profile.beta[at]),
            "beta_error_s_per_B": known(profile.beta_error[at]),
            "samples": int(profile.samples[at]),
        }
        for at in _pairs(profile)
    ]


def _print(profile: Profile, title: str) -> None:
    """The pairs whose bytes take longest."""
    order = sorted(_pairs(profile), key=lambda at: -profile.beta[at])
    left = len(order) - SHOWN_ROWS
    caption = f"and {left} more, which take less time a byte; profile.csv has them all" if left > 0 else None
    table = Table(title=escape(f"{title}: alpha and beta"), caption=caption)
    for heading in ("phase", "from, to", "alpha\nus", "standard\nerror", "beta\nns/B", "standard\nerror", "GB/s"):
        table.add_column(heading, justify="right")
    for at in order[:SHOWN_ROWS]:
        alpha, beta = 1e6 * profile.alpha[at], 1e9 * profile.beta[at]
        errors = 1e6 * profile.alpha_error[at], 1e9 * profile.beta_error[at]
        rate = f"{1 / beta:.4g}" if beta > 0 else "-"
        cells = (f"{alpha:.4g}", f"{errors[0]:.2g}", f"{beta:.4g}", f"{errors[1]:.2g}", rate)
        table.add_row(STAGES[at[0]], f"{at[1]}, {at[2]}", *cells)
    print_table(table)


def _panels(timings: Timings, profile: Profile) -> dict[str, tuple[np.ndarray, np.ndarray, float, float]]:
    """Of dispatch and of combine, the pair whose bytes take longest and the one of the shortest (camoe Fig. 6)."""
    panels = {}
    for phase in ("dispatch", "combine"):
        row = STAGES.index(phase)
        pairs = [at for at in _pairs(profile) if at[0] == row]
        for at in (max(pairs, key=lambda at: profile.beta[at]), min(pairs, key=lambda at: profile.beta[at])):
            chosen = (timings.phase == row) & (timings.source == at[1]) & (timings.destination == at[2])
            name = f"{phase} {at[1]} to {at[2]}"
            line = float(profile.alpha[at]), float(profile.beta[at])
            panels[name] = (timings.bytes[chosen], timings.seconds[chosen], *line)
    return panels
