"""`jaxmoe tune --optimiser`: every one of them works, and stops when told."""

import json
import os
import signal

import numpy as np
import pytest

from jaxmoe.experiment import comparison
from jaxmoe.placement import read_plan
from jaxmoe.registry import OPTIMISERS
from jaxmoe.tune.gradient_free import AnnealSettings
from jaxmoe.tune.two_stage import TwoStageSettings

# Every optimiser draws the pictures of the first, which other tests render.
pytestmark = pytest.mark.usefixtures("unrendered")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Node and link balance in fractions of a second, and short chains; the others are quick on four experts."""
    quick = {
        "milp-bayes": lambda **given: TwoStageSettings(0.0, 2.0, 0.5, **given),
        "anneal": lambda **given: AnnealSettings(steps=300, **given),
    }
    changed = {name: OPTIMISERS[name]._replace(settings=settings) for name, settings in quick.items()}
    monkeypatch.setattr(comparison, "OPTIMISERS", {**OPTIMISERS, **changed})


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


# Everyday tests of the command are those of the gradient tuner, in test_cli_verbs.py and test_cli_interrupt.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
def test_it_writes_a_legal_plan(run, scenario, out, name):
    result = run("tune", scenario, "--optimiser", name, "--layers", "5", "--time-limit", "20", "--out", out)
    assert result.exit_code == 0, result.output
    summary, plan = summary_of(out), read_plan(out / "plan.npz")
    assert summary["tuning"]["optimiser"] == plan.meta["optimiser"] == name
    assert plan.layer_ids == (5,)
    np.testing.assert_allclose(plan.share.sum(axis=2), 1, rtol=1e-5)
    assert summary["scenario"]["tuning"]["time_limit_s"] == 20
    assert set(summary["tuning"]["stages"]) >= {"searched_s", "final_s"}
    assert summary["tuning"]["gap"] >= -1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_time_limit_ends_it_with_a_plan(run, scenario, out, name):
    result = run("tune", scenario, "--optimiser", name, "--time-limit", "0.001", "--out", out)
    assert result.exit_code == 0, result.output
    assert "stopped early (time limit); the best plan so far" in result.stderr
    assert read_plan(out / "plan.npz").share.shape == (2, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
def test_ctrl_c_ends_it_with_a_plan(run, scenario, out, name, monkeypatch):
    real = comparison.OPTIMISERS[name]

    def interrupted(problem, settings, progress):
        pressed = []

        def press(stage, done, total):
            progress(stage, done, total)
            if not pressed:
                pressed.append(os.kill(os.getpid(), signal.SIGINT))

        return real.run(problem, settings, press)

    monkeypatch.setattr(comparison, "OPTIMISERS", {**comparison.OPTIMISERS, name: real._replace(run=interrupted)})
    result = run("tune", scenario, "--optimiser", name, "--out", out)
    assert result.exit_code == 130, result.output
    assert "stopped early (interrupted); the best plan so far" in result.stderr
    assert read_plan(out / "plan.npz").share.shape == (2, 4, 4)


def test_an_unknown_name_lists_the_choices(run, scenario, out):
    result = run("tune", scenario, "--optimiser", "gurobi", "--out", out)
    assert result.exit_code == 2
    assert "--optimiser is 'gurobi', expected one of gradient, milp-bayes, anneal, greedy, random" in result.stderr
    assert not out.parent.exists()


def test_a_time_limit_that_is_none_is_refused(run, scenario, out):
    result = run("tune", scenario, "--time-limit", "-1", "--out", out)
    assert result.exit_code == 2
    assert "--time-limit is -1; expected seconds above 0" in result.stderr
    assert not out.parent.exists()


def test_bayesian_search_says_how_to_get_it(run, scenario, out, monkeypatch):
    monkeypatch.setattr(comparison, "find_spec", lambda name: None)
    result = run("tune", scenario, "--optimiser", "milp-bayes", "--out", out)
    assert result.exit_code == 2
    assert "pip install '.[bayes]'" in result.stderr
    assert not out.parent.exists()
