"""Ctrl-C and the time limit during tuning keep the best plan so far, and say so."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxmoe.cli import tune
from jaxmoe.cli.early_end import GRACE_S, ORDERLY_S
from jaxmoe.cli.session import Interrupts
from jaxmoe.placement import read_plan
from jaxmoe.run_folders import RECORD
from jaxmoe.tune import History, TuneResult
from jaxmoe.tune.regions import Budgeted, FrontPoint

pytestmark = pytest.mark.usefixtures("unrendered")


@pytest.fixture
def stopped_tuner(monkeypatch):
    """Makes `tune` end early, for a given reason, with the experts dealt out in turn."""

    def stop(reason):
        def tuner(name, inputs, problem, progress, *_):
            progress("descent", 1, 10)
            times = np.full(2, 2e-5)
            share = np.broadcast_to(np.eye(4, dtype=np.float32), (2, 4, 4)).copy()
            stages = dict.fromkeys(("relaxed", "rounded", "rebalanced", "searched", "final"), times)
            history = {"descent": History([1], [times]), "refinement": History()}
            exchange = ("lowest_host",) * 2
            seconds = {"descent": 0.1}
            found = TuneResult(share, exchange, share, exchange, stages, times / 2, history, 0, seconds, reason)
            return Budgeted(problem, found, (FrontPoint(1, 2e-5, 1e-5),))

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


# Python handles no signal in the main thread before it goes on, as while XLA compiles: another thread gets them.
STUCK = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]), time.sleep(10**6)"
LATE_S = 10.0  # that a machine with much else to do may be late

BUSY = f"""
import signal
import sys
import time
from pathlib import Path
from jaxmoe.cli.early_end import last_words, watch
from jaxmoe.files import atomic_write

signal.signal(signal.SIGINT, lambda *_: None)
watch()
with last_words(lambda reason: print("last", reason, flush=True)), last_words(lambda _: print("first", flush=True)):
    with atomic_write(Path(sys.argv[1])) as aside:
        aside.write_text("half")
        print("ready", flush=True)
        {STUCK}
"""


ONE_PLAN = "run.evaluator.offer(plans := tuner.random_starts(run.evaluator, 1, 0), 1.0 + 0 * plans.sum((2, 3)))"


def search_stuck_in(stage, first):
    """The command, whose search does something and is then stuck in a stage."""
    return f"""
import signal
import time
from jaxmoe.__main__ import main
from jaxmoe.tune import tuner

def stuck(run, *_):
    {first}
    print("ready", flush=True)
    {STUCK}

tuner._Run.{stage} = stuck
main()
"""


@pytest.fixture
def started():
    """Starts a program in a process of its own, which is ready when it says so, and ends it after the test."""
    running = []

    def start(script, *arguments):
        command = [sys.executable, "-c", script, *map(str, arguments)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def ended(process, seconds):
    """Exit code and output of a process that ends within so many seconds, or a little later on a busy machine."""
    told, errors = process.communicate(timeout=seconds + LATE_S)
    return process.returncode, told, errors


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_a_process_that_python_has_no_hold_of(started, tmp_path, presses):
    file = tmp_path / "file"
    file.write_text("older")
    process = started(BUSY, file)
    process.stdout.readline()
    begun = time.monotonic()
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    code, told, _ = ended(process, ORDERLY_S if presses == 1 else GRACE_S)
    assert (code, told) == (130, "first\nlast interrupted\n")
    assert time.monotonic() - begun > 0.9 * GRACE_S  # first an orderly end has its chance
    assert [each.read_text() for each in tmp_path.iterdir()] == ["older"]


@pytest.mark.parametrize(
    ("stage", "first"),
    [
        pytest.param("gathering", ONE_PLAN, id="first plan"),
        pytest.param("dealt", "pass", id="scored plans", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_in_a_step_that_nothing_stops_keeps_the_best_plan_so_far(started, scenario, out, stage, first):
    process = started(search_stuck_in(stage, first), "tune", scenario, "--layers", "3", "--out", out)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    code, _, errors = ended(process, 3)
    assert code == 130
    assert f"interrupted; complete in {out}: plan.npz\n" in errors
    assert {file.name for file in out.iterdir()} == {RECORD, "plan.npz"}
    kept = read_plan(out / "plan.npz")
    np.testing.assert_allclose(kept.share.sum(axis=2), 1, rtol=1e-5)
    assert kept.meta["stopped"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.2, 2.0])
def test_ctrl_c_while_it_loads_writes_nothing(started, scenario, out, after_s):
    """One message, no traceback, no folder; at the later moment it may have found something on a fast machine."""
    process = started(
        "from jaxmoe.__main__ import main; print('ready', flush=True); main()", "tune", scenario, "--out", out
    )
    process.stdout.readline()
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    code, _, errors = ended(process, 3)
    assert code == 130
    assert [line.split(";")[0] for line in errors.splitlines()] == ["interrupted"]
    assert not out.exists() or {file.name for file in out.iterdir()} == {RECORD, "plan.npz"}


@pytest.mark.slow
def test_the_time_limit_ends_the_command_and_keeps_the_best_plan_so_far(started, scenario, out):
    """Long before the step ends that the search is stuck in, which does not look at the limit."""
    script, begun = search_stuck_in("gathering", ONE_PLAN), time.monotonic()
    code, _, errors = ended(started(script, "tune", scenario, "--time-limit", "12", "--out", out), 17)
    assert time.monotonic() - begun > 12
    assert code == 0
    assert read_plan(out / "plan.npz").meta["stopped"] == "time limit"
    assert f"time limit; complete in {out}: plan.npz\n" in errors


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
