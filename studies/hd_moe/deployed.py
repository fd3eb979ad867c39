"""TBT of the whole model in the step that `jaxmoe evaluate --phase` times, beside the one with the fitted attention.

Layers are those of `times.csv`. Attention, shared experts, dense layers and head are worked out from the model on the
machine, where `whole_model.csv` takes what the published times have beside their layers. Writes `deployed.csv`
(speed-ups of node-link balance), `deployed_ranges.csv` (least, most and mean of these) and `deployed_parts.csv`
(seconds of both). About half a minute of a core.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import mean

from cases import CASES, DEEPSEEK, HERE, MIXTRAL, QWEN, ROOT, Case

from jaxmoe.config import load_scenario
from jaxmoe.engine.times import LayerTime, measured_time
from jaxmoe.experiment.machine_deployment import step_on_machine
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.files import read_table
from jaxmoe.serving.machine_step import Context, MachineStep, SystemLayers
from jaxmoe.serving.step import StepLoad

COUNTINGS = ("published", "equations")
BASELINES = {"tp": "tp", "ep": "ep", "hybrid_ring": "hybrid"}  # and the name of each in the published times
BALANCED = "node_link"
STAGES = ("dispatch", "compute", "combine")
CONTEXT = 1024.0  # tokens; the paper does not state it, and this is the default of a scenario
SETTING = ("model", "mesh", "TFLOPs_per_s", "GB_per_s")
Key = tuple[str, ...]


def speedups(case: Case) -> Iterator[dict[str, object]]:
    """Speed-up of node-link balance over each baseline, by batch size and counting."""
    old, step = _whole_model(), _step(case)
    published = {(row["batch_tokens"], row["over"]): row["published"] for row in _rows("published", case)}
    layers = _layers(case)
    for tokens in sorted({int(key[1]) for key in layers}):
        for over, name in BASELINES.items():
            row: dict[str, object] = {**case.columns, "batch_tokens": tokens, "over": over}
            row["published"] = published.get((str(tokens), name), "")
            for counting in COUNTINGS:
                keys = [(counting, str(tokens), strategy) for strategy in (over, BALANCED)]
                if not {*keys} <= {*layers}:
                    continue
                before, after = (old[(*case.columns.values(), *key)]["tbt_s"] for key in keys)
                row[f"old_{counting}"] = f"{float(before) / float(after):.3f}"
                before, after = (_seconds(step, layers[key], tokens) for key in keys)
                row[f"deployed_{counting}"] = f"{before / after:.3f}"
            yield row


def ranges() -> Iterator[dict[str, object]]:
    """Least, most and mean speed-up over each baseline, of all machines and batch sizes."""
    rows = all_speedups()
    for models in ((MIXTRAL, DEEPSEEK), (QWEN,)):
        for over in BASELINES:
            chosen = [row for row in rows if row["model"] in models and row["over"] == over]
            found: dict[str, object] = {"models": " and ".join(models), "over": over}
            for name in ("published", *(f"{how}_{counting}" for counting in COUNTINGS for how in ("old", "deployed"))):
                values = [float(str(row[name])) for row in chosen if row.get(name)]
                found[name] = f"{min(values):.2f}-{max(values):.2f}, {mean(values):.2f}"
            yield found


@cache
def all_speedups() -> list[dict[str, object]]:
    return [row for case in CASES for row in speedups(case)]


def all_parts() -> Iterator[dict[str, object]]:
    return (row for case in CASES for row in parts(case))


def parts(case: Case) -> Iterator[dict[str, object]]:
    """Seconds of a step under tensor parallelism: in the old sum, and in the deployed step by part."""
    old, step = _whole_model(), _step(case)
    for (counting, tokens, strategy), time in _layers(case).items():
        if (counting, strategy) != ("equations", "tp"):
            continue
        known = old[(*case.columns.values(), counting, tokens, strategy)]
        found = replace(step, layers=SystemLayers(strategy, _always(time)), _known={}).parts(_load(tokens))
        row: dict[str, object] = {**case.columns, "batch_tokens": tokens}
        row |= {"old_attention_s": float(known["attention_s"]), "old_tbt_s": float(known["tbt_s"])}
        yield (
            row
            | {f"{name}_s": float(found.get(name, 0.0)) for name in ("attention", "shared", "dense", "head")}
            | {
                "layers_s": float(sum(found[name] for name in STAGES)),
                "tbt_s": float(sum(found.values())),
            }
        )


def _step(case: Case) -> MachineStep:
    scenario = load_scenario(ROOT / "configs" / "scenarios" / "hd_moe" / f"{case.name}.yaml", ())
    return step_on_machine(scenario, SystemLayers("none", _always(measured_time({}, {}, 0.0))))


def _seconds(step: MachineStep, time: LayerTime, tokens: int | str) -> float:
    return float(replace(step, layers=SystemLayers("own", _always(time)), _known={}).seconds(_load(tokens)))


def _load(tokens: int | str) -> StepLoad:
    return StepLoad(float(tokens), CONTEXT)


def _always(time: LayerTime):
    def layer(tokens: int, context: Context) -> LayerTime:
        return time

    return layer


def _layers(case: Case) -> dict[Key, LayerTime]:
    """Times of the case's layer by counting, batch size and strategy."""
    return {
        (row["counting"], row["batch_tokens"], row["strategy"]): measured_time(
            {name: float(row[f"{name}_s"]) for name in STAGES}, {}
        )
        for row in _rows("times", case)
    }


def _whole_model() -> dict[Key, dict[str, str]]:
    keys = (*SETTING, "counting", "batch_tokens", "strategy")
    return {tuple(row[key] for key in keys): row for row in read_table(HERE / "whole_model.csv")}


def _rows(name: str, case: Case) -> list[dict[str, str]]:
    return [row for row in read_table(HERE / f"{name}.csv") if {**row, **case.columns} == row]


if __name__ == "__main__":
    tables = [
        Table("deployed", all_speedups),
        Table("deployed_ranges", ranges),
        Table("deployed_parts", all_parts, digits=5),
    ]
    make_tables(HERE, tables, study_options(__doc__).parse_args())
