"""FSE-DP and HD-MoE, each on the other's kind of machine: 2x2 chiplets with DDR, and a wafer of 4x4 GPU dies with HBM.

Writes `elsewhere.csv`: `python studies/expert_streaming/elsewhere.py`. Both begin with the scenarios of
`configs/scenarios/expert_streaming`: Qwen3-30B-A3B, one layer, experts alone. HD-MoE's placement is found by its own
two stages on tokens before those that are timed, and judged under the best of `EXCHANGES`, as the usual placements
are. FSE-DP has the best of `CUTS`.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from study import HERE, SCENARIOS

from jaxmoe.experiment.comparison import placement_problem, search
from jaxmoe.experiment.inputs import Inputs, read_inputs
from jaxmoe.experiment.simulation import IterationBatches, batch_at, iterations_of, setting_of
from jaxmoe.experiment.strategies import Strategy, given_plans, strategy
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.methods import AbstractRun, system_of

SCENARIO = {"chiplets_2x2": "hd_moe_2x2", "wafer_4x4": "qwen3-30b-a3b_wafer_4x4"}
TOKENS, STEPS = (16, 256), 4
USUAL = ("tp_both_ways", "ep_balanced", "hybrid")
EXCHANGES = ("token_home", "random_host", "lowest_host", "reduce_scatter", "ring_both_ways")  # routers do not add
CUTS = (1, 2, 4, 8)  # micro-slices of a die's slice
BUFFER_MB = {"chiplets_2x2": 8, "wafer_4x4": 32}
CONTROL_NS = {"0.2 µs": 200, "none": 0}  # what every load, transfer and computation of a micro-slice takes more
SEARCH_S = 30
WHOLE = ("ep", "ep_prefetch", "fse_tokens", "fse_tokens_prefetch", "fse_naive")  # whose experts are not cut
CUT = ("fse", "expert_streaming")


def read(machine: str, tokens: int) -> Inputs:
    settings = [
        f"workload.batch_tokens={tokens}",
        f"tuning.exchanges=[{','.join(EXCHANGES)}]",
        f"tuning.time_limit_s={SEARCH_S}",
        "system={name: static}",
    ]
    return read_inputs(SCENARIOS / f"{SCENARIO[machine]}.yaml", settings, None, "0")


def timed(run: AbstractRun, iterations: IterationBatches) -> tuple[float, float]:
    """Mean seconds of the layer by model and by event simulator."""
    rolled = run.rollout(iterations.batches)
    steps = range(rolled.time.total.shape[0])
    seen = [run.replay(rolled, batch_at(iterations, 0, step), step, 0) for step in steps]
    return float(rolled.compared.mean()), float(np.mean(seen))


def streamed(machine: str, inputs: Inputs, iterations: IterationBatches) -> Iterator[dict[str, Any]]:
    """Expert parallelism that loads and FSE-DP, cut as the model finds fastest, by each reading of control."""
    plan = given_plans(["ep_balanced"], inputs, taken=(), compared=())[0]
    for told, control in CONTROL_NS.items():
        best: dict[str, dict[str, Any]] = {}
        for cut in CUTS:
            system = system_of(
                "expert_streaming",
                strategy="fse_paired",
                micro_slices=cut,
                control_ns=float(control),
                buffer_MB=float(BUFFER_MB[machine]),
                attention=False,
            )
            runs = system.runs(setting_of(inputs, plan, iterations.history))
            for name in (*(WHOLE if cut == CUTS[0] else ()), *CUT):
                model_s, simulated_s = timed(runs[name], iterations)
                setting = f"{cut} micro-slices" if name in CUT else ""
                row = {"setting": setting, "control": told, "model_s": model_s, "simulated_s": simulated_s}
                if name not in best or model_s < best[name]["model_s"]:
                    best[name] = row
        for name, row in best.items():
            yield {"method": "fse_paired" if name == "expert_streaming" else name, **row}


def placed(inputs: Inputs, iterations: IterationBatches) -> Iterator[dict[str, Any]]:
    """Placements that stay: the usual ones and HD-MoE's, and HD-MoE's with its pre-broadcast."""
    before = replace(inputs, trace=iterations.history)
    found = search("milp-bayes", before, placement_problem(before), lambda *_: None).result
    plans = {
        name: given_plans([name], inputs, taken=(), compared=())[0]
        for name in ("tp_both_ways", "ep_balanced", "hybrid")
    }
    plans["hd_moe"] = strategy(inputs, "hd_moe", found.gathered, found.gathered_exchange)
    for name, plan in plans.items():
        tried = {plan.placement.exchange[0]: plan}
        tried |= {exchange: strategy(inputs, name, plan.placement.share, exchange) for exchange in EXCHANGES}
        found_s = {
            exchange: timed(system_of("static").runs(given(inputs, each, iterations))["static"], iterations)
            for exchange, each in tried.items()
        }
        best = min(found_s, key=lambda exchange: found_s[exchange][0])
        model_s, simulated_s = found_s[best]
        yield {"method": name, "setting": best, "control": "", "model_s": model_s, "simulated_s": simulated_s}
        if name == "hd_moe":
            broadcast = system_of("hd_moe", experts=2).runs(given(inputs, tried[best], iterations))["hd_moe"]
            model_s, simulated_s = timed(broadcast, iterations)
            row = {"method": "hd_moe, pre-broadcast", "setting": best, "control": ""}
            yield row | {"model_s": model_s, "simulated_s": simulated_s}


def given(inputs: Inputs, plan: Strategy, iterations: IterationBatches) -> Any:
    return setting_of(inputs, plan, iterations.history)


def rows(machine: str, tokens: int) -> Iterator[dict[str, Any]]:
    inputs = read(machine, tokens)
    iterations = iterations_of(inputs, STEPS)
    for row in (*placed(inputs, iterations), *streamed(machine, inputs, iterations)):
        yield {"machine": machine, "tokens": tokens, **row}


if __name__ == "__main__":
    table = Table("elsewhere", rows, [*product(SCENARIO, TOKENS)], ("machine", "tokens"), digits=5)
    make_tables(HERE, [table], study_options(__doc__).parse_args())
