"""`jaxmoe trace fit` and `synth`: a generator of traces like a recorded one, its fidelity, and traces drawn."""

from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

from jaxmoe.cli.comparison_output import new_table, print_table
from jaxmoe.cli.progress import messages, progress_bars
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.experiment.inputs import OptionError, hints_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.report import plot_trace_comparison
from jaxmoe.traces import read_trace
from jaxmoe.traces.formats.npz import write_trace_in_parts
from jaxmoe.traces.synthesis import (
    PRESETS,
    GatingProcess,
    facts_of,
    fit_process,
    fitted_part,
    preset_process,
    read_process,
    sample_parts,
    sample_trace,
    write_process,
    zipf_trace,
)
from jaxmoe.traces.synthesis.fidelity import TOLERANCES, Fidelity, fidelity_of
from jaxmoe.units import GIGA

# Far from the seeds that fitting draws with: what is shown is a trace that it has not seen.
SHOWN_SEED = 1_000_000


def fit(
    folder: OutputFolder,
    interrupts: Interrupts,
    file: Path,
    model: str | None,
    seed: int,
) -> None:
    """Fit a generator to a trace, write it as process.npz, and compare a trace of it with the recorded one."""
    with StageTimer() as clock:
        with clock.stage("load"):
            trace = read_trace(file, hints=hints_of(model))
        with progress_bars(interrupts.check) as report:
            with clock.stage("fit"):
                process = fit_process(trace, seed, report)
            with clock.stage("compare"):
                part = fitted_part(trace)
                drawn = sample_trace(process, part.num_tokens, seed + SHOWN_SEED, partial(report, "draw"))
                traces = {"recorded": part, "synthetic": drawn, "zipf": zipf_trace(part, seed)}
                found = fidelity_of(traces, seed, partial(report, "compare"))
        with clock.stage("draw"):
            names = [name for name in TOLERANCES if name in found["recorded"].figures]
            values = {trace: [one.figures[name] for name in names] for trace, one in found.items()}
            title = f"{file.stem}: recorded, drawn from the fit, and Zipf alone"
            plot_trace_comparison(folder.target("fidelity.png"), names, values, title)
        write_process(folder.target("process.npz"), process)
        summary = {
            "command": "trace fit",
            "seed": seed,
            **surroundings(),
            "trace": {
                "path": str(file),
                "tokens": trace.num_tokens,
                "fitted_tokens": part.num_tokens,
                "facts": trace.facts,
            },
            "process": {
                "layers": len(process.layer_ids),
                "num_experts": process.num_experts,
                "top_k": process.top_k,
                "topics": len(process.preferences.topics),
                "requests": len(process.requests.length),
                "drift": process.requests.drift,
            },
            "fidelity": fidelity_report(found),
        }
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        print_fidelity(found, f"{file.name}: recorded and drawn")


def fidelity_report(found: dict[str, Fidelity]) -> dict[str, Any]:
    """The figures of every trace, and which tolerances the synthetic one keeps."""
    recorded, drawn = found["recorded"].figures, found["synthetic"].figures
    return {
        "traces": {name: {"figures": one.figures} | one.summary.report() for name, one in found.items()},
        "tolerances": {
            name: {"within": each.within, "relative": each.relative, "met": each.met(recorded[name], drawn[name])}
            for name, each in TOLERANCES.items()
            if name in recorded
        },
    }


def print_fidelity(found: dict[str, Fidelity], title: str) -> None:
    """Figures of the recorded, the drawn and the Zipf trace side by side."""
    table = new_table(
        title,
        "mean over layers",
        (*found, "tolerance", "met"),
        caption="zipf: a trace with the recorded skew of loads, and nothing else of it",
    )
    table.columns[0].no_wrap = False  # its names are the longest
    recorded = found["recorded"].figures
    for name, tolerance in TOLERANCES.items():
        if name in recorded:
            values = [one.figures[name] for one in found.values()]
            met = "yes" if tolerance.met(recorded[name], found["synthetic"].figures[name]) else "no"
            table.add_row(name, *(f"{value:.4f}" for value in values), str(tolerance), met)
    print_table(table)


def synth(
    folder: OutputFolder,
    interrupts: Interrupts,
    process: str,
    tokens: int,
    seed: int,
    logits: float | None,
) -> None:
    """Draw a synthetic trace and write it as trace.npz, in pieces: its length is not bounded by memory.

    With `logits`, the scale of them, it has logits of its own, whose largest K are the choices.
    """
    with StageTimer() as clock:
        with clock.stage("load"):
            generator = _process(process)
            _check_disk(folder.path, generator, tokens, logits)
            deal = generator.requests.deal(tokens, seed)
        with progress_bars(interrupts.check) as report, clock.stage("draw"):
            parts = sample_parts(generator, deal, seed, partial(report, "draw"), logits)
            write_trace_in_parts(
                folder.target("trace.npz"),
                parts,
                num_tokens=tokens,
                num_experts=generator.num_experts,
                layer_ids=generator.layer_ids,
                top_k=generator.top_k,
                seq_start=deal.seq_start,
                phase=deal.phases(),
                facts=facts_of(generator, logits),
                logits=logits is not None,
            )
        summary = {
            "command": "trace synth",
            "seed": seed,
            **surroundings(),
            "process": {"source": process, "facts": generator.facts},
            "trace": {
                "tokens": tokens,
                "layers": len(generator.layer_ids),
                "num_experts": generator.num_experts,
                "top_k": generator.top_k,
                "requests": len(deal.length),
                "logits": logits,
            },
        }
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        messages().print(f"{tokens} tokens of {len(generator.layer_ids)} layers in {folder.path / 'trace.npz'}")


def _check_disk(folder: Path, process: GatingProcess, tokens: int, logits: float | None) -> None:
    """Refuse a trace that the disk has no space for, before any is drawn. Raises `OptionError`."""
    numbers = 2 * process.top_k + (0 if logits is None else 4 * process.num_experts)  # int16, float32
    needed, there = tokens * len(process.layer_ids) * numbers, disk_usage(folder).free
    if needed > there:
        raise OptionError(
            f"--tokens {tokens} makes a file of about {needed / GIGA:,.0f} GB, and {folder} has space for "
            f"{there / GIGA:,.0f} GB; lower --tokens, or give another folder"
        )


def _process(source: str) -> GatingProcess:
    if source in PRESETS or not Path(source).exists():
        return preset_process(source)
    return read_process(Path(source))
