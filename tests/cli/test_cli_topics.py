"""`jaxmoe tune` over several topics at once: the plan is judged on each, and bad lists are one clear error."""

import json

import pytest

from jaxmoe.traces import synthetic_trace, write_trace


@pytest.fixture
def topics(tmp_path):
    paths = []
    for seed, name in enumerate(("prose", "code")):
        path = tmp_path / f"{name}.npz"
        write_trace(path, synthetic_trace(64, [3, 5], 4, 2, 1.5, 0.0, 0.0, seed))
        paths.append(path)
    return paths


@pytest.mark.slow
def test_every_strategy_is_judged_on_every_topic(run, scenario, topics, out):
    listed = f"tuning.topics=[{','.join(str(path) for path in topics)}]"
    options = ("--layers", "3", "--optimiser", "greedy", "--set", listed, "--set", "tuning.worst_weight=1")
    result = run("tune", scenario, *options, "--out", out)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    means = summary["tuning"]["topics"]
    assert {"tuned", "tp", "ep_balanced"} <= set(means)
    assert all(set(each) == {"prose", "code"} and min(each.values()) > 0 for each in means.values())
    assert means["ep_balanced"]["prose"] != means["ep_balanced"]["code"]
    assert "each topic" in result.stdout
    assert summary["scenario"]["tuning"]["topics"] == [str(path) for path in topics]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("tuning.worst_weight=0.5", "tuning.worst_weight is 0.5; expected 0 where tuning.topics has no two files"),
        ("tuning.topics=[a.npz,a.npz]", "every file once"),
        ("tuning.topics=[missing.npz]", "missing.npz"),
    ],
)
def test_a_bad_list_is_one_error(run, scenario, out, value, told):
    result = run("tune", scenario, "--set", value, "--out", out)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
