"""`jaxmoe tune --hardware`: what it writes, that the machine it writes is as fast as it says, and bad input."""

import json

import pytest
import yaml

from jaxmoe.experiment.evaluation import score
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.strategies import standard_strategies
from jaxmoe.placement import read_plan

LINK, DIE = "hardware.link.bandwidth_GB_per_s", "hardware.die.compute_TFLOPs_per_s"
SPACE = {
    "variables": {
        DIE: {"from": 0.01, "to": 10, "scale": "log"},
        LINK: {"from": 0.1, "to": 100, "scale": "log"},
    },
    "derived": {"price": f"3 * {DIE} + 0.2 * {LINK}"},
    "constraints": ["price <= 1.5"],
    "starts": 4,
    "steps": 25,
}


@pytest.fixture
def space(tmp_path):
    def write(**sections):
        path = tmp_path / "space.yaml"
        path.write_text(yaml.safe_dump(SPACE | sections, sort_keys=False))
        return path

    return write


@pytest.mark.slow
def test_the_machine_that_is_written_is_as_fast_as_is_told(run, scenario, space, out):
    file = space(placement="ep_balanced", choices={"hardware.mesh_shape": [[2, 2], [1, 2]]})
    result = run("tune", scenario, "--hardware", file, "--layers", "3", "--out", out)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    (told,) = summary["sizes"]
    (met,) = summary["constraints"]
    assert met["left"] <= 1.5 * 1.001
    assert summary["derived"]["price"] == pytest.approx(met["left"])
    assert met["total_s_per_unit_of_limit"] < 0
    assert {file.name for file in out.iterdir()} == {"starts.png", "scenario.yaml", "summary.json"}
    assert "1 more adds" in result.stdout
    assert "choices after a short search" in result.stdout
    shape = summary["scenario"]["hardware"]["mesh_shape"]
    best = min(summary["choices"], key=lambda each: each["total_s"])
    assert best["values"] == {"hardware.mesh_shape": shape}
    assert summary["objective"]["total_s"] <= best["total_s"] * 1.001  # what constraints may be broken by

    # The present machine is the scenario's own, without the choice that was made.
    present, own = summary["present"], read_inputs(scenario, None, None, "3")
    assert present["numbers"][LINK] == own.scenario.hardware.link.bandwidth_GB_per_s
    (usual,) = (each for each in standard_strategies(own) if each.name == present["strategy"])
    assert present["total_s"] == pytest.approx(score(own, usual, own.evaluation_batches).mean.mean(), rel=1e-6)
    assert "present" in result.stdout

    inputs = read_inputs(out / "scenario.yaml", None, None, "3")
    strategy = next(each for each in standard_strategies(inputs) if each.name == "ep_balanced")
    again = score(inputs, strategy, inputs.evaluation_batches).mean.mean()
    assert [summary["objective"]["total_s"], told["total_s"]] == pytest.approx([again, again], rel=1e-6)

    pytest.importorskip("plotly")
    result = run("report", out)
    assert result.exit_code == 0, result.output
    page = (out / "report.html").read_text()
    assert all(
        heading in page for heading in ("What limits are worth", "From many starts", "price &lt;= 1.5", "Choices")
    )


@pytest.mark.slow
def test_a_tuned_placement_is_no_slower_than_any_strategy_and_evaluates_to_the_same(run, scenario, space, out):
    result = run("tune", scenario, "--hardware", space(placement="tuned"), "--layers", "3", "--out", out)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    seconds, name = summary["objective"]["total_s"], summary["strategy"]["name"]
    assert {"tuned", "shipped", "tp", "ep_balanced"} <= {each["name"] for each in summary["candidates"]}
    for each in summary["candidates"]:
        assert seconds <= each["here_total_s"] * (1 + 1e-5)
        assert seconds <= each["own_total_s"] * (1 + 1e-5)

    plan = []
    if (out / "plan.npz").exists():
        assert read_plan(out / "plan.npz").layer_ids == (3,)
        plan = ["--plan", f"{name}={out / 'plan.npz'}"]
    again = out / "again"
    assert run("evaluate", out / "scenario.yaml", *plan, "--layers", "3", "--out", again).exit_code == 0
    evaluated = json.loads((again / "summary.json").read_text())["strategies"][name]["mean"]["total_s"]
    assert evaluated == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "sections", "told"),
    [
        ([], {"variables": {DIE: {"from": 3, "to": 2}}}, "a number above from, 3"),
        ([], {"variables": {"hardware.die.compute": {"from": 3, "to": 4}}}, "hardware.die.compute"),
        ([], {"constraints": ["price <= 0.01"]}, "no machine inside the bounds meets all constraints: 'price <= 0.01'"),
        (["--optimiser", "greedy"], {}, "--optimiser does not go with --hardware"),
        (["--set", f"{DIE}=3"], {}, f"--set {DIE}"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, scenario, space, out, options, sections, told):
    result = run("tune", scenario, "--hardware", space(**sections), "--out", out, *options)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()
