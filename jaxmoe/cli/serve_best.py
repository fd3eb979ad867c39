"""`jaxmoe serve best`: of all deployments of a study, the one that serves most requests a second and GPU in limits."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from jaxmoe.cli.comparison_output import WIDTH, new_table, print_table, print_warnings
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.experiment.rate_trials import hardly_fills
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.files import write_table
from jaxmoe.report.style import aligned, digits
from jaxmoe.serving.online.capacity import Forbids
from jaxmoe.sweep.best_deployment import TOLERANCE, Verdict, best_of, candidate, race, servings_of
from jaxmoe.sweep.study import read_study

MOST_REASONS = 6
Row = dict[str, Any]


def run(folder: OutputFolder, interrupts: Interrupts, config: Path) -> None:
    """Find the deployment, and write what became of every other one."""
    with StageTimer() as clock:
        with clock.stage("load and price"):
            study = read_study(config)
            servings, left_out = servings_of(study)
            candidates = [candidate(*each) for each in servings]
        with clock.stage("serve"):
            outcomes = race(candidates, interrupts.check)
            best = best_of(study, outcomes)
            assert best.rate is not None
            whole = best.rate * best.candidate.devices
            forbids = best.candidate.serving.forbids(whole * (1 + TOLERANCE))
            short = hardly_fills(best.candidate.serving, whole)
        with clock.stage("write"):
            write_table(folder.target("deployments.csv"), _rows(outcomes, left_out), digits=6)
        summary = {
            "command": "serve best",
            "study": study.config.model_dump(mode="json", by_alias=True),
            **surroundings(),
            "best": {"deployment": dict(best.candidate.values), **_told(best), "rate_per_s": whole},
            "forbids_more": forbids._asdict(),
            "highest_rate_note": short,
            "deployments": len(outcomes) + len(left_out),
            "simulated_requests": sum(each.simulated for each in outcomes),
            "left_out": left_out,
        }
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
    _print(study.config.name, outcomes, best, forbids)
    reasons = [f"left out: {values}: {reason}" for values, reason in left_out.items()]
    more = [f"{len(reasons) - MOST_REASONS} more are in deployments.csv"] * (len(reasons) > MOST_REASONS)
    print_warnings([*([short] if short else []), *reasons[:MOST_REASONS], *more])


def _told(outcome: Verdict) -> Row:
    each = outcome.candidate
    return {
        "gpus": each.devices,
        "estimate_per_s_gpu": each.estimate / each.devices,
        "bound_per_s_gpu": each.bound / each.devices if each.bound < float("inf") else None,
        "outcome": outcome.how,
        "rate_per_s_gpu": outcome.rate,
        "simulated": outcome.simulated,
    }


def _rows(outcomes: Sequence[Verdict], left_out: Mapping[str, str]) -> Iterator[Row]:
    """Those that led, the best first, then all others as they were tried, then those left out."""
    for outcome in sorted(outcomes, key=lambda each: -(each.rate or 0.0)):
        yield {**outcome.candidate.values, **_told(outcome), "left_out": None}
    none = dict.fromkeys([*outcomes[0].candidate.values, *_told(outcomes[0])])
    yield from ({**none, "left_out": f"{values}: {reason}"} for values, reason in left_out.items())


def _print(name: str, outcomes: Sequence[Verdict], best: Verdict, forbids: Forbids) -> None:
    led = sorted((each for each in outcomes if each.rate), key=lambda each: -(each.rate or 0.0))
    values = [each.candidate.values for each in outcomes]
    axes = [key for key in values[0] if len({str(each[key]) for each in values}) > 1]
    table = new_table(f"{name}: {len(outcomes)} deployments", "requests/s\na GPU", ("estimate",))
    table.columns[0].justify = "right"
    for key in axes:
        table.add_column(escape(key.rpartition(".")[2].replace("_", "\n")), justify="right", max_width=11)
    rates = aligned([each.rate or 0.0 for each in led])
    for rate, each in zip(rates, led, strict=True):
        told = _told(each)
        shown = (escape(str(each.candidate.values[key])) for key in axes)
        table.add_row(rate, digits(told["estimate_per_s_gpu"]), *shown)
    print_table(table)
    requests, counts = len(best.candidate.serving.requests), Counter(each.how for each in outcomes)
    runs = sum(each.simulated for each in outcomes) / requests
    highest = f"{digits((best.rate or 0.0) * best.candidate.devices)} requests/s on {best.candidate.devices} GPUs"
    lines = (
        f"each led when it was tried; {counts['behind']} others were behind, {counts['bound']} cannot be better",
        f"as many requests were simulated as in {runs:.1f} runs of all {requests}",
        f"more than {highest} is forbidden by {forbids.limit} ({forbids.resource})",
    )
    Console(width=WIDTH, highlight=False, emoji=False).print(escape("\n".join(lines)), soft_wrap=True)
