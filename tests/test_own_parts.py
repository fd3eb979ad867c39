"""Parts of a user's own, each one function or class and one registry entry, as commands take them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from typer.testing import CliRunner, Result

from jaxmoe import registry
from jaxmoe.cli.app import app
from jaxmoe.config import load_scenario
from jaxmoe.config.base import ConfigError
from jaxmoe.config.build import build_layer_model
from jaxmoe.experiment.metrics import Metric
from jaxmoe.hardware.kernels import AbstractGemm
from jaxmoe.placement.engine_files import read_slot_plan, write_slot_plan
from jaxmoe.placement.engine_formats import EngineFormat, FilePlacement
from jaxmoe.placement.named import PlacementStrategy
from jaxmoe.placement.slots import SlotPlan
from jaxmoe.registry import ENGINES, KERNEL_MODELS, METRICS, OPTIMISERS, STRATEGIES, TRACES
from jaxmoe.traces import Hints, read_any, synthetic_trace
from jaxmoe.traces.formats.source import Format
from jaxmoe.tune.gradient_free import RandomSettings, random_search
from jaxmoe.tune.optimisers import Optimiser


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


@pytest.fixture
def add() -> Iterator[Callable[..., None]]:
    """Registers a part for one test."""
    added: list[tuple[registry.Registry, str]] = []

    def register(parts: registry.Registry, name: str, part: object) -> None:
        parts.register(name, part)
        added.append((parts, name))

    yield register
    for parts, name in added:
        parts.remove(name)


@pytest.fixture(autouse=True)
def _unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())


def backwards(counts, topology, settings):
    """Expert e on node -e."""
    layers, experts = counts.shape
    return np.broadcast_to(np.eye(topology.num_nodes)[-np.arange(experts) % topology.num_nodes], (layers, experts, 4))


def test_a_strategy_is_one_of_those_that_are_compared_and_swept(add, scenario, tmp_path):
    add(STRATEGIES, "backwards", backwards)
    add(STRATEGIES, "backwards_ring", PlacementStrategy(backwards, "reduce_scatter", note="from the last node on"))
    result = run("evaluate", scenario, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    strategies = summary_of(tmp_path / "out")["strategies"]
    assert {layer["exchange"] for layer in strategies["backwards"]["layers"]} == {"lowest_host"}
    assert {layer["exchange"] for layer in strategies["backwards_ring"]["layers"]} == {"reduce_scatter"}
    assert strategies["backwards_ring"]["note"] == "from the last node on"
    study = tmp_path / "study.yaml"
    study.write_text(f"scenario: {scenario}\naxes: {{strategy: [ep, backwards]}}\n")
    assert run("sweep", study, "--out", tmp_path / "swept").exit_code == 0


def test_shares_of_another_shape_are_refused(add, scenario, tmp_path):
    add(STRATEGIES, "flat", lambda counts, topology, settings: np.ones((2, 4)))
    result = run("evaluate", scenario, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "strategy flat has shares of shape (2, 4), expected [layer, expert, node]" in " ".join(result.stderr.split())


class Startup(AbstractGemm):
    """Every product starts up anew, whatever its size."""

    startup_us: Float[Array, ""]

    def seconds(self, rows, part, present, flops, columns, gemms):
        return rows * part / flops + present * gemms * self.startup_us * 1e-6


class Witnessed(Startup):
    """The same, told to the simulator."""

    def witness(self, flops, columns, gemms):
        return lambda node, tokens, part: tokens * part / flops[node] + gemms * float(self.startup_us) * 1e-6


@pytest.mark.parametrize(("kind", "warned"), [(Startup, True), (Witnessed, False)])
def test_a_kernel_model_is_named_in_a_scenario_and_replayed(add, scenario, tmp_path, kind, warned):
    add(KERNEL_MODELS, "startup", kind)
    chosen = "hardware.die.gemm={kind: startup, startup_us: 20}"
    model = build_layer_model(load_scenario(scenario, [chosen]), "sharded")
    assert isinstance(model.machine.die.gemm, kind)
    result = run("validate", scenario, "--plan", "ep", "--set", chosen, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert ("states no times of its own for the simulator" in " ".join(result.stderr.split())) == warned
    (sizes,) = summary_of(tmp_path / "out")["strategies"]["ep"]["batch_tokens"].values()
    for batch in (batch for layer in sizes["layers"] for batch in layer["batches"]):
        assert batch["simulated"]["compute_s"] == pytest.approx(batch["model"]["compute_s"], rel=1e-5)
        assert batch["model"]["compute_s"] > 20e-6


@pytest.mark.parametrize(
    ("gemm", "told"),
    [
        ("{kind: startup}", "startup_us is missing"),
        ("{kind: startup, startup_us: 1, more: 2}", "more is not a known key"),
        ("{kind: startup, startup_us: soon}", 'startup_us is "soon"; expected a number'),
        ("{kind: starting}", "expected one of 'tiled', 'measured', 'fitted', 'startup'"),
    ],
)
def test_what_a_kernel_model_is_told_is_checked(add, scenario, gemm, told):
    add(KERNEL_MODELS, "startup", Startup)
    with pytest.raises(ConfigError) as error:
        build_layer_model(load_scenario(scenario, [f"hardware.die.gemm={gemm}"]), "sharded")
    assert told in str(error.value)


def test_a_metric_is_a_column_of_sweeps(add, scenario, tmp_path):
    add(METRICS, "spread", Metric("spread", lambda seen: seen.times.total.std() / seen.times.total.mean()))
    study = tmp_path / "study.yaml"
    study.write_text(f"scenario: {scenario}\naxes: {{strategy: [ep, tp]}}\nmetrics: [total, spread]\n")
    result = run("sweep", study, "--pareto", "total,spread", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    parquet = pytest.importorskip("pyarrow.dataset")
    rows = parquet.dataset(tmp_path / "out" / "points").to_table().to_pylist()
    assert all(row["spread"] > 0 for row in rows)
    assert run("report", tmp_path / "out", "--out", tmp_path / "page.html").exit_code == 0
    assert "spread" in (tmp_path / "page.html").read_text()


def test_two_metrics_have_no_column_in_common(add, scenario, tmp_path):
    add(METRICS, "all", Metric("total_s", lambda seen: jnp.zeros(())))
    study = tmp_path / "study.yaml"
    study.write_text(f"scenario: {scenario}\naxes: {{strategy: [ep, tp]}}\n")
    result = run("sweep", study, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "metric 'all' has the column 'total_s' of 'total'; give it another one" in " ".join(result.stderr.split())


def test_an_optimiser_is_named_by_the_command(add, scenario, tmp_path):
    add(OPTIMISERS, "lucky", Optimiser(random_search, RandomSettings))
    result = run("tune", scenario, "--optimiser", "lucky", "--time-limit", "1", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert summary_of(tmp_path / "out")["tuning"]["optimiser"] == "lucky"


def test_an_optimiser_says_which_packages_it_needs(add, scenario, tmp_path):
    add(OPTIMISERS, "lucky", Optimiser(random_search, RandomSettings, needs={"no_such_package": "luck"}))
    result = run("tune", scenario, "--optimiser", "lucky", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install 'no_such_package'" in " ".join(result.stderr.split())


def test_a_placement_file_is_read_and_written(add, tmp_path):
    mine = EngineFormat(
        ".json",
        lambda content: isinstance(content, dict) and "mine" in content,
        lambda content, hints, ranks: FilePlacement(np.array(content["mine"], np.int64)),
        lambda plan: json.dumps({"mine": plan.slots.tolist()}),
    )
    add(ENGINES, "mine", mine)
    plan = SlotPlan(np.array([[0, 1, 2, 3], [3, 2, 1, 0]]), 2, 4, (0, 1))
    lost = write_slot_plan(tmp_path / "plan.json", "mine", plan)
    assert lost == ["mine does not state the 2 ranks: start the engine with as many"]
    read = read_slot_plan(tmp_path / "plan.json", Hints(num_experts=4), 2)
    assert read.format == "mine"
    np.testing.assert_array_equal(read.plan.slots, plan.slots)


def test_a_trace_format_is_told_by_its_content(add, tmp_path):
    made = synthetic_trace(16, [0], 4, 2, skew=0.5, coactivation=0.0, reuse=0.0, seed=0)
    mine = Format("mine", lambda source: source.head.startswith(b"MINE"), lambda source, hints: made, lambda *_: [])
    add(TRACES, "mine", mine)
    (tmp_path / "trace.bin").write_bytes(b"MINE")
    read = read_any(tmp_path / "trace.bin")
    assert (read.format, read.content) == ("mine", made)
