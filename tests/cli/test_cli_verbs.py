"""Every verb end to end on a tiny scenario: what it writes, and that its figures hang together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from small_plan import LAYERS, some_shares
from typer.testing import Result

from jaxmoe.placement import Placement, read_plan, write_plan

# Pictures are rendered of every verb on meshes, wafers and a switch; other tests draw the same.
pytestmark = pytest.mark.usefixtures("unrendered")

SECONDS = {
    "compute_s", "dispatch_s", "combine_s", "total_s", "p95_total_s",
    "best_compute_s", "best_dispatch_s", "best_combine_s", "best_total_s", "best_p95_total_s",
    "des_total_s", "des_model_total_s",
}  # fmt: skip
ABOUT = {
    "layer_id",
    "exchange",
    "best_exchange",
    "bottleneck_node",
    "bottleneck_link",
    "bottleneck_stage",
    "limit",
    "best_limit",
}
STANDARD = ["tp", "tp_both_ways", "ep_random", "ep_balanced", "ep", "hybrid", "hybrid_ring", "hybrid_complete"]
PROVENANCE = {"command", "scenario", "seed", "versions", "device", "trace", "evaluation", "layer_ids", "wall_s"}
PICTURES = {"mesh_loads.png", "latency_by_layer.png", "breakdown.png", "model_vs_simulation.png"}


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


def names_in(out):
    return {file.name for file in out.iterdir()}


class Evaluated(NamedTuple):
    """One run of `evaluate`, that many tests look at."""

    scenario: Path
    plan: Path
    out: Path
    result: Result

    @property
    def summary(self):
        return summary_of(self.out)


@pytest.fixture(scope="module")
def evaluated(run, kept_scenario, tmp_path_factory) -> Evaluated:
    folder = tmp_path_factory.mktemp("evaluated")
    plan, out = folder / "mine.npz", folder / "out"
    write_plan(plan, Placement(some_shares(), (2, 2), "sharded", LAYERS))
    result = run("evaluate", kept_scenario, "--plan", plan, "--plan", f"again={plan}", "--out", out)
    assert result.exit_code == 0, result.output
    return Evaluated(kept_scenario, plan, out, result)


def test_evaluate_writes_summary_table_and_pictures(run, evaluated, tmp_path):
    scenario, plan, out, result = evaluated
    assert names_in(out) == {"summary.json", "loads.npz", *PICTURES}
    assert all(name in result.stdout for name in [*STANDARD, "mine", "again"])
    summary = evaluated.summary
    assert summary.keys() >= PROVENANCE | {"totals", "best", "bound_s", "exchanges", "agreement"}
    assert summary["layer_ids"] == [3, 5]
    assert summary["versions"].keys() == {"jaxmoe", "jax", "jaxlib", "numpy", "python"}
    assert summary["trace"]["path"] == "synthetic"
    assert summary["scenario"]["hardware"]["link"]["bandwidth_GB_per_s"] == 10
    assert [*summary["strategies"]] == [*STANDARD, "mine", "again"]
    assert run("report", out, "--out", tmp_path / "page.html").exit_code == 0
    assert summary["command_line"] == f"jaxmoe evaluate {scenario} --plan {plan} --plan again={plan} --out {out}"
    for strategy in summary["strategies"].values():
        assert strategy["mean"].keys() == SECONDS
        assert [layer["layer_id"] for layer in strategy["layers"]] == [3, 5]
        assert all(layer.keys() == SECONDS | ABOUT for layer in strategy["layers"])
        assert strategy["energy"] is None  # the machine states none
    assert "energy" not in result.output


def test_figures_of_a_summary_hang_together(evaluated):
    summary = evaluated.summary
    for name, strategy in summary["strategies"].items():
        for layer in strategy["layers"]:
            parts = layer["dispatch_s"] + layer["compute_s"] + layer["combine_s"]
            assert parts == pytest.approx(layer["total_s"])
            parts = layer["best_dispatch_s"] + layer["best_compute_s"] + layer["best_combine_s"]
            assert parts == pytest.approx(layer["best_total_s"])
            assert layer["des_total_s"] == pytest.approx(layer["des_model_total_s"], rel=0.3)
        times = [layer["total_s"] for layer in strategy["layers"]]
        assert summary["totals"][name] == pytest.approx(sum(times))
        assert strategy["mean"]["total_s"] == pytest.approx(np.mean(times))
    best = summary["best"][0]
    assert best["total_s"] == min(
        s["layers"][0]["best_total_s"] for name, s in summary["strategies"].items() if name != "hybrid_ring"
    )
    assert best["exchange"] == summary["strategies"][best["strategy"]]["layers"][0]["best_exchange"]
    # One layer of this plan is tensor parallel, so a ring serves it.
    assert summary["strategies"]["mine"]["layers"][0] == summary["strategies"]["tp_both_ways"]["layers"][0]


@pytest.mark.slow
def test_every_strategy_is_scored_under_every_exchange_that_may_be_chosen(run, scenario, out):
    change = ("tuning.exchanges=[reduce_scatter, fewest_hops_tree, rings]", "costs.exchange=rings_2")
    result = run("evaluate", scenario, "--set", change[0], "--set", change[1], "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert summary["exchanges"] == ["rings_2", "reduce_scatter", "fewest_hops_tree"]
    for name, strategy in summary["strategies"].items():
        if name == "hybrid_ring":
            assert (strategy["comparable"], strategy["under"]) == (False, {})
            continue
        assert [*strategy["under"]] == summary["exchanges"]
        assert strategy["mean"]["best_total_s"] <= min(strategy["under"].values()) * (1 + 1e-6)
        for layer in strategy["layers"]:
            assert layer["best_exchange"] in {layer["exchange"], *summary["exchanges"]}
            assert layer["exchange"] in ("ring", "ring_both_ways", "rings_2", "rings_1x2_both_ways")
    assert summary["strategies"]["ep"]["under"]["rings_2"] == summary["strategies"]["ep"]["mean"]["total_s"]
    assert "best exchange" in result.stdout


def test_rings_that_leave_traffic_out_are_compared_with_nothing(run, scenario, out):
    result = run("evaluate", scenario, "--set", "costs.exchange=rings_2_alone", "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert "rings_2_alone" not in summary["exchanges"]
    ep = summary["strategies"]["ep"]
    assert (ep["comparable"], ep["under"]) == (False, {})
    assert "without what the groups send each other" in ep["note"]


@pytest.mark.slow
def test_best_exchange_is_chosen_layer_by_layer(run, evaluated, scenario, out):
    own = evaluated.summary["strategies"]["hybrid"]
    seconds = {}
    for name in evaluated.summary["exchanges"]:
        run("evaluate", scenario, "--set", f"costs.exchange={name}", "--out", out)
        seconds[name] = [layer["total_s"] for layer in summary_of(out)["strategies"]["hybrid"]["layers"]]
    fastest = [min(seconds, key=lambda name, at=row: seconds[name][at]) for row in range(2)]
    assert [layer["best_exchange"] for layer in own["layers"]] == fastest
    assert [layer["best_total_s"] for layer in own["layers"]] == pytest.approx(
        [seconds[name][row] for row, name in enumerate(fastest)]
    )


@pytest.mark.slow
def test_a_schedule_is_simulated(run, scenario, out):
    result = run("evaluate", scenario, "--set", "schedule=pipelined(2)", "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)["strategies"]
    for name in ("tp", "ep_balanced"):
        mean = summary[name]["mean"]
        assert mean["total_s"] < (mean["dispatch_s"] + mean["compute_s"] + mean["combine_s"]) * (1 - 1e-6)
        assert mean["des_total_s"] == pytest.approx(mean["des_model_total_s"], rel=0.03)


@pytest.mark.slow
def test_a_limit_is_simulated_stage_by_stage(run, scenario, out):
    result = run("evaluate", scenario, "--set", "schedule=overlap", "--out", out)
    assert result.exit_code == 0, result.output
    mean = summary_of(out)["strategies"]["tp"]["mean"]
    stages = mean["dispatch_s"] + mean["compute_s"] + mean["combine_s"]
    assert mean["total_s"] < stages * (1 - 1e-6)
    assert mean["des_total_s"] == pytest.approx(mean["des_model_total_s"], rel=0.01)
    assert mean["des_model_total_s"] > mean["total_s"]


MEASURED = "tokens,columns,seconds\n1,1,1e-6\n1,128,2e-6\n8,1,2e-6\n8,128,9e-6\n"
CACHE = "[{name: cache, bandwidth_GB_per_s: 100}, {name: ddr, bandwidth_GB_per_s: 20, nodes_per_channel: 2}]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        f"hardware.memory={CACHE}",
        "hardware.die.gemm={kind: tiled, tile_tokens: 4, tile_columns: 24, startup_ns: 90}",
        "hardware.die.gemm={kind: measured, path: times.csv}",
        "costs.metadata_bytes_per_choice=100",
    ],
)
def test_model_and_simulator_agree_on_all_that_dies_may_be(
    run, evaluated, scenario, out, tmp_path, monkeypatch, change
):
    (tmp_path / "times.csv").write_text(MEASURED)
    monkeypatch.chdir(tmp_path)
    result = run("evaluate", scenario, "--set", change, "--out", out)
    assert result.exit_code == 0, result.output
    before, after = evaluated.summary["strategies"], summary_of(out)["strategies"]
    stage = "dispatch_s" if change.startswith("costs") else "compute_s"
    for name, strategy in after.items():
        assert strategy["mean"][stage] > before[name]["mean"][stage]
        # Communication of few small messages differs by a chunk.
        slack = 0.1 * (strategy["mean"]["dispatch_s"] + strategy["mean"]["combine_s"])
        assert strategy["mean"]["des_total_s"] == pytest.approx(strategy["mean"]["des_model_total_s"], abs=slack)


SWITCH = (
    "{kind: switch, nodes: 4, link: {bandwidth_GB_per_s: 10}, die: {compute_TFLOPs_per_s: 1}, router: {chunk_B: 64}}"
)


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_machines_that_are_no_meshes(run, scenario, tmp_path):
    """A plan is tuned for such a machine, and every verb takes it."""
    change = ("--set", f"hardware={SWITCH}", "--set", "tuning.exchanges=[rings]", "--layers", "5")
    plan = tmp_path / "tune" / "plan.npz"
    for verb, given in (("tune", ()), ("evaluate", ("--plan", plan)), ("validate", ("--plan", plan))):
        result = run(verb, scenario, *change, *given, "--out", tmp_path / verb)
        assert result.exit_code == 0, result.output
        assert summary_of(tmp_path / verb)["agreement"]["communication"]["mean_abs_error_percent"] < 20
        assert "mesh_loads.png" not in names_in(tmp_path / verb)
        assert ("network_loads.png" in names_in(tmp_path / verb)) == (verb != "validate")
    assert read_plan(plan).mesh_shape is None
    strategies = summary_of(tmp_path / "evaluate")["strategies"]
    assert strategies["hybrid_complete"]["layers"][0]["exchange"] == "rings_2_both_ways"
    assert max(strategies["tp"]["layers"][0]["bottleneck_link"]) == 4  # the switch


def test_a_plan_is_compared_under_the_exchange_that_it_states(run, scenario, tmp_path, out):
    halves = some_shares()[1]
    share, stated = np.stack([halves, halves]), ("reduce_scatter", "rings_2")
    write_plan(tmp_path / "stated.npz", Placement(share, (2, 2), "sharded", (3, 5), exchange=stated))
    write_plan(tmp_path / "silent.npz", Placement(share, (2, 2), "sharded", (3, 5)))
    run("evaluate", scenario, "--plan", tmp_path / "stated.npz", "--plan", tmp_path / "silent.npz", "--out", out)
    summary = summary_of(out)["strategies"]
    assert [layer["exchange"] for layer in summary["stated"]["layers"]] == [*stated]
    assert [layer["exchange"] for layer in summary["silent"]["layers"]] == ["lowest_host"] * 2
    under = summary["silent"]["under"]["reduce_scatter"]
    run("evaluate", scenario, "--plan", tmp_path / "silent.npz", "--set", "costs.exchange=reduce_scatter", "--out", out)
    again = summary_of(out)["strategies"]["silent"]
    assert again["mean"]["total_s"] == pytest.approx(under)
    assert again["layers"][0]["total_s"] == pytest.approx(summary["stated"]["layers"][0]["total_s"])


def test_the_name_of_a_usual_strategy_stands_for_a_plan(run, scenario, tmp_path):
    for verb, expected in (("evaluate", STANDARD), ("validate", ["ep"])):
        result = run(verb, scenario, "--plan", "ep", "--out", tmp_path / verb)
        assert result.exit_code == 0, result.output
        assert [*summary_of(tmp_path / verb)["strategies"]] == expected


@pytest.mark.slow
def test_evaluate_gives_the_same_figures_again(run, evaluated, out):
    plan = evaluated.plan
    run("evaluate", evaluated.scenario, "--plan", plan, "--plan", f"again={plan}", "--out", out)
    first, second = evaluated.summary, summary_of(out)
    others = {"wall_s", "command_line", "peak_memory_B"}
    assert first.keys() == second.keys() > others
    assert all(first[key] == second[key] for key in first.keys() - others)


def test_wall_time_keeps_compiling_apart(evaluated):
    wall = evaluated.summary["wall_s"]
    assert wall["stages"].keys() == {"load", "evaluate", "bound", "simulate", "draw"}
    spent = sum(stage["run_s"] + stage["compile_s"] for stage in wall["stages"].values())
    assert 0 < spent <= wall["total"]
    assert all(stage["run_s"] >= 0 for stage in wall["stages"].values())


def test_layers_and_overrides_choose_what_is_run(run, scenario, plan, out):
    result = run("evaluate", scenario, "--plan", plan, "--layers", "5", "--set", "seed=7", "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert summary["layer_ids"] == [5]
    assert summary["seed"] == 7


@pytest.mark.slow
def test_one_layer_gets_its_part_of_the_memory_only(run, scenario, out):
    # Tensor parallelism puts an expert's 98.3 kB on every node, in each of the model's two layers.
    given = ("evaluate", scenario, "--layers", "5", "--out", out, "--set")
    result = run(*given, "hardware.die.memory_capacity_GB=200e-6")
    assert result.exit_code == 0, result.output
    assert summary_of(out)["strategies"]["tp"]["fits"]
    result = run(*given, "hardware.die.memory_capacity_GB=150e-6")
    assert result.exit_code == 2, result.output
    assert "need 0.0003932 GB" in result.stderr


def test_strategy_that_does_not_fit_stays_in_the_table(run, scenario, out):
    roomy = "hardware.dies=[{nodes: [0], memory_capacity_GB: 1}]"  # for all experts, which no usual plan puts there
    small = "hardware.die.memory_capacity_GB=100e-6"
    result = run("evaluate", scenario, "--set", small, "--set", roomy, "--out", out)
    assert result.exit_code == 0, result.output
    assert not summary_of(out)["strategies"]["tp"]["fits"]
    assert summary_of(out)["best"][0]["strategy"] is None
    assert "tp *" in result.stdout
    assert "* does not fit the memory" in " ".join(result.stdout.split())
    assert "needs" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("change", ["router.switching=cut_through", "router.chunk_B=null", "ports.ejection_GB_per_s=5"])
def test_every_kind_of_network_is_replayed(run, scenario, out, change):
    result = run("evaluate", scenario, "--set", f"hardware.{change}", "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert summary["strategies"]["tp"]["mean"]["des_total_s"] > 0
    assert summary["agreement"]["communication"]["mean_abs_error_percent"] < 20


WAFERS = "{kind: wafers, wafer_shape: [1, 2], grid: [2, 1], die: {compute_TFLOPs_per_s: 1}, routing: yx, "
WAFERS += "link: {bandwidth_GB_per_s: 10}, border: {bandwidth_GB_per_s: 2}, router: {chunk_B: 64}}"


@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize("change", [pytest.param("hardware.routing=yx", marks=pytest.mark.slow), f"hardware={WAFERS}"])
@pytest.mark.parametrize(
    "verb", [*(pytest.param(verb, marks=pytest.mark.slow) for verb in ("tune", "evaluate")), "validate"]
)
def test_every_mesh_is_tuned_for_judged_and_replayed(run, scenario, plan, out, verb, change):
    result = run(verb, scenario, "--plan", plan, "--set", change, "--out", out)
    assert result.exit_code == 0, result.output
    assert 0 < summary_of(out)["agreement"]["communication"]["mean_abs_error_percent"] < 20


def test_validate_reports_every_batch_of_both_worlds(run, scenario, plan, out):
    result = run("validate", scenario, "--plan", plan, "--batch-tokens", "4,8", "--out", out)
    assert result.exit_code == 0, result.output
    assert names_in(out) == {"summary.json", "model_vs_simulation.png"}
    summary = summary_of(out)
    assert summary.keys() >= PROVENANCE
    sizes = summary["strategies"]["mine"]["batch_tokens"]
    assert sizes.keys() == {"4", "8"}
    for size in sizes.values():
        assert [len(layer["batches"]) for layer in size["layers"]] == [2, 2]
        batch = size["layers"][0]["batches"][0]
        assert batch["model"].keys() == {"dispatch_s", "compute_s", "combine_s", "total_s"}
        assert batch["simulated"].keys() == batch["model"].keys() | {"free_running_s"}
        assert batch["simulated"]["free_running_s"] <= batch["simulated"]["total_s"] * (1 + 1e-9)
        assert batch["model"]["compute_s"] == pytest.approx(batch["simulated"]["compute_s"], rel=1e-4)
    assert summary["agreement"]["total"]["points"] == 8
    assert summary["agreement"]["total"]["mean_abs_error_percent"] < 20


def test_validate_replays_the_batches_that_evaluate_replays(run, evaluated, out):
    plan = evaluated.plan
    run("validate", evaluated.scenario, "--plan", plan, "--plan", f"again={plan}", "--standard", "--out", out)
    judged, replayed = evaluated.summary["strategies"], summary_of(out)["strategies"]
    assert judged.keys() == replayed.keys()
    for name in judged:
        mean = replayed[name]["batch_tokens"]["8"]["mean"]
        assert mean["simulated"]["total_s"] == pytest.approx(judged[name]["mean"]["des_total_s"])
        assert mean["model"]["total_s"] == pytest.approx(judged[name]["mean"]["des_model_total_s"])


def test_tune_writes_a_plan_that_evaluate_judges_alike(run, scenario, out, tmp_path):
    result = run("tune", scenario, "--out", out)
    assert result.exit_code == 0, result.output
    files = {"summary.json", "loads.npz", "plan.npz", "speedups.png", "convergence.png", *PICTURES}
    assert names_in(out) - {"plan_gathered.npz"} == files
    summary, plan = summary_of(out), read_plan(out / "plan.npz")
    assert plan.layer_ids == (3, 5)
    assert plan.meta.keys() >= {"model", "scenario", "seed", "version", "trace", "stages_s"}
    tuning = summary["tuning"]
    assert tuning["stages"].keys() == {"relaxed_s", "rounded_s", "rebalanced_s", "searched_s", "final_s"}
    assert tuning["stopped"] is None
    assert tuning["gap"] >= -1e-6
    assert len(tuning["history"]["descent"]["step"]) == len(tuning["history"]["descent"]["mean_s"])
    run("evaluate", scenario, "--plan", f"kept={out / 'plan.npz'}", "--out", tmp_path / "again")
    again = summary_of(tmp_path / "again")["strategies"]["kept"]["mean"]
    assert again == pytest.approx(summary["strategies"]["tuned"]["mean"])


@pytest.mark.slow
def test_layers_that_tensor_parallelism_serves_faster_are_told(run, scenario, out):
    result = run("tune", scenario, "--set", "hardware.link.bandwidth_GB_per_s=1e6", "--out", out)
    assert result.exit_code == 0, result.output
    strategies = summary_of(out)["strategies"]
    assert "in 2 of 2 layers, where a strategy or hybrid is at least as fast" in strategies["tuned"]["note"]
    assert strategies["tuned"]["mean"] == strategies["tp_both_ways"]["mean"]
    assert strategies["tuned_gathered"]["mean"]["total_s"] > strategies["tuned"]["mean"]["total_s"]
    assert "is faster than tuned" not in result.stderr
    assert read_plan(out / "plan.npz").exchange != read_plan(out / "plan_gathered.npz").exchange


def test_module_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "jaxmoe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("jaxmoe ")


@pytest.mark.slow
def test_whole_model_times_are_told_where_the_model_gives_what_they_need(run, scenario, out, configs):
    model = configs / "models" / "mixtral-8x7b.yaml"
    result = run("evaluate", scenario, "--set", f"model={model}", "--layers", "0,16", "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    whole, moe = summary["whole_model"], summary["strategies"]["tp"]["mean"]["total_s"]
    assert (whole["moe_layers"], whole["moe_layers_timed"], whole["batch_tokens"]) == (32, 2, 8)
    # 2 FLOPs for each of 41.9 million weights and each of 8192 products with 1024 tokens, 32 layers, 4 TFLOP/s.
    assert whole["attention_s"] == pytest.approx(32 * 8 * 2 * (2 * 40 * 128 * 4096 + 1024 * 8192) / 4e12)
    assert whole["dense_s"] == whole["shared_s"] == 0
    assert whole["tbt_s"]["tp"] == pytest.approx(32 * moe + whole["attention_s"])
    step = whole["best"]["tp"]
    best = summary["strategies"]["tp"]["mean"]["best_total_s"]
    assert step["tokens_per_s_device"] == pytest.approx(8 / 4 / (32 * best + whole["attention_s"]))
    assert "32 MoE layers (as the mean of 2 that are timed), attention over 1024 tokens of context" in whole["counted"]
    assert "tokens/s" in result.stdout


def test_a_model_without_attention_has_no_whole_model_times(evaluated):
    assert "attention is not given" in evaluated.summary["whole_model"]["missing"]
