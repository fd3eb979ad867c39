"""Sweeps that are killed, or whose disk is full: what is complete stays, and they end as if nothing had happened."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import yaml
from pyarrow import dataset
from sweep_keys import LINK

KILLS = 5
AXES = {LINK: {"from": 1, "to": 9, "points": 2000}, "strategy": ["tp", "ep_balanced"]}
POINTS, CHUNK = 4000, 10

# The command, with a line in a file for every chunk that is computed.
SCRIPT = """
import os, sys, time
from jaxmoe.cli.app import app
from jaxmoe.sweep import evaluation

evaluation.MOST = int(sys.argv[2])
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
chunks = evaluation.SweepEvaluator.chunks

def logged(self, group):
    for chunk in chunks(self, group):
        os.write(log, f"{time.monotonic()}\\n".encode())
        yield chunk

evaluation.SweepEvaluator.chunks = logged
app(sys.argv[3:])
"""


class Sweeps(NamedTuple):
    """One study, whole once, and what runs it again."""

    whole: Path  # the folder of the sweep that nothing disturbed
    times: list[float]  # when each of its chunks was computed, s
    command: Callable[[Path, Path], list[str]]  # of a sweep into a folder, which writes a log


@pytest.fixture(scope="module")
def sweeps(kept_scenario, tmp_path_factory):
    """All sweeps are of one study and share what was compiled, in a folder of theirs: kills may leave half a file."""
    place = tmp_path_factory.mktemp("sweeps")
    path, whole, log = place / "study.yaml", place / "whole", place / "log"
    path.write_text(yaml.safe_dump({"scenario": str(kept_scenario), "axes": AXES}, sort_keys=False))

    def command(out: Path, log: Path) -> list[str]:
        return [sys.executable, "-c", SCRIPT, str(log), str(CHUNK), "sweep", str(path), "--out", str(out), "--quiet"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(place / "compiled"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        assert subprocess.run(command(whole, log), capture_output=True, check=False).returncode == 0
        yield Sweeps(whole, computed(log), command)


def files(out: Path) -> set[Path]:
    return set((out / "points").glob("*.parquet"))


def computed(log: Path) -> list[float]:
    """When each chunk was computed, s. The last line may be cut short."""
    return [float(line) for line in log.read_text().splitlines()] if log.exists() else []


def check_equal(out: Path, whole: Path) -> None:
    """Row for row: the same points, each once, with the same values to rounding."""
    one, other = (dataset.dataset(folder / "points").to_table().sort_by("hash").to_pylist() for folder in (whole, out))
    assert len(other) == POINTS
    for row, same in zip(one, other, strict=True):
        assert row.keys() == same.keys()
        for key, value in row.items():
            assert same[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert not list(out.glob(".*"))


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_chunk_but_the_last(sweeps, tmp_path):
    """kill -9 at moments drawn from the time in which chunks are computed; only what is lost is computed twice."""
    out, log, times = tmp_path / "killed", tmp_path / "log", sweeps.times
    each = median(after - before for before, after in pairwise(times))  # without compilations
    draw, inside, lost = random.Random(0), 0, []
    for _ in range(KILLS):
        log.unlink(missing_ok=True)
        before = files(out)
        process = subprocess.Popen(sweeps.command(out, log), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        begun = 2 + draw.randrange(max(len(times) // KILLS - 1, 1))  # compiling may take longer than all chunks
        while process.poll() is None and len(computed(log)) < begun:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, each))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert before <= files(out)
        lost.append(len(computed(log)) - len(files(out) - before))
        inside += 0 < len(files(out)) < len(times)
    assert inside >= 3  # the moments are those that were meant
    assert max(lost) <= 1
    log.unlink(missing_ok=True)
    left = len(times) - len(files(out))
    assert subprocess.run(sweeps.command(out, log), capture_output=True, check=False).returncode == 0
    assert left <= len(computed(log)) <= left + 2  # a chunk that began elsewhere may be cut in two, for each strategy
    check_equal(out, sweeps.whole)


# A file system of its own, as no one else sees it; $1 is what to fill it with, the rest the command.
FULL = """
mount -t tmpfs -o size=1m tmpfs "$OUT" || exit 77
"$@" > first.out 2> first.err; echo $? > first.rc
ls -A "$OUT" "$OUT/points" > first.ls; cp -r "$OUT/points" first
mount -o remount,size=64m "$OUT"
"$@" > second.out 2> second.err; echo $? > second.rc
cp -r "$OUT" second
"""


@pytest.mark.slow
def test_a_full_disk_is_one_clear_error_and_the_sweep_goes_on_with_more_room(sweeps, tmp_path):
    """On a tmpfs of 1 MB, as root of a user namespace."""
    out = tmp_path / "full"
    out.mkdir()
    space = ["unshare", "--map-root-user", "--mount", "env", f"OUT={out}", "sh", "-c", FULL, "sh"]
    done = subprocess.run(
        [*space, *sweeps.command(out, tmp_path / "log")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"this system does not let users mount a tmpfs of their own: {done.stderr.strip()}")

    def read(name):
        return (tmp_path / name).read_text()

    assert read("first.rc") == "2\n"
    (line,) = read("first.err").splitlines()
    assert line.startswith(f"error: --out: cannot write to {out}: No space left on device; make room and run again")
    assert ".part" not in read("first.ls")
    rows = dataset.dataset(tmp_path / "first").to_table()  # every file that is there is whole
    assert 0 < len(rows) < POINTS
    assert (read("second.rc"), read("second.err")) == ("0\n", "")
    check_equal(tmp_path / "second", sweeps.whole)
    assert len(rows) == CHUNK * len(list((tmp_path / "first").iterdir()))
