"""`jaxmoe trace synth`: a trace of any length from a fitted process or a preset."""

from functools import partial
from pathlib import Path

from jaxmoe.cli.session import Interrupts, OutputFolder, messages, progress_bars
from jaxmoe.experiment.clock import StageClock
from jaxmoe.experiment.summary import surroundings
from jaxmoe.traces.formats.npz import write_trace_in_parts
from jaxmoe.traces.synthesis import PRESETS, GatingProcess, preset_process, read_process, sample_parts


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    process: str,
    tokens: int,
    seed: int,
) -> None:
    """Draw a synthetic trace and write it as trace.npz, in pieces: its length is not bounded by memory."""
    with StageClock() as clock:
        with clock.stage("load"):
            generator = _process(process)
            deal = generator.requests.deal(tokens, seed)
        with progress_bars(interrupts.check) as report, clock.stage("draw"):
            parts = sample_parts(generator, deal, seed, partial(report, "draw"))
            write_trace_in_parts(
                folder.target("trace.npz"),
                parts,
                num_tokens=tokens,
                num_experts=generator.num_experts,
                layer_ids=generator.layer_ids,
                top_k=generator.top_k,
                seq_start=deal.seq_start,
                phase=deal.phases(),
                facts=generator.facts,
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
            },
        }
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
        messages().print(f"{tokens} tokens of {len(generator.layer_ids)} layers in {folder.path / 'trace.npz'}")


def _process(source: str) -> GatingProcess:
    if source in PRESETS or not Path(source).exists():
        return preset_process(source)
    return read_process(Path(source))
