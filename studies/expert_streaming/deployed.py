"""End to end in the step that `jaxmoe evaluate --phase` times, beside the token-layers a second of `end_to_end.csv`.

Layers, with their attention, are those of `end_to_end.csv`. Dense layers, shared experts where layers do not have them,
and the head follow from the model on the machine. Writes `deployed.csv`. A few seconds.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxmoe.config import load_scenario
from jaxmoe.engine.times import ATTENTION, EXPERTS, LayerTime, measured_time
from jaxmoe.experiment.machine_deployment import step_on_machine
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.files import read_table
from jaxmoe.serving.machine_step import Context, SystemLayers
from jaxmoe.serving.step import StepLoad

HERE = Path(__file__).resolve().parent
SCENARIOS = HERE.parents[1] / "configs" / "scenarios" / "expert_streaming"
CONTEXT = 1024.0  # tokens, of `end_to_end.csv` as well


def rows() -> Iterator[dict[str, object]]:
    """Every row of `end_to_end.csv`: throughput over that of expert parallelism, as it was and of the whole model."""
    table = read_table(HERE / "end_to_end.csv")
    found = {(row["model"], row["tokens"], row["strategy"]): row for row in table}
    seconds = {key: step_seconds(row) for key, row in found.items()}
    for (model, tokens, strategy), row in found.items():
        base, own = (model, tokens, "ep"), (model, tokens, strategy)
        whole, parts = seconds[own]
        yield {
            "model": model,
            "tokens": tokens,
            "strategy": strategy,
            "token_layers_over_ep": rate(row) / rate(found[base]),
            "tokens_over_ep": seconds[base][0] / whole,
            "tokens_per_s": float(tokens) / whole,
            "beside_layers": 1 - (parts["attention"] + parts["experts"]) / whole,
        }


def step_seconds(row: dict[str, str]) -> tuple[float, dict[str, float]]:
    """Seconds of a step of the whole model, and of its parts; requests that wait leave fewer tokens a second."""
    scenario = load_scenario(SCENARIOS / f"{row['model']}_2x2.yaml", ())
    layer = float(row["tokens"]) / rate(row)
    attention = float(row["attention_share"]) * layer
    time = measured_time({"attention": attention, "experts": layer - attention}, {})
    time = replace(time, blocks=((ATTENTION, ("attention",)), (EXPERTS, ("experts",))))

    def always(tokens: int, context: Context) -> LayerTime:
        return time

    step = step_on_machine(scenario, SystemLayers(row["strategy"], always, with_shared=True))
    parts = step.parts(StepLoad(float(row["tokens"]), CONTEXT))
    found = {name: float(seconds) for name, seconds in parts.items()}
    return sum(found.values()), found


def rate(row: dict[str, str]) -> float:
    return float(row["token_layers_per_s"])


if __name__ == "__main__":
    make_tables(HERE, [Table("deployed", rows, digits=4)], study_options(__doc__).parse_args())
