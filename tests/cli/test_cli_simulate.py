"""`jaxmoe simulate`: what it runs, writes and prints, and what it refuses."""

import json

import numpy as np
import pytest
from refusal import refused

from jaxmoe.cli import simulate
from jaxmoe.placement import Placement, expert_parallel_balanced, write_plan
from jaxmoe.traces import write_trace
from jaxmoe.traces.statistics.counting import count_pairs
from jaxmoe.traces.synthetic import synthetic_trace

SYSTEM = ("--set", "system={name: hd_moe, experts: 1, rate: 0.5}")


def summary(out):
    return json.loads((out / "summary.json").read_text())


@pytest.mark.slow
def test_a_system_beside_its_plan(run, scenario, plan, out, tmp_path):
    target = tmp_path / "layer.json"
    given = ("--plan", plan, "--iterations", 5, "--replay", 2, "--timeline", target, "--wide")
    result = run("simulate", scenario, *SYSTEM, *given, "--out", out)
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == {"iterations.png", "summary.json"}
    for text in ("static", "hd_moe", "speed-up", "p95", "movement", "ring_both_ways x1, lowest_host x1"):
        assert text in result.stdout
    told = summary(out)
    static, system = told["runs"]["static"], told["runs"]["hd_moe"]
    assert len(system["total_s"]) == 5
    assert told["speedup"] == pytest.approx(sum(static["total_s"]) / sum(system["total_s"]))
    assert told["speedup"] != 1
    assert static["mean"]["movement_s"] == 0
    assert system["mean"]["movement_s"] > 0
    stages = sum(system["mean"][f"{name}_s"] for name in ("dispatch", "compute", "combine"))
    assert system["mean"]["total_s"] == pytest.approx(stages, rel=1e-5)  # the broadcast is not charged
    assert told["wall_s"]["stages"]["rollout"]["compile_s"] > 0
    assert told["whole_model"]["runs"]["hd_moe"]["step_s"] == pytest.approx(system["mean"]["total_s"])
    assert system["limit"] in result.stdout
    facts = json.loads(target.read_text())["otherData"]
    assert (facts["system"], facts["iteration"]) == ("hd_moe", 0)
    assert target.with_suffix(".png").exists()


@pytest.mark.slow
def test_the_simulator_bears_the_rollout_out(run, scenario, out):
    # Chunks as short as this leave little to wait for, so the busiest link is busy throughout.
    small = ("--set", "hardware.router.chunk_B=1")
    result = run("simulate", scenario, *SYSTEM, *small, "--iterations", 4, "--replay", 4, "--out", out)
    assert result.exit_code == 0, result.output
    told = summary(out)
    assert told["replayed"]["iterations"] == [0, 1, 2, 3]
    for one in told["runs"].values():
        assert one["agreement"]["points"] == 8
        assert one["agreement"]["max_abs_error_percent"] < 3
        np.testing.assert_allclose(one["simulated_s"], one["total_s"], rtol=0.03)
    moved = told["runs"]["hd_moe"]
    assert min(moved["simulated_movement_s"]) > 0
    np.testing.assert_allclose(moved["simulated_movement_s"], moved["model_movement_s"], rtol=0.05)
    modelled, simulated = told["replayed"]["model_speedup"], told["replayed"]["simulated_speedup"]
    assert simulated == pytest.approx(modelled, rel=0.03)


@pytest.mark.slow
def test_a_charged_broadcast_is_part_of_the_total(run, scenario, out):
    charged = ("--set", "system={name: hd_moe, experts: 1, broadcast: charged}")
    assert run("simulate", scenario, *charged, "--iterations", 2, "--replay", 1, "--out", out).exit_code == 0
    mean = summary(out)["runs"]["hd_moe"]["mean"]
    stages = sum(mean[f"{name}_s"] for name in ("dispatch", "compute", "combine", "movement"))
    assert mean["total_s"] == pytest.approx(stages, rel=1e-5)


def test_static_alone(run, scenario, out):
    result = run("simulate", scenario, "--iterations", 3, "--replay", 1, "--out", out)
    assert result.exit_code == 0, result.output
    told = summary(out)
    assert [*told["runs"]] == ["static"]
    assert (told["plan"]["name"], told["speedup"]) == ("ep_balanced", 1)


def test_successive_tokens_where_the_trace_is_long_enough(run, scenario, out):
    # 64 tokens in batches of 8: three iterations take the last 24, and 40 come before them.
    assert run("simulate", scenario, "--iterations", 3, "--replay", 1, "--out", out).exit_code == 0
    assert (summary(out)["successive"], summary(out)["history_tokens"]) == (True, 40)
    result = run("simulate", scenario, "--iterations", 9, "--replay", 1, "--out", out)
    assert (summary(out)["successive"], summary(out)["history_tokens"]) == (False, 64)
    assert "64 tokens, fewer than the 72" in result.stderr
    assert "prepared on the tokens of the run itself" in result.stderr


def test_strategies_are_placed_by_the_history(run, scenario, out, tmp_path, monkeypatch):
    trace, path, placed = synthetic_trace(80, (3, 5), 4, 2, 2.0, 0.0, 0.0, 9), tmp_path / "seen.npz", []
    write_trace(path, trace)
    monkeypatch.setattr(simulate, "simulate", lambda _, strategy, steps, *__: placed.append((strategy, steps)))
    result = run("simulate", scenario, "--iterations", 2, "--history", path, "--out", out)
    assert placed, result.output
    ((strategy, steps),) = placed
    assert steps.history.num_tokens == 80
    expected = expert_parallel_balanced(count_pairs(trace).load, 4)
    np.testing.assert_array_equal(strategy.placement.share, expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--set", "system.name=moe"), ("system.name", "'static', 'hd_moe'")),
        (("--set", "system={experts: 2}"), ("a key 'name'", "{name: hd_moe, ..}")),
        (("--set", "system={name: hd_moe, forecast: best}"), ("system.forecast", "moving_average")),
        (("--plan", "nowhere.npz"), ("nowhere.npz", "no such plan file", "ep_balanced")),
        (("--iterations", 2, "--replay", 3), ("--replay is 3", "2")),
        ((*SYSTEM, "--set", "schedule=pipelined(2)"), ("hd_moe", "schedule")),
        (("--history", "nowhere.npz"), ("nowhere.npz",)),
        (("--timeline", "layer.txt"), ("--timeline", ".json")),
    ],
)
def test_bad_input(run, scenario, out, given, expected):
    refused(run("simulate", scenario, *given, "--out", out), out, *expected)


def test_a_replicated_plan_is_for_the_static_system(run, scenario, out, tmp_path):
    path = tmp_path / "copies.npz"
    write_plan(path, Placement(np.full((2, 4, 4), 0.25, np.float32), (2, 2), "replicated", (3, 5)))
    given = ("--plan", path, "--iterations", 2, "--replay", 1, "--out", out)
    refused(run("simulate", scenario, *SYSTEM, *given), out, "replicated", "sharded plan")
    assert run("simulate", scenario, *given).exit_code == 0


def test_ctrl_c_leaves_nothing(run, scenario, out, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "simulate", interrupt)
    result = run("simulate", scenario, "--out", out)
    assert result.exit_code == 130
    assert "nothing was written" in result.stderr
    assert not out.parent.exists()
