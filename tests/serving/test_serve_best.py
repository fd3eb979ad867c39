"""`jaxmoe serve best`: the best of a few by hand, against all of a study, what it writes, and what it refuses."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from online_scenarios import constant
from test_serve import scenario
from typer.testing import CliRunner

from jaxmoe.cli.app import app
from jaxmoe.errors import InputError
from jaxmoe.experiment.rate_trials import RateTrials
from jaxmoe.experiment.serving import Serving
from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.metrics import Limits
from jaxmoe.serving.online.requests import Requests
from jaxmoe.sweep.best_deployment import AHEAD, TOLERANCE, Contender, candidate, in_order, race, servings_of
from jaxmoe.sweep.study import read_study

__all__ = ["scenario"]  # a fixture
AXES = {
    "deployment.tensor": [1, 2, 3],
    "serving.engine.seats": [1, 4, 16],
    "serving.engine.token_budget": [64, 512],
}
DERIVED = {"serving.engines": "4 / deployment.tensor"}
SET = {"serving.arrivals.requests": 400}


def server(seconds: float, gpus: int = 1, requests: int = 200, engines: int = 1) -> Contender:
    """Each step takes so many seconds and reads one request, which may wait for another step."""
    come = Requests(np.arange(float(requests)), np.full(requests, 10), np.ones(requests, int))
    limits = Limits(first_token=2 * seconds, per_token=1.0, part=1.0)
    return candidate(
        {"seconds": seconds, "gpus": gpus},
        Serving(come, Fleet(Engine(token_budget=10, seats=4), engines), constant(seconds), limits, gpus),
    )


SIX = [server(0.5), server(0.2), server(0.3), server(0.11, gpus=2), server(0.1, gpus=4), server(1.0)]


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_the_best_of_six_is_the_one_with_most_requests_a_second_and_gpu(order):
    """5 requests/s of one GPU, before 4.5 of each of two. With 200 requests a little more is in time."""
    outcomes = race(SIX[order])
    led = [each for each in outcomes if each.rate]
    assert [each.candidate for each in led] == [SIX[1]]
    assert led[-1].rate == pytest.approx(5 * 199 / 198, rel=TOLERANCE)
    assert {each.how for each in outcomes if not each.rate} <= {"behind", "bound"}
    assert all((each.simulated == 0) == (each.how == "bound") for each in outcomes)


def test_the_best_of_each_layout_comes_before_the_second_of_any():
    given = [(1, 32, 9.0), (1, 64, 8.0), (2, 32, 1.0), (2, 64, 2.0), (4, 32, 5.0)]
    all_of_them = [
        Contender({"deployment.tensor": tensor, "serving.engine.seats": seats}, SIX[0].serving, estimate, np.inf)
        for tensor, seats, estimate in given
    ]
    assert [each.estimate for each in in_order(all_of_them)] == [9, 5, 2, 8, 1]


def test_one_that_led_is_tried_again_where_it_may_still_be_better(monkeypatch):
    """The first meets 1 and not 1.2. So the second leads at 1.015, and can no more, while the first meets 1.1."""
    for name, value in {"COARSE": 0.2, "STRIDE": 1.2}.items():
        monkeypatch.setattr(f"jaxmoe.sweep.best_deployment.{name}", value)
    highest = {SIX[0].serving: 1.1, SIX[5].serving: 1.02}

    def meets(own: RateTrials, rate: float) -> bool:
        own.simulated += 1
        return rate <= highest[own.serving]

    monkeypatch.setattr(RateTrials, "_meets", meets)
    first, second = (Contender({"seats": at}, SIX[at].serving, 1.0 - 0.1 * at, np.inf) for at in (0, 5))
    outcomes = race([first, second])
    assert [each.how for each in outcomes] == ["led", "led"]
    assert 1.1 / (1 + TOLERANCE) <= outcomes[0].rate <= 1.1
    assert outcomes[1].rate == pytest.approx(1 + AHEAD)
    assert outcomes[1].simulated == 3  # once where it leads, 1.2 times that, and where the first leads again


def test_one_whose_estimate_is_too_low_leads_when_it_is_tried():
    wrong = Contender(SIX[1].values, SIX[1].serving, 0.01, np.inf)
    outcomes = race([SIX[0], wrong])
    assert [each.how for each in outcomes] == ["led", "led"]
    assert outcomes[1].candidate is wrong


def test_too_few_requests_for_a_highest_rate_are_told():
    own = server(0.2, requests=2, engines=2)
    with pytest.raises(InputError, match=r"all 2 requests at once keep their limits .*; give more requests"):
        race([own])


@pytest.fixture
def study(scenario, tmp_path):
    def write(**sections: object) -> Path:
        path = tmp_path / "study.yaml"
        content = {"name": "made up", "scenario": str(scenario), "axes": AXES, "derived": DERIVED, "set": SET}
        path.write_text(yaml.safe_dump(content | sections))
        return path

    return write


def best(*arguments: object):
    return CliRunner().invoke(app, ["serve", "best", *map(str, arguments)])


def test_no_deployment_of_a_study_is_much_better_than_the_one_it_tells(study, tmp_path):
    done = best(study(), "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    own, left_out = servings_of(read_study(study()))
    rates = [RateTrials(each).highest(each.rate, TOLERANCE) / each.gpus for _, each in own]
    told = summary["best"]
    assert max(rates) <= told["rate_per_s_gpu"] * (1 + AHEAD) * (1 + TOLERANCE)
    assert min(rates) < 0.9 * max(rates)
    (chosen,) = (serving for values, serving in own if values == told["deployment"])
    trials = RateTrials(chosen, ends_early=False)
    assert trials.meets(told["rate_per_s"])
    assert not trials.meets(told["rate_per_s"] * (1 + TOLERANCE))
    assert told["rate_per_s"] == pytest.approx(4 * told["rate_per_s_gpu"])
    assert len(left_out) == 6
    assert all(reason.startswith("deployment.tensor is 3; expected a divisor") for reason in left_out.values())
    with (tmp_path / "out" / "deployments.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == summary["deployments"] == 18
    assert float(rows[0]["rate_per_s_gpu"]) == pytest.approx(told["rate_per_s_gpu"], rel=1e-5)
    assert sum(int(row["simulated"] or 0) for row in rows) == summary["simulated_requests"]
    assert f"made up: {len(own)} deployments" in done.output
    assert f"is forbidden by {summary['forbids_more']['limit']}" in done.output.replace("\n", " ")


COME = {"arrivals": {"kind": "random", "rate_per_s": 1}}
ALONE = {"set": {}, "derived": {}}
USERS = {"kind": "users", "users": 4, "requests": 20}
REFUSED = {
    "requests": ({"axes": {"serving.arrivals.rate_per_s": [1, 2]}}, "serving.arrivals varies, but all"),
    "lengths": ({"axes": {"deployment.prompt_tokens": [1, 2]}}, "deployment.prompt_tokens varies, but all"),
    "whole": (
        {"axes": {"serving": [COME, COME | {"limits": {"per_token_ms": 9}}]}, **ALONE},
        "serving.limits varies, but all",
    ),
    "users": ({"set": {"serving.arrivals": USERS}}, "requests do not come at a rate; take serving.arrivals that do"),
    "none": ({"axes": {"deployment.tensor": [3]}}, "no deployment can be. The first: deployment.tensor is 3"),
    "serving": ({"set": {"serving": None}, "axes": {"deployment.tensor": [1]}, "derived": {}}, "has no serving"),
    "limits": (
        {"set": SET | {"serving.limits": {"first_token_s": 1e-6}}, "axes": {"deployment.tensor": [1]}},
        "none of 1 deployments meets serving.limits at any rate; relax them",
    ),
    "metrics": ({"metrics": ["total"]}, "metrics is given beside axes of serving"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_told_and_leaves_no_file(study, tmp_path, case):
    sections, said = REFUSED[case]
    done = best(study(**sections), "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert said in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
