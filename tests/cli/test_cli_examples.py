"""Examples that people are shown, in the help of every command and in READMEs: each runs as it is written.

Those of the help run on fewer batches and layers, those of READMEs as they are. A user's own files are made small here.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import typer
from report_folders import write_evaluated

from jaxmoe.cli import kept_output
from jaxmoe.cli.app import app
from jaxmoe.config import load_hardware, load_scenario
from jaxmoe.experiment.measured_kernels.tables import write_columns
from jaxmoe.placement import Placement, read_plan, write_plan
from jaxmoe.placement.engine_files import write_slot_plan
from jaxmoe.placement.slots import SlotPlan
from jaxmoe.traces import GatingTrace, write_trace
from jaxmoe.traces.synthetic import synthetic_trace

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--layers", "0", "--set", "evaluation.batches=2", "--set", "validation.batches=1"]
SHORTER = {
    "tune": [*QUICK, *(f"--set=tuning.{key}=1" for key in ("restarts", "steps", "refine_steps", "refine_chains"))],
    "evaluate": QUICK,
    "validate": QUICK,
    "simulate": ["--layers", "0", "--iterations", "2", "--replay", "1"],
    "serve": ["--set", "serving.arrivals.requests=20"],
    "serve rates": ["--set", "serving.arrivals.requests=20"],
    "network profile": ["--sizes", "1e4,1e6,1e8"],
    "trace synth": ["--tokens", "64"],
}
FEW_LAYERS = ("trace fit", "plan advise")  # enough for what takes as long as its trace has layers
LONG = (
    "tune",
    "evaluate",
    "simulate",
    "serve",
    "serve rates",
    "serve best",
    "sweep",
    "trace stats",
    "trace fit",
    "plan place",
    "plan advise",
)  # also when they are shorter


KERNEL_ROW = {
    "framework": "SGLang",
    "version": "0.5.14",
    "op_name": "moe",
    "kernel_source": "sglang_fused_moe_triton",
    "moe_dtype": "fp8_block",
    "num_tokens": 64,
    "hidden_size": 7168,
    "inter_size": 2048,
    "topk": 8,
    "num_experts": 256,
    "moe_tp_size": 1,
    "moe_ep_size": 1,
    "distribution": "balanced",
}


def commands(group: typer.core.TyperGroup, name: str = "") -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """All commands by their words."""
    for word, command in group.commands.items():
        words = f"{name} {word}".strip()
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, words)
        else:
            yield words, command


COMMANDS = dict(commands(typer.main.get_command(app)))
FOR_PROGRAMS = ("--json", "--csv", "kept.csv", "--latex", "kept.tex")
WITHOUT_RESULTS = {"init", "list", "report", "calibrate predict"}  # they write one file, or none
WITHOUT_TABLES = {"trace synth"}


def fences(path: Path, language: str) -> list[str]:
    """What a page has between fences of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)


def typed(fence: str) -> list[list[str]]:
    """The calls of `jaxmoe` in a fence, without that word."""
    calls = [shlex.split(call) for line in fence.splitlines() for call in line.split("&&")]
    return [words[1:] for words in calls if words and words[0].rpartition("/")[2] == "jaxmoe"]


PAGES = {name: ROOT / name / "README.md" for name in (".", "configs", "jaxmoe")}
TYPED = [(name, at) for name, page in PAGES.items() for at, fence in enumerate(fences(page, "sh")) if typed(fence)]
FIRST = TYPED.pop(0)  # has a test of its own


def example_of(command: str) -> list[str]:
    """The words of the example in a command's help, without `jaxmoe`."""
    (line,) = re.findall(r"^\s*Example: jaxmoe (.+)$", COMMANDS[command].help or "", re.M)
    return shlex.split(line)


def trace_of(layers: Iterable[int]) -> GatingTrace:
    return synthetic_trace(96, layers, 8, 2, 1.5, 0.2, 0.2, 0)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder as a user has it: a clone of the project, and files of their own under the names of the examples."""
    for name in ("configs", "studies", "figures"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "trace.npz", trace_of(range(32)))
    for seed, name in enumerate(("coding.npz", "chat.npz")):
        write_trace(tmp_path / name, synthetic_trace(96, (0, 1), 8, 2, 1.5, 0.2, 0.2, seed))
    quickstart = load_scenario("configs/scenarios/quickstart.yaml")
    layers, experts = tuple(quickstart.model.moe_layer_ids.ids), quickstart.model.num_experts
    whole = np.eye(16, dtype=np.float32)[np.arange(experts) % 16]
    write_plan(tmp_path / "plan.npz", Placement(np.repeat(whole[None], len(layers), axis=0), (4, 4), "sharded", layers))
    for name, nodes in (("matrices.npz", 64), ("traffic.npz", 36)):
        sent = np.random.default_rng(0).random((nodes, nodes)) * 400
        np.savez(name, mine=sent * (1 - np.eye(nodes)))
    sizes = np.geomspace(1e3, 1e8, 20)
    rows = [f"0,1,{size},{300e-9 + size / 2e12}" for size in sizes]
    (tmp_path / "messages.csv").write_text("\n".join(["source,destination,bytes,seconds", *rows]))
    for seed, name in enumerate(("map.json", "before.json", "after.json")):
        experts = np.random.default_rng(seed).permuted(np.tile(np.arange(8), (32, 1)), axis=1)
        write_slot_plan(tmp_path / name, "vllm_ascend", SlotPlan(np.tile(experts, 2), 16, 8, tuple(range(32)), 32))
    write_evaluated(tmp_path / "runs" / "evaluated")
    write_columns(tmp_path / "moe_perf.parquet", {key: np.array([value]) for key, value in KERNEL_ROW.items()})
    return tmp_path


def test_every_command_has_an_example_of_itself():
    assert {"tune", "network profile", "plan advise", "trace synth", "report"} <= COMMANDS.keys()
    for command in COMMANDS:
        words = example_of(command)
        assert words[: len(command.split())] == command.split()


def test_examples_run_outside_a_clone():
    """What ships is named, not given by the path that it has in a clone; a study does not ship."""
    from_clone = [name for name in COMMANDS if re.search("configs/|studies/", " ".join(example_of(name)))]
    assert from_clone == ["serve best", "sweep"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_lines_only_where_the_terminal_ends(command):
    help_text = COMMANDS[command].help or ""
    assert all("\n" not in paragraph for paragraph in help_text.strip().split("\n\n"))


@pytest.fixture
def printed(monkeypatch):
    """What a command that runs prints for people, on a terminal of 80 columns, also where `--json` leaves it out."""
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    texts = []
    monkeypatch.setattr(kept_output, "redirect_stdout", lambda text: texts.append(text) or redirect_stdout(text))
    return texts


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in COMMANDS]
)
def test_the_example_in_the_help_runs_and_what_it_prints_fits_80_columns(run, desk, printed, command):
    """No line is longer, and no cell of a table is cut off."""
    if command in FEW_LAYERS:
        write_trace(desk / "trace.npz", trace_of(range(0, 32, 8)))
    kept = () if command in WITHOUT_RESULTS else FOR_PROGRAMS
    done = run(*example_of(command), *SHORTER.get(command, ()), *kept)
    assert done.exit_code == 0, done.output
    if kept:  # nothing else is on standard output, and a table of people is one of programs too
        assert json.loads(done.stdout)["command"] == command
        assert ("--csv: this run printed no table" in " ".join(done.stderr.split())) == (command in WITHOUT_TABLES)
    if kept and command not in WITHOUT_TABLES:
        assert (desk / "kept.csv").read_text().count("\n") > 1
        assert r"\midrule" in (desk / "kept.tex").read_text()
    told = printed[0].getvalue() if kept else done.stdout
    lines = re.sub(r"\x1b\[[\d;]*m", "", told).splitlines()
    tables = [line for line in lines if line.startswith(("│", "┃"))]
    assert tables or not kept or command in WITHOUT_TABLES
    assert max(map(len, tables), default=0) <= 80
    assert "…" not in "".join(tables), told


@pytest.mark.slow
@pytest.mark.parametrize(("page", "at"), TYPED)
def test_what_a_page_has_typed_runs(run, desk, page, at):
    for words in typed(fences(PAGES[page], "sh")[at]):
        done = run(*words)
        assert done.exit_code == 0, done.output


def printed_by(code: str, folder: Path, **environment: str) -> str:
    """What a program prints in a process of its own; what two programs share is compiled once."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | kept | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_examples_in_python_run(tmp_path):
    """Those of both pages, one after the other: they go on from each other. Files go to the working folder."""
    code = "\n".join(block for page in (".", "jaxmoe") for block in fences(PAGES[page], "python"))
    printed = printed_by(code, tmp_path).splitlines()
    *_, all_to_all, _halves, _dragonfly, _to_the_first, _startup, gain, kept, speedup, _topology, _exchange = printed
    assert 1e-4 < float(all_to_all) < 1e-3
    assert float(speedup) > 1  # a broadcast that costs nothing
    mean, error = map(float, gain.split(" +- "))
    assert 0 < error < abs(mean)
    assert 0 < float(kept) < 1
    written = read_plan(tmp_path / "mine.npz")
    hosts = written.share[written.share > 0]
    assert hosts.min() >= 0.05
    assert len(hosts) < written.share.size
    for report in printed[-2:]:  # that a part does what is asked of it
        model, simulated = (float(re.search(rf"{name}=([\d.e-]+)", report)[1]) for name in ("seconds", "simulated"))
        assert model == pytest.approx(simulated, rel=0.02)


def test_the_scenario_of_a_page_loads(desk):
    for name in ("hardware", "models", "workloads"):
        (desk / name).symlink_to(ROOT / "configs" / name)
    written, machine, own_parts = fences(PAGES["configs"], "yaml")
    (desk / "links.yaml").write_text(machine)
    assert len(load_hardware(desk / "links.yaml").links) == 2
    assert "dragonfly" in own_parts
    (desk / "mine.yaml").write_text(written)
    assert load_scenario(desk / "mine.yaml").system.name == "hd_moe"


@pytest.mark.slow
def test_the_first_table_is_what_the_first_command_finds(desk):
    (call,) = typed(fences(PAGES[FIRST[0]], "sh")[FIRST[1]])
    printed_by(f"from jaxmoe.cli.app import app\napp({call})", desk, XLA_FLAGS="")  # compiled as it is for users
    found = json.loads((desk / "runs" / "quickstart" / "summary.json").read_text())["strategies"]
    rows = re.findall(r"^\|.*?`(tp|ep_balanced|hybrid_complete|tuned)` \| ([\d.]+) \|", PAGES["."].read_text(), re.M)
    assert len(rows) == 4
    for name, told in rows:
        assert found[name]["mean"]["best_total_s"] == pytest.approx(float(told) * 1e-6, rel=0.02), name
