"""Ctrl-C and the time limit during tuning keep the best plan so far, and say so."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxmoe.cli import tune
from jaxmoe.cli.session import GRACE_S, Interrupts
from jaxmoe.placement import read_plan
from jaxmoe.run_folders import RECORD
from jaxmoe.tune import History, TuneResult


@pytest.fixture
def stopped_tuner(monkeypatch):
    """Makes `tune` end early, for a given reason, with the experts dealt out in turn."""

    def stop(reason):
        def tuner(name, inputs, problem, progress, copies):
            progress("descent", 1, 10)
            times = np.full(2, 2e-5)
            share = np.broadcast_to(np.eye(4, dtype=np.float32), (2, 4, 4)).copy()
            stages = dict.fromkeys(("relaxed", "rounded", "rebalanced", "searched", "final"), times)
            history = {"descent": History([1], [times]), "refinement": History()}
            exchange = ("lowest_host",) * 2
            seconds = {"descent": 0.1}
            found = TuneResult(share, exchange, share, exchange, stages, times / 2, history, 0, seconds, reason)
            return problem, found

        monkeypatch.setattr(tune, "search", tuner)

    return stop


@pytest.mark.parametrize(
    ("reason", "code"),
    [("interrupted", 130), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("time limit", 0), (None, 0)))],
)
def test_best_plan_so_far_is_kept(run, scenario, out, stopped_tuner, reason, code):
    stopped_tuner(reason)
    result = run("tune", scenario, "--out", out)
    assert result.exit_code == code, result.output
    assert np.array_equal(read_plan(out / "plan.npz").share[0], np.eye(4))
    assert {"summary.json", "convergence.png", "speedups.png"} <= {file.name for file in out.iterdir()}
    assert json.loads((out / "summary.json").read_text())["tuning"]["stopped"] == reason
    assert ("best plan so far" in result.stderr) == (reason is not None)


def test_plan_is_kept_when_ctrl_c_strikes_again(run, scenario, out, stopped_tuner, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    stopped_tuner("interrupted")
    monkeypatch.setattr(tune, "compare", interrupt)
    result = run("tune", scenario, "--out", out)
    assert result.exit_code == 130
    assert {file.name for file in out.iterdir()} == {RECORD, "plan.npz"}
    assert "plan.npz" in result.stderr


def test_ctrl_c_after_a_search_that_was_stopped_does_not_wait(run, scenario, out, stopped_tuner, monkeypatch):
    reached = []

    def compare(*_):
        signal.raise_signal(signal.SIGINT)
        reached.append("beyond")

    stopped_tuner("interrupted")
    monkeypatch.setattr(tune, "compare", compare)
    result = run("tune", scenario, "--out", out)
    assert (result.exit_code, reached) == (130, [])
    assert {file.name for file in out.iterdir()} == {RECORD, "plan.npz"}


BUSY = """
import hashlib
from jaxmoe.cli.session import Interrupts, end_at_second_interrupt

end_at_second_interrupt()
with Interrupts():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # Python handles no signal before its end
"""


def test_a_second_ctrl_c_ends_a_process_that_python_has_no_hold_of():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * GRACE_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(GRACE_S + 5) == 130
        assert b"ended at once" in process.stderr.read()


@pytest.mark.slow
def test_strategies_that_beat_the_tuned_plan_are_named(run, scenario, out, stopped_tuner):
    stopped_tuner(None)
    # Without communication to speak of, sharing all work evenly wins.
    result = run("tune", scenario, "--set", "hardware.link.bandwidth_GB_per_s=1e6", "--out", out)
    assert "tp is faster than tuned on 2 of 2 layers" in result.stderr


def test_ctrl_c_waits_for_a_safe_place(run, scenario, out, monkeypatch):
    reached = []

    def compare(inputs, strategies, clock, report, *_):
        signal.raise_signal(signal.SIGINT)
        reached.append("safe place")
        report("evaluate", 1, 2)
        reached.append("beyond")

    monkeypatch.setattr(tune, "compare", compare)
    result = run("evaluate", scenario, "--out", out)
    assert result.exit_code == 130
    assert reached == ["safe place"]
    assert not out.parent.exists()


def test_second_ctrl_c_does_not_wait():
    with Interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_as_before_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGINT) != before
        interrupts.check()
    assert signal.getsignal(signal.SIGINT) == before
