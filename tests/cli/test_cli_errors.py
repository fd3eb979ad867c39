"""Bad input gives one clear message and exit code 2, and leaves nothing behind."""

import numpy as np
import pytest
from refusal import refused
from small_plan import LAYERS, some_shares

from jaxmoe.cli import tune
from jaxmoe.placement import Placement, write_plan
from jaxmoe.run_folders import RECORD
from jaxmoe.traces import synthetic_trace, write_trace


def write_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def a_trace(layers=LAYERS, experts=4, top_k=2, tokens=64):
    return synthetic_trace(tokens, layers, experts, top_k, skew=0.5, coactivation=0.0, reuse=0.0, seed=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("hardware: [", "line"), ("- a list", "mapping"), ("hardwear: {}\n", "hardwear")],
)
def test_scenario_that_is_none(run, tmp_path, out, text, expected):
    (tmp_path / "bad.yaml").write_text(text)
    refused(run("tune", tmp_path / "bad.yaml", "--out", out), out, "bad.yaml", expected)


def test_missing_scenario(run, tmp_path, out):
    refused(run("evaluate", tmp_path / "none.yaml", "--out", out), out, "none.yaml", "no such file")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hardware.link.bandwidth_GB_per_s=-5", "is -5; expected a number greater than 0"),
        ("hardware.link.bandwidth_GB_per_s=0", "is 0; expected a number greater than 0"),
        ("hardware.link.bandwith=5", "not a known key"),
        ("hardware.kind=tours", "hardware.kind is \"tours\"; expected one of 'mesh', 'wafers'"),
        ("tuning.exchanges=[rings_2]", "tuning.exchanges is 'rings_2', which does not suit the machine"),
        ("costs.exchange=rings_3", "costs.exchange is 'rings_3', which does not suit the machine"),
        ("costs.exchange=near", 'costs.exchange is "near"; expected one of lowest_host'),
        ("costs.exchange=coner_host", "Did you mean corner_host? Write one of them"),
        ("workload.trace={kind: file, path: t.npz}", "workload.trace.path is"),
        ("costs.gather=fewest_hops", "Write exchange: fewest_hops"),
        ("hardware.die.gemm={kind: measured, path: none.csv}", "none.csv: cannot be read"),
        ("hardware.die=null", "expected the compute and memory of a node as a mapping"),
        ("nonsense", "not an override"),
    ],
)
def test_bad_override(run, scenario, out, override, expected):
    refused(run("evaluate", scenario, "--set", override, "--out", out), out, expected)


def test_brackets_in_a_message_are_text_and_not_markup(run, scenario, out):
    refused(run("evaluate", scenario, "--set", "[red]=1", "--out", out), out, "[red]")


def test_colons_in_a_message_are_text_and_no_emoji(run, scenario, out):
    refused(run("evaluate", scenario, "--set", "model=root:x:0", "--out", out), out, "root:x:0")


def test_trace_with_ids_out_of_range(run, scenario, tmp_path, out):
    experts = a_trace().experts.copy()
    experts[5, 1, 0] = 9
    path = write_npz(tmp_path / "t.npz", experts=experts, num_experts=4, layer_ids=np.array(LAYERS))
    refused(run("evaluate", scenario, "--trace", path, "--out", out), out, "t.npz", "layer 5, token 5", "expert 9")


def test_truncated_trace(run, scenario, tmp_path, out):
    path = tmp_path / "t.npz"
    write_trace(path, a_trace())
    path.write_bytes(path.read_bytes()[:-200])
    refused(run("evaluate", scenario, "--trace", path, "--out", out), out, "t.npz", "npz")


def test_missing_trace(run, scenario, tmp_path, out):
    result = run("evaluate", scenario, "--trace", tmp_path / "t.npz", "--out", out)
    refused(result, out, "--trace is", "t.npz", "no such file")


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (a_trace(layers=(0, 1)), ("[0, 1]", "[3, 5]", "model.moe_layer_ids")),
        (a_trace(top_k=1), ("1 experts", "model.top_k is 2")),
        (a_trace(experts=6), ("model.num_experts is 4", "the trace has 6")),
        (a_trace(tokens=4), ("4 tokens", "workload.batch_tokens is 8")),
    ],
    ids=["layers", "top_k", "experts", "too short"],
)
def test_trace_of_another_model(run, scenario, tmp_path, out, trace, expected):
    write_trace(tmp_path / "t.npz", trace)
    refused(run("tune", scenario, "--trace", tmp_path / "t.npz", "--out", out), out, "t.npz", *expected)


@pytest.mark.slow
def test_trace_of_more_layers_is_taken(run, scenario, tmp_path, out):
    write_trace(tmp_path / "t.npz", a_trace(layers=(1, 3, 5, 7)))
    assert run("evaluate", scenario, "--trace", tmp_path / "t.npz", "--out", out).exit_code == 0


def test_plan_whose_shares_do_not_sum_to_one(run, scenario, tmp_path, out):
    share = some_shares()
    share[1, 2] *= 0.5
    path = write_npz(tmp_path / "p.npz", share=share, mesh_shape=[2, 2], layer_ids=LAYERS)
    refused(run("evaluate", scenario, "--plan", path, "--out", out), out, "p.npz", "expert 2 in layer 5 sum to 0.5")


def test_truncated_plan(run, scenario, plan, out):
    plan.write_bytes(plan.read_bytes()[:100])
    refused(run("validate", scenario, "--plan", plan, "--out", out), out, "mine.npz", "npz")


def test_plan_that_does_not_fit_memory(run, scenario, plan, out):
    tight = "hardware.die.memory_capacity_GB=100e-6"
    result = run("evaluate", scenario, "--plan", plan, "--set", tight, "--out", out)
    refused(result, out, "mine.npz", "node 0 needs", "memory")


def test_machine_that_no_plan_fits_cannot_be_tuned_for(run, scenario, out):
    refused(run("tune", scenario, "--set", "hardware.die.memory_capacity_GB=100e-6", "--out", out), out, "memory")


def test_machine_that_no_plan_fits_is_told_what_is_needed_before_any_work(run, scenario, out, monkeypatch):
    """Four experts of 3 x 64 x 32 weights of 2 bytes; four nodes of 5e-6 GB, a half of it for each of two layers."""
    monkeypatch.setattr("jaxmoe.cli.tune.compare", lambda *_: pytest.fail("work was begun"))
    given = ("--set", "hardware.die.memory_capacity_GB=5e-6", "--out", out)
    said = (
        "the 4 experts of a layer need",
        "all 4 nodes together have 1e-05 GB for each layer",
        "die.memory_capacity_GB",
    )
    for verb in ("evaluate", "tune"):
        refused(run(verb, scenario, *given), out, *said)


def test_none_of_the_strategies_fits_where_another_plan_may(run, scenario, out):
    """The first node alone has room, for all experts."""
    tight = "hardware.dies=[{nodes: [0], memory_capacity_GB: 1}]"
    result = run("evaluate", scenario, "--set", "hardware.die.memory_capacity_GB=1e-7", "--set", tight, "--out", out)
    assert result.exit_code == 0, result.output
    assert "none of these fits the memory; jaxmoe tune looks for a plan that does" in result.stdout


@pytest.mark.parametrize(
    ("share", "shape", "layers", "expected"),
    [
        (some_shares(), (4, 1), LAYERS, ("[4, 1]", "hardware.mesh_shape is [2, 2]")),
        (some_shares(), (2, 2), (3, 4), ("[3, 4]", "[3, 5]")),
        (some_shares()[:, :3], (2, 2), LAYERS, ("3 experts", "model.num_experts is 4")),
    ],
    ids=["mesh", "layers", "experts"],
)
def test_plan_for_something_else(run, scenario, tmp_path, out, share, shape, layers, expected):
    write_plan(tmp_path / "p.npz", Placement(share, shape, "sharded", layers))
    refused(run("tune", scenario, "--plan", tmp_path / "p.npz", "--out", out), out, "p.npz", *expected)


def test_plan_whose_exchange_does_not_suit_the_machine(run, scenario, tmp_path, out):
    write_plan(tmp_path / "p.npz", Placement(some_shares(), (2, 2), "sharded", LAYERS, exchange=("ring", "rings_3")))
    refused(run("evaluate", scenario, "--plan", tmp_path / "p.npz", "--out", out), out, "p.npz", "rings_3", "4 nodes")


def test_plan_for_another_number_of_nodes(run, scenario, tmp_path, out):
    write_plan(tmp_path / "p.npz", Placement(np.full((2, 4, 5), 0.2, np.float32), None, "sharded", LAYERS))
    refused(run("evaluate", scenario, "--plan", tmp_path / "p.npz", "--out", out), out, "5 nodes", "the machine has 4")


def test_plan_that_is_neither_a_file_nor_a_strategy(run, scenario, out):
    refused(run("evaluate", scenario, "--plan", "tpp", "--out", out), out, "tpp: no such plan file", "tp, tp_both_ways")


def test_larger_batches_than_were_measured(run, scenario, plan, out, tmp_path):
    (tmp_path / "t.csv").write_text("tokens,columns,seconds\n8,128,1e-6\n")
    table = f"hardware.die.gemm={{kind: measured, path: {tmp_path / 't.csv'}}}"
    given = ("--plan", plan, "--set", table, "--batch-tokens", "16")
    refused(run("validate", scenario, *given, "--out", out), out, "16 tokens", "8 up to which")


def test_plan_with_a_name_that_is_taken(run, scenario, plan, out):
    refused(run("evaluate", scenario, "--plan", f"tp={plan}", "--out", out), out, "'tp' is taken")


@pytest.mark.parametrize("layers", ["9", "3,x"])
def test_layers_that_the_model_lacks(run, scenario, out, layers):
    refused(run("evaluate", scenario, "--layers", layers, "--out", out), out, "--layers", layers.split(",")[0])


@pytest.mark.parametrize("sizes", ["0", "8,many", "100"])
def test_batch_sizes_that_cannot_be(run, scenario, plan, out, sizes):
    refused(run("validate", scenario, "--plan", plan, "--batch-tokens", sizes, "--out", out), out, "--batch-tokens")


def test_validating_nothing(run, scenario, out):
    refused(run("validate", scenario, "--out", out), out, "--plan")


@pytest.mark.parametrize("below", ["", "run"])
def test_output_folder_that_is_a_file(run, scenario, tmp_path, below):
    (tmp_path / "taken").write_text("mine")
    result = run("evaluate", scenario, "--out", tmp_path / "taken" / below)
    assert result.exit_code == 2
    assert "--out: cannot write to the folder" in result.stderr
    assert (tmp_path / "taken").read_text() == "mine"


def test_output_folder_that_is_not_writable(run, scenario, out, monkeypatch):
    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("jaxmoe.run_folders.os.open", refuse)
    refused(run("evaluate", scenario, "--out", out), out, "--out", "Permission denied")


def test_usage_errors_exit_alike(run, scenario, out):
    assert run("evaluate", scenario).exit_code == 2
    assert run("evaluate", scenario, "--bogus", "--out", out).exit_code == 2


def test_verbose_shows_the_traceback(run, scenario, out):
    result = run("evaluate", scenario, "--set", "nonsense", "--out", out, "--verbose")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("verb", "name"), [("evaluate", "compare"), ("tune", "search")])
def test_ctrl_c_leaves_nothing_behind(run, scenario, out, monkeypatch, verb, name):
    monkeypatch.setattr(tune, name, interrupt)
    result = run(verb, scenario, "--out", out)
    assert result.exit_code == 130
    assert result.stderr == "interrupted; nothing was written\n"
    assert not out.parent.exists()


@pytest.mark.slow
def test_ctrl_c_while_drawing_leaves_whole_files_only(run, scenario, out, monkeypatch):
    monkeypatch.setattr("jaxmoe.cli.comparison_figures.plot_breakdown", interrupt)
    result = run("evaluate", scenario, "--out", out)
    assert result.exit_code == 130
    assert "complete in" in result.stderr
    assert {file.name for file in out.iterdir()} == {RECORD, "latency_by_layer.png"}
