"""The system camoe by `jaxmoe simulate`: its stages, the simulator's word, and what it refuses."""

import json
from pathlib import Path

import pytest

SCENARIO = Path(__file__).parents[2] / "configs" / "scenarios" / "camoe" / "qwen3-30b-a3b_4nodes.yaml"
SMALL = ("--layers", "0,1", "--set", "workload.batch_tokens=256", "--set", "workload.trace.tokens=768")


def simulated(run, out, *more):
    done = run("simulate", SCENARIO, *SMALL, "--iterations", 2, "--replay", 1, *more, "--out", out)
    assert done.exit_code == 0, done.output
    return json.loads((out / "summary.json").read_text())


def test_a_biased_gate_is_faster_and_says_what_changed(run, tmp_path):
    told = simulated(run, tmp_path)
    assert (told["baseline"], told["system"]) == ("unbiased", "camoe")
    assert told["stages"] == ["metadata", "dispatch", "compute", "combine"]
    assert told["speedup"] > 1.02
    plain, own = told["runs"]["unbiased"], told["runs"]["camoe"]
    assert plain["retained_gate_mass"] == pytest.approx(1, abs=1e-6)
    assert plain["changed_choices"] == plain["kl"] == 0
    assert 0.9 < own["retained_gate_mass"] < 1
    assert own["changed_choices"] > 0.01
    # Every pair has a link of its own: Eq. 9 and the simulator agree.
    assert own["agreement"]["mean_abs_error_percent"] < 0.1


def test_without_strength_it_is_the_gate_as_it_is(run, tmp_path):
    for bias in ("rule", "gradient"):
        more = ("--set", "system.lambda_cost=0", "--set", "system.copies=node", "--set", f"system.bias={bias}")
        told = simulated(run, tmp_path / bias, *more)
        assert told["runs"]["camoe"]["total_s"] == told["runs"]["unbiased"]["total_s"]


@pytest.mark.slow
def test_a_bias_by_gradient_saves_more(run, tmp_path):
    rule = simulated(run, tmp_path / "rule")
    tuned = simulated(run, tmp_path / "tuned", "--set", "system.bias=gradient")
    assert tuned["speedup"] > rule["speedup"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--set", "workload.trace.logits=null"), "no logits"),
        (("--set", "workload.trace.logits=null", "--set", "system.logits=reconstructed"), "no gate weights"),
        (("--plan", "tp"), "needs whole experts"),
        (("--set", "schedule=pipelined(2)"), "micro-batches"),
    ],
)
def test_what_does_not_suit_is_one_clear_error(run, tmp_path, more, message):
    done = run("simulate", SCENARIO, *SMALL, "--iterations", 2, *more, "--out", tmp_path)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.slow
def test_a_bias_is_made_of_a_profile_and_priced_on_the_machine(run, tmp_path):
    """Of the machine itself it is the same; of a network with other slow links, another, and none of fewer nodes."""
    hardware = SCENARIO.parents[2] / "hardware" / "camoe_4nodes.yaml"
    other = tmp_path / "other.yaml"
    other.write_text(hardware.read_text().replace("0.1875", "0.6"))
    for name, machine in (("own", hardware), ("other", other)):
        done = run("network", "profile", machine, "--sizes", "1e4,1e6,1e8", "--out", tmp_path / name)
        assert done.exit_code == 0, done.output
    plain = simulated(run, tmp_path / "plain")
    own, changed = (
        simulated(run, tmp_path / f"by_{name}", "--set", f"system.profile={tmp_path / name / 'profile.csv'}")
        for name in ("own", "other")
    )
    assert own["speedup"] == pytest.approx(plain["speedup"], rel=1e-3)
    assert changed["runs"]["unbiased"]["total_s"] == plain["runs"]["unbiased"]["total_s"]
    assert changed["speedup"] < own["speedup"]
    (tmp_path / "few.csv").write_text("phase,source\n")
    for path, message in (("few.csv", "profile.csv of jaxmoe network profile"), ("none.csv", "cannot be read")):
        done = run("simulate", SCENARIO, *SMALL, "--set", f"system.profile={tmp_path / path}", "--out", tmp_path / "no")
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
