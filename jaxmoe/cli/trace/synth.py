"""`jaxmoe trace synth`: a trace of any length from a fitted process or a preset."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from jaxmoe.cli import options
from jaxmoe.cli.progress import progress_bars
from jaxmoe.cli.session import messages, session
from jaxmoe.experiment.clock import StageClock
from jaxmoe.experiment.summary import surroundings
from jaxmoe.traces.formats.npz import write_trace_in_parts
from jaxmoe.traces.synthesis import PRESETS, GatingProcess, preset_process, read_process, sample_parts

Source = Annotated[
    str,
    typer.Argument(
        metavar="PROCESS",
        help=f"A process.npz of jaxmoe trace fit, or a preset: {', '.join(PRESETS)}.",
        show_default=False,
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="The number of tokens to draw.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="The seed of what is drawn.")]


def command(
    process: Source, out: options.Out, tokens: Tokens = 8192, seed: Seed = 0, verbose: options.Verbose = False
) -> None:
    """Draw a synthetic trace and write it as trace.npz, in pieces: its length is not bounded by memory."""
    with session(out, verbose) as (folder, interrupts), StageClock() as clock:
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
