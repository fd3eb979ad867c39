"""`jaxmoe tune --hardware`: what it writes, that the machine it writes is as fast as it says, and bad input."""

import json

import pytest
import yaml

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


@pytest.mark.parametrize("placement", [["tp", "ep_balanced"], "tuned"], ids=["usual", "tuned"])
def test_the_machine_that_is_written_is_as_fast_as_is_told(run, scenario, space, out, placement):
    result = run("tune", scenario, "--hardware", space(placement=placement), "--layers", "3", "--out", out)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    (told,) = summary["sizes"]
    assert summary["objective"]["total_s"] == pytest.approx(told["total_s"])
    for each in summary["candidates"]:  # no design is faster there
        assert told["total_s"] <= each["here_total_s"] * (1 + 1e-5)
    (met,) = summary["constraints"]
    assert met["left"] <= 1.5 * 1.001
    assert summary["derived"]["price"] == pytest.approx(met["left"])
    assert met["total_s_per_unit_of_limit"] < 0
    assert {"starts.png", "scenario.yaml"} <= {file.name for file in out.iterdir()}
    assert "1 more adds" in result.stdout

    name, plan = summary["strategy"]["name"], []
    if (out / "plan.npz").exists():
        assert read_plan(out / "plan.npz").layer_ids == (3,)
        plan = ["--plan", f"{name}={out / 'plan.npz'}"]
    again = out / "again"
    assert run("evaluate", out / "scenario.yaml", *plan, "--layers", "3", "--out", again).exit_code == 0
    evaluated = json.loads((again / "summary.json").read_text())["strategies"][name]["mean"]["total_s"]
    assert evaluated == pytest.approx(told["total_s"], rel=1e-6)


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
