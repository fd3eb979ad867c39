"""`jaxmoe evaluate --phase`: a step of the whole model as it is deployed, and what its users wait for."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.markup import escape

from jaxmoe.cli.comparison_output import WIDTH, new_table, print_table, print_warnings
from jaxmoe.cli.session import OutputFolder
from jaxmoe.config import Scenario, load_scenario, resolved
from jaxmoe.experiment.deployment import Deployed
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.machine_deployment import compared
from jaxmoe.experiment.number_worth import worth
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.methods import UnsuitableSystemError
from jaxmoe.report import plot_serving
from jaxmoe.report.style import aligned
from jaxmoe.serving.closed_loop import LIMITS, MeanWaits, limits, serve, tokens_of_step
from jaxmoe.serving.costs import BOARD, joules_of_steps
from jaxmoe.serving.costs import PARTS as PARTS_SAY
from jaxmoe.serving.launch import engine_options, launch_line
from jaxmoe.serving.machine_step import MachineStep
from jaxmoe.serving.step import ModelStep, StepLoad
from jaxmoe.units import GIGA

CONCURRENCIES = tuple(2**power for power in range(11))
PARTS_OF_OWN = (16, 4, 1)  # where each takes a rollout, and the trace may have few tokens
HIDDEN = "hidden by overlap"  # what parts have more than the step, below 0
OWN = -1  # where the requests of the scenario's own users stand, after these
MILLI = 1e-3
TOLD = 0.005  # % for 1 %, below which a number gives nothing
ROUNDED = 1e-6  # of a step, below which a part is none
Curve = tuple[MeanWaits, np.ndarray]


def run(
    folder: OutputFolder,
    config: Path,
    overrides: list[str] | None,
    phase: str,
    elasticities: bool,
    refused: dict[str, Any],
) -> None:
    """Time a step of `phase`, prefill or decode, by its parts; then requests, memory, and other layouts.

    With `elasticities`, tell what more of each number of the machine would give.
    """
    given = [name for name, value in refused.items() if value]
    if given:
        instead = {"--trace": ", or give --set 'workload.trace={kind: file, path: FILE}'"}
        instead |= {"--layers": ", or give --set evaluation.layers=[0,8]"}
        raise OptionError(
            f"{given[0]} is given beside --phase, which times the whole model; drop one{instead.get(given[0], '')}"
        )
    with StageTimer() as clock:
        with clock.stage("load"):
            scenario = load_scenario(config, overrides or ())
            all_compared = compared(scenario)
            own = next(all_compared)
        with clock.stage("compile and time"):
            curves = {_told(each): _curve(each) for each in (own, *all_compared)}
            served = next(iter(curves.values()))[0]
            batch = _batch(own, phase, served)
            parts = {name: float(seconds[OWN]) for name, seconds in own.step.parts(batch).items()}
            parts[HIDDEN] = float(own.step.seconds(batch)[OWN]) - sum(parts.values())
        with clock.stage("draw"):
            _draw(folder, scenario, own, curves)
        with clock.stage("energy"):
            cost = _cost(own, float(served.tokens_per_s_device(own.step)[OWN]))
        with clock.stage("differentiate"):
            gains, refusal = _worth(own) if elasticities else ({}, None)
        report = _report(own, phase, parts, served) | {"million_output_tokens": cost, "elasticities": gains}
        summary = {"command": "evaluate", "phase": phase, "scenario": resolved(scenario), **surroundings(), **report}
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
    _print_parts(own, phase, parts, float(served.decoding[OWN]))
    _print_served(own, served, cost)
    _print_layouts(own, curves)
    _print_worth(own, gains)
    _print_memory(own)
    if isinstance(own.step, ModelStep):
        _print_launch(own, f"PATH_OF_{scenario.model.name}")
    print_warnings([*own.step.notes, *([refusal] if refusal else [])])


def _batch(own: Deployed, phase: str, served: MeanWaits) -> StepLoad:
    """The step of a phase at every number of requests: all that decode, or one chunk of prompts alone."""
    prompt, output = float(own.users.prompt), float(own.users.output)
    if phase == "prefill":
        return StepLoad(jnp.zeros_like(served.decoding), prompt, _chunk(own), prompt)
    return StepLoad(served.decoding, prompt + output / 2, queries=own.deployment.queries)


def _chunk(own: Deployed) -> float:
    """Tokens of prompts that a rank reads in a step: a whole chunk, or all prompts in flight where these are fewer."""
    in_flight = float(own.users.concurrency) / own.deployment.data * float(own.users.prompt)
    return min(own.backend.chunk_of_rank(own.deployment.data), in_flight)


def _told(each: Deployed) -> str:
    at = each.deployment
    if isinstance(each.step, MachineStep):
        return f"{each.step.layers.name} on {at.devices} nodes"
    ranks = f", experts on {at.expert_ranks} ranks" if at.expert_ranks > 1 else ", every expert cut"
    return f"attention TP {at.tensor} x DP {at.data}{ranks}"


def _curve(each: Deployed) -> Curve:
    """Waiting times at `_counts` and at the users' own number, and output tokens of a device a second."""
    count = jnp.asarray((*_counts(each), each.users.concurrency), jnp.float32)
    users = each.users._replace(concurrency=jnp.maximum(count, each.deployment.data))
    served = serve(each.step, users, each.memory, each.backend, each.overheads)
    return served, np.asarray(served.tokens_per_s_device(each.step))


def _counts(each: Deployed) -> tuple[int, ...]:
    """Numbers of requests in flight of a curve."""
    if isinstance(each.step, MachineStep):
        return tuple(dict.fromkeys(max(int(each.users.concurrency) // part, 1) for part in PARTS_OF_OWN))
    return CONCURRENCIES


def _device(each: Deployed) -> str:
    return "node" if isinstance(each.step, MachineStep) else "GPU"


def _draw(folder: OutputFolder, scenario: Scenario, own: Deployed, curves: dict[str, Curve]) -> None:
    points = {
        name: (np.asarray(served.tokens_per_s_user())[:OWN], of_gpu[:OWN]) for name, (served, of_gpu) in curves.items()
    }
    device = _device(own)
    title = f"{scenario.model.name} on {own.deployment.devices} {device}s under {own.deployment.backend}"
    plot_serving(folder.target("throughput.png"), points, _counts(own), title, device)


def _cost(own: Deployed, tokens_per_s: float) -> dict[str, Any]:
    """J and price of a million output tokens, and where the joules are from; `None` where the machine does not say."""
    joules, source = joules_of_steps(own.step, own.users, own.memory.sequences, own.backend), PARTS_SAY
    if joules is None:
        joules, source = own.costs.joules(tokens_per_s), BOARD
    price = own.costs.price(tokens_per_s)
    return {
        "J": None if joules is None else float(joules),
        "energy_from": None if joules is None else source,
        "price": None if price is None else float(price),
    }


def _worth(own: Deployed) -> tuple[dict[str, float], str | None]:
    """What 1 % more of each number gives, or why that cannot be told."""
    try:
        return worth(own), None
    except UnsuitableSystemError as error:
        return {}, f"no elasticities: {error}"


def _report(own: Deployed, phase: str, parts: dict[str, float], served: MeanWaits) -> dict[str, Any]:
    memory = own.memory
    sizes = vars(memory) | {"free": memory.free, "sequences": memory.sequences}
    return {
        "deployment": vars(own.deployment),
        "step": {"seconds": sum(parts.values()), "parts_s": parts},
        "served": {
            "first_token_s": float(served.first_token[OWN]),
            "per_token_s": float(served.per_token[OWN]),
            "decoding_sequences_a_rank": float(served.decoding[OWN]),
            "tokens_of_a_sequence_in_a_step": float(tokens_of_step(own.deployment.drafted, own.users.acceptance)),
            "tokens_per_s_user": float(served.tokens_per_s_user()[OWN]),
            "tokens_per_s_device": float(served.tokens_per_s_device(own.step)[OWN]),
        },
        "memory_bytes": {name: size if np.isfinite(size) else None for name, size in sizes.items()},
        "stand_ins": own.step.notes,
    }


# For people.


def _print_launch(own: Deployed, weights: str) -> None:
    told = [f"started by: {launch_line(own.deployment, weights, int(own.users.concurrency))}"]
    if options := engine_options(own.deployment):
        told.append(f"with options.yaml:\n{options}")
    Console(width=WIDTH, highlight=False, emoji=False).print(escape("\n".join(told)), soft_wrap=True)


def _print_parts(own: Deployed, phase: str, parts: dict[str, float], decoding: float) -> None:
    prompt, output = float(own.users.prompt), float(own.users.output)
    what = f"{decoding:.0f} sequences a rank get {_tokens(own)} each, {prompt + output / 2:.0f} tokens of context"
    if phase == "prefill":
        what = f"{_chunk(own):.0f} tokens of prompts of {prompt:.0f} a rank"
    table = new_table(f"a step of {phase}", "part", ("ms", "part of the step"), what)
    whole = sum(parts.values())
    named = {name: seconds for name, seconds in parts.items() if abs(seconds) > ROUNDED * whole} | {"all": whole}
    for name, text in zip(named, aligned(seconds / MILLI for seconds in named.values()), strict=True):
        table.add_row(name, text, f"{named[name] / named['all']:.1%}")
    print_table(table)


def _tokens(own: Deployed) -> str:
    """Tokens that a step gives a sequence."""
    if not own.deployment.drafted:
        return "a token"
    tokens = float(tokens_of_step(own.deployment.drafted, own.users.acceptance))
    return f"{tokens:.2f} of {own.deployment.queries:.0f} tokens"


def _print_served(own: Deployed, served: MeanWaits, cost: dict[str, Any]) -> None:
    count, prompt, output = (f"{float(each):.0f}" for each in own.users[:3])
    told = None if cost["J"] is None else f"joules: {cost['energy_from']}"
    table = new_table(f"{count} requests in flight, {prompt} tokens in, {output} out", "mean", ("",), told)
    table.add_row("time to first token, ms", f"{float(served.first_token[OWN]) / MILLI:.0f}")
    table.add_row("time per output token, ms", f"{float(served.per_token[OWN]) / MILLI:.2f}")
    table.add_row("output tokens/s of a user", f"{float(served.tokens_per_s_user()[OWN]):.1f}")
    table.add_row(f"output tokens/s of a {_device(own)}", f"{float(served.tokens_per_s_device(own.step)[OWN]):.0f}")
    if cost["J"] is not None:
        table.add_row("J a million output tokens", f"{cost['J']:,.0f}")
    if cost["price"] is not None:
        table.add_row("price of a million output tokens", f"{cost['price']:.3g}")
    on_rank = own.users.concurrency / own.deployment.data
    table.add_row("limited by", LIMITS[int(limits(served.decoding, on_rank, own.backend)[OWN])])
    print_table(table)


def _print_layouts(own: Deployed, curves: dict[str, Curve]) -> None:
    others = "layouts on as many GPUs" if isinstance(own.step, ModelStep) else "the system and its baseline"
    title = f"{others}, {float(own.users.concurrency):.0f} requests in flight; this one first"
    table = new_table(title, "layout", ("first token\nms", "per token\nms", f"tokens/s\na {_device(own)}"))
    for name, (served, of_gpu) in curves.items():
        first, each = float(served.first_token[OWN]) / MILLI, float(served.per_token[OWN]) / MILLI
        table.add_row(name, f"{first:.0f}", f"{each:.2f}", f"{float(of_gpu[OWN]):.0f}")
    print_table(table)


def _print_worth(own: Deployed, gains: dict[str, float]) -> None:
    """The numbers that matter, the most first."""
    some = {name: gain for name, gain in gains.items() if abs(gain) >= TOLD}
    if some:
        table = new_table("with 1 % more of a number", "number", (f"more output tokens/s\nof a {_device(own)}, %",))
        for name, gain in sorted(some.items(), key=lambda each: -abs(each[1])):
            table.add_row(escape(name), f"{gain:.2f}")
        print_table(table)


def _print_memory(own: Deployed) -> None:
    memory = own.memory
    if not np.isfinite(memory.capacity):
        return
    table = new_table(f"memory of a {_device(own)}", "", ("GB",))
    sizes = {"experts": memory.experts, "other weights": memory.other_weights, "workspace": memory.workspace}
    for name, size in (sizes | {"left for keys and values": memory.free}).items():
        table.add_row(name, f"{size / GIGA:.1f}")
    table.add_row(f"so many sequences, of {memory.cache_per_sequence / GIGA:.3f} GB each", f"{memory.sequences:.0f}")
    print_table(table)
