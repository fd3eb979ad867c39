"""Damaged inputs to every reader: `python tests/fuzz/fuzz_readers.py [--cases N] [--seed S] [--reader NAME]`.

Each reader runs in a process of its own, whose memory is limited, forked from one that has loaded what all need. A case
fails where anything but the project's own errors comes out, where the error does not name the file, where reading takes
longer than `MOST_SECONDS`, or where the process dies. Prints a table and the failures; the exit status is 1 if there
are any, or if a process ever held more than `MOST_BYTES`. A case is its seed, reader and number: `--reader NAME --first
I --cases 1` runs it again.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import readers

MOST_SECONDS = 5.0
MOST_LETTERS = 20_000  # of a message
MOST_BYTES = 2**30
PATIENCE = 60  # seconds after which a process is ended that is still at the same case


@dataclass
class Tally:
    """What came of the cases of one reader: resident memory in bytes at its highest, failures as texts."""

    cases: int = 0
    refused: int = 0
    read: int = 0
    seconds: float = 0.0
    peak: int = 0
    failures: list[str] = field(default_factory=list)


def run(reader: readers.Reader, folder: Path, rng: Random) -> str:
    """Read what lies in a folder: "read", "refused", or why that is a failure."""
    try:
        reader.read(folder / reader.entry, rng)
    except readers.OWN_ERRORS as error:
        message = str(error)
        lines = 100 if isinstance(error, readers.ConfigError) else 1  # one for each key
        good = str(folder) in message and message.count("\n") < lines and len(message) < MOST_LETTERS
        return "refused" if good else f"a poor message: {message[:400]}"
    except Exception:
        return traceback.format_exc(limit=-4)
    return "read"


def cases(
    reader: readers.Reader, seed: int, last: int, first: int = 0, limited: bool = False
) -> Iterator[dict[str, Any]]:
    """Run the cases from `first` up to `last`, telling of each before and after it; `limited` in memory or not."""
    inputs = reader.inputs()
    others = [
        content for other in readers.READERS.values() if not other.lacks for content in other.inputs()[0].values()
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "source"
        for number, files in enumerate(inputs):
            outcome = run(reader, _laid(folder, files), Random(0))
            assert outcome == "read", f"{reader.name}, input {number}: {outcome}"
        if limited:
            _limit_memory()
        for number in range(first, last):
            yield {"start": number}
            if limited:
                signal.alarm(PATIENCE)
            rng = Random(f"{seed}/{reader.name}/{number}")
            _laid(folder, reader.damaged(rng, inputs, others))
            start = time.perf_counter()
            outcome = run(reader, folder, rng)
            seconds = time.perf_counter() - start
            if seconds > MOST_SECONDS:
                outcome = f"took {seconds:.1f} s"
            yield {"number": number, "outcome": outcome, "seconds": seconds, "peak": _peak()}


def serve() -> None:
    """Fork a process for every stretch of cases that a line of standard input asks for, one after the other."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            code = 1
            try:
                name, seed, first, last = json.loads(line)
                for told in cases(readers.READERS[name], seed, last, first, limited=True):
                    print(json.dumps(told), flush=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("\n" + json.dumps({"ended": ended}), flush=True)  # on a line of its own, whatever was begun


def watched(server: subprocess.Popen, name: str, seed: int, first: int, last: int) -> Tally:
    """The cases of a reader in processes of their own; a new one goes on where one died or hung."""
    tally = Tally()
    while first < last:
        server.stdin.write(json.dumps([name, seed, first, last]) + "\n")
        server.stdin.flush()
        first = _follow(server.stdout, name, tally, first)
    return tally


def _follow(lines: Iterable[str], name: str, tally: Tally, first: int) -> int:
    """Count what a process tells; the case to go on with."""
    running, started, last_words = first, False, ""
    for line in lines:
        if not line.startswith('{"'):
            last_words += line
            continue
        told = json.loads(line)
        if "ended" in told:
            break
        running, started = told.get("start", running), True
        if "outcome" not in told:
            continue
        tally.cases, first = tally.cases + 1, running + 1
        tally.seconds, tally.peak = max(tally.seconds, told["seconds"]), max(tally.peak, told["peak"])
        outcome = told["outcome"]
        if outcome in ("read", "refused"):
            setattr(tally, outcome, getattr(tally, outcome) + 1)
        else:
            tally.failures.append(f"{name}, case {running}: {outcome}")
    else:
        raise RuntimeError(f"the processes of readers ended:\n{last_words}")
    if told["ended"] != 0:
        if not started:
            raise RuntimeError(f"{name} does not start:\n{last_words}")
        tally.cases += 1
        tally.failures.append(f"{name}, case {running}: ended with {told['ended']}\n{last_words[-2000:]}")
        return running + 1
    return first


def _laid(folder: Path, files: readers.Files) -> Path:
    """The folder with these files and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def _limit_memory() -> None:
    """Refuse this process more than `MOST_BYTES` beyond the addresses it has."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, held + MOST_BYTES))


def _peak() -> int:
    """Bytes. `ru_maxrss` would count what the parent had when it started this process."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def fuzz(total: int, seed: int, names: list[str], first: int = 0) -> dict[str, Tally]:
    """Share the cases evenly among the readers that can run, and print what came of them."""
    able = [name for name in names if not readers.READERS[name].lacks]
    print(f"{'reader':22}{'cases':>7}{'refused':>9}{'read':>7}{'failed':>8}{'worst s':>9}{'peak MiB':>10}")
    found = {}
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, __file__, "--serve"], text=True, errors="replace", **piped) as server:
        for place, name in enumerate(able):
            each = total // len(able) + (place < total % len(able))
            tally = found[name] = watched(server, name, seed, first, first + each)
            row = f"{tally.cases:7}{tally.refused:9}{tally.read:7}{len(tally.failures):8}"
            print(f"{name:22}{row}{tally.seconds:9.3f}{tally.peak / 2**20:10.0f}", flush=True)
    for name in names:
        if lacks := readers.READERS[name].lacks:
            print(f"{name:22}skipped: {lacks}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Damaged inputs to every reader.")
    parser.add_argument("--cases", type=int, default=20_000, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of each reader's first case")
    parser.add_argument("--reader", action="append", choices=readers.READERS, help="these readers alone")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve()
        return 0
    found = fuzz(asked.cases, asked.seed, asked.reader or list(readers.READERS), asked.first)
    failures = [failure for tally in found.values() for failure in tally.failures]
    print(*failures, sep="\n\n")
    return int(bool(failures) or any(tally.peak > MOST_BYTES for tally in found.values()))


if __name__ == "__main__":
    sys.exit(main())
