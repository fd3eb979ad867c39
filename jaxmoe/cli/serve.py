"""`jaxmoe serve`: requests over time through the engines of a scenario, what users wait for, and what forbids more."""

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from jaxmoe.cli.comparison_output import WIDTH, new_table, print_table, print_warnings
from jaxmoe.cli.serve_files import over_time, step_rows, timeline, write_requests
from jaxmoe.cli.session import Interrupts, OutputFolder
from jaxmoe.config import Scenario, load_scenario, resolved
from jaxmoe.config.serving import RandomArrivals
from jaxmoe.experiment.rate_trials import RateTrials, hardly_fills
from jaxmoe.experiment.serving import Serving, answers, check_drains, ends_late, moves_told
from jaxmoe.experiment.serving_inputs import serving_of
from jaxmoe.experiment.stage_timer import StageTimer
from jaxmoe.experiment.summary import surroundings
from jaxmoe.files import atomic_write, write_table
from jaxmoe.report import Wait, plot_over_time, plot_waits
from jaxmoe.report.style import aligned, digits, time_unit
from jaxmoe.serving.online.capacity import Forbids, drained_rate, what_binds
from jaxmoe.serving.online.metrics import PERCENTILES, distribution, gaps_between, waits_of
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served
from jaxmoe.units import GIGA

TOLERANCE = 0.01  # of the highest rate
MOST_TRIED = 50_000  # requests by which the highest rate is found: the first of all
MOST_TOKENS = 20_000_000  # of answers: of more, when each comes and what each step does is not kept
WAITS = {
    "queue": "until the first step",
    "first_token": "time to first token",
    "per_token": "time per token",
    "between": "from token to token",
    "end_to_end": "end to end",
}


def run(
    folder: OutputFolder,
    interrupts: Interrupts,
    config: Path,
    overrides: list[str] | None,
    profile: Path | None,
) -> None:
    """Serve the scenario's requests, at their rate and at others up to the highest that keeps the limits."""
    with StageTimer() as clock:
        with clock.stage("load"):
            scenario = load_scenario(config, overrides or ())
            serving = serving_of(scenario, profile)
        with clock.stage("serve"):
            logged = _logged(serving)
            requests, served = serving.at(token_times=logged, steps=logged)
            if scenario.serving is not None and isinstance(scenario.serving.arrivals, RandomArrivals):
                check_drains(serving, scenario.serving.arrivals, served)
        interrupts.check()
        with clock.stage("highest rate"):
            tried = serving.first(MOST_TRIED)
            trials = RateTrials(tried, check=interrupts.check)
            highest = None if serving.rate is None else trials.highest(serving.rate, TOLERANCE)
            forbids = short = None
            if highest is not None and 0 < highest < math.inf:
                short = hardly_fills(tried, highest)
                forbids = tried.forbids(highest * (1 + TOLERANCE)) if _logged(tried) else None
        with clock.stage("draw and write"):
            _draw(folder, scenario, serving, served)
            _write(folder, serving, requests, served)
        report = _report(serving, requests, served, highest, forbids) | {"highest_rate_note": short}
        summary = {"command": "serve", "scenario": resolved(scenario), **surroundings(), **report}
        folder.write_json("summary.json", summary | {"wall_s": clock.report()})
    _print_waits(scenario, report)
    _print_served(serving, report)
    if report["binds"]:
        _print_binds(report)
    _print_rate(serving, highest, forbids)
    print_warnings([*_notes(serving, requests, served, report), *([short] if short else [])])


def _logged(serving: Serving) -> bool:
    """Whether times of all tokens and steps are kept."""
    return int(serving.requests.output.sum()) <= MOST_TOKENS


def _report(
    serving: Serving, requests: Requests, served: Served, highest: float | None, forbids: Forbids | None
) -> dict[str, Any]:
    told, steps = answers(serving, requests, served), served.steps
    between = None if steps is None else distribution(gaps_between(served))
    waits = told["waits_s"] | {"between": between}
    moves = {} if serving.planned is None else {"rebalancing": moves_told(serving.planned)}
    return told | {
        "waits_s": {name: waits[name] for name in WAITS},
        **moves,
        "steps": None if steps is None else len(steps.start),
        "binds": {} if steps is None else what_binds(steps, serving.fleet),
        "highest_rate_per_s": None if highest is None or math.isinf(highest) else highest,
        "highest_rate_requests": None if highest is None else min(len(requests), MOST_TRIED),
        "highest_rate_tolerance": None if highest is None else TOLERANCE,
        "forbids_more": None if forbids is None else forbids._asdict(),
    }


def _notes(serving: Serving, requests: Requests, served: Served, report: dict[str, Any]) -> list[str]:
    most, notes = drained_rate(served), []
    if served.steps is None:
        notes = [
            f"steps, and times between tokens, of {requests.output.sum():,} tokens are not kept; take requests of "
            f"{MOST_TOKENS:,} at most to see them"
        ]
    if ends_late(report):
        notes.append(
            f"what is served is over the {digits(report['span_s'])} s until the last answer, and requests come for "
            f"{digits(len(requests) / report['sent_per_s'])} s; with more of them (serving.arrivals.requests) it nears "
            "what comes"
        )
    if most is None:
        return notes
    return [*notes, f"the queue grows as long as requests come: these engines drain {digits(most)} requests/s"]


def _write(folder: OutputFolder, serving: Serving, requests: Requests, served: Served) -> None:
    write_requests(folder.target("requests.csv"), requests, served, serving.limits)
    if served.steps is None:
        return
    write_table(folder.target("steps.csv"), step_rows(served.steps), digits=9)
    with atomic_write(folder.target("timeline.json")) as aside:
        events = timeline(served, served.steps, serving.fleet, serving.planned.moves if serving.planned else ())
        aside.write_text(json.dumps(events, separators=(",", ":")), encoding="utf-8")


def _draw(folder: OutputFolder, scenario: Scenario, serving: Serving, served: Served) -> None:
    requests, limits = serving.requests, serving.limits
    waits = waits_of(requests, served)
    title = f"{scenario.name}: {len(requests)} requests"
    if served.steps is not None:
        time, engines, panels = over_time(requests, served, served.steps, serving.fleet)
        plot_over_time(folder.target("over_time.png"), time, engines, panels, f"{title} over time")
    shown = {
        WAITS["first_token"]: Wait(waits.first_token, _finite(limits.first_token)),
        WAITS["per_token"]: Wait(waits.per_token, _finite(limits.per_token)),
        WAITS["end_to_end"]: Wait(waits.end_to_end),
    }
    plot_waits(folder.target("waits.png"), shown, f"{title}, what they wait for")


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


# For people.


def _print_waits(scenario: Scenario, report: dict[str, Any]) -> None:
    heads = ("", "mean", *(f"p{at}" for at in PERCENTILES))
    table = new_table(f"{scenario.name}: {report['requests']} requests", "", heads)
    for name, told in WAITS.items():
        if (values := report["waits_s"][name]) is None:
            continue
        factor, unit = time_unit(values["p50"] or values["mean"])
        table.add_row(told, unit, *aligned(value * factor for value in values.values()))
    print_table(table)


def _print_served(serving: Serving, report: dict[str, Any]) -> None:
    limits = serving.limits
    table = new_table("what is served", "", ("",))
    if report["sent_per_s"] is not None:
        table.add_row("requests/s that come", digits(report["sent_per_s"]))
    table.add_row("requests/s that are served", digits(report["requests_per_s"]))
    table.add_row("output tokens/s", f"{report['output_tokens_per_s']:,.0f}")
    table.add_row(f"requests/s within {_told(limits.first_token, limits.per_token)}", digits(report["goodput_per_s"]))
    table.add_row("part of requests within these", f"{report['within_limits']:.1%}")
    table.add_row("prompt tokens from the cache", f"{report['prompt_tokens_from_cache']:.1%}")
    table.add_row("preemptions", f"{report['preemptions']}")
    if serving.buffering is not None:
        table.add_row("times that a request waited at a layer", f"{report['deferrals']}")
    if moves := report.get("rebalancing"):
        table.add_row("choices on the fullest GPU over the mean", digits(moves["imbalance"]))
    if moves and moves["moves"]:
        table.add_row("times that experts were placed anew", f"{moves['moves']}")
        table.add_row("GB that move each time, of an engine", digits(moves["moved_bytes"] / moves["moves"] / GIGA))
        table.add_row("ms that each engine waits for them", digits(moves["pause_s"] / moves["moves"] * 1e3))
    print_table(table)


def _told(first_token: float, per_token: float) -> str:
    limits = [f"{first_token:g} s to the first token"] if math.isfinite(first_token) else []
    limits += [f"{per_token * 1e3:g} ms per token"] if math.isfinite(per_token) else []
    return ", ".join(limits) or "any time"


def _print_binds(report: dict[str, Any]) -> None:
    table = new_table("what requests wait for", "fullest while some wait", ("part of the time of steps",))
    for name, part in report["binds"].items():
        if part > 0:
            table.add_row(name, f"{part:.1%}")
    print_table(table)


def _print_rate(serving: Serving, highest: float | None, forbids: Forbids | None) -> None:
    if highest is None:
        return
    limits = serving.limits
    told = f"highest rate with {limits.part:.4g} of requests within {_told(limits.first_token, limits.per_token)}: "
    if math.isinf(highest):
        told += "any, as there are too few requests to fill the engines"
    elif highest == 0:
        told += "none, as a request takes longer alone"
    else:
        why = f"; more is forbidden by {forbids.limit} ({forbids.resource})" if forbids else ""
        told += f"{digits(highest)} requests/s{why}"
    if len(serving.requests) > MOST_TRIED:
        told += f". Found on the first {MOST_TRIED:,} of {len(serving.requests):,} requests, within {TOLERANCE:.0%}"
    Console(width=WIDTH, highlight=False, emoji=False).print(escape(told), soft_wrap=True)
