"""The command line answers before JAX is loaded, and what it then has written out by hand is what there is."""

import os
import subprocess
import sys
from dataclasses import asdict
from typing import get_args

import pytest

from jaxmoe.cli.listing import KINDS
from jaxmoe.config.systems import SystemConfig
from jaxmoe.des.traffic import Order
from jaxmoe.methods import METHODS
from jaxmoe.registry import OPTIMISERS, TRACES
from jaxmoe.traces.synthesis import PRESETS

SCRIPT = """
import sys
from jaxmoe.cli.app import app
for command in sys.argv[1:]:
    try:
        app(command.split())
    except SystemExit as end:
        print(end.code, sorted({"jax", "matplotlib", "numba", "scipy"} & set(sys.modules)), "after", command)
"""
COMMANDS = {
    "--help": 0,
    "trace --help": 0,
    "tune --help": 0,
    "tune configs/scenarios/quickstart.yaml --set modell=1 --out results": 2,
    "evaluate no_such.yaml --out results": 2,
    "sweep no_such.yaml --out results": 2,
    "report --help": 0,
    "list": 0,
    "init --machine dojo_5x5 --model tiny --system hd_moe --out {out}": 0,
    "init --machine no_such --model tiny --out results": 2,
    "sweep configs/scenarios/quickstart.yaml --out results": 2,
}


def test_help_and_wrong_keys_are_told_without_jax(pytestconfig, tmp_path):
    """One process for all: what a command has loaded is still there after the next."""
    given = [command.format(out=tmp_path / "new") for command in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *given], capture_output=True, text=True, cwd=pytestconfig.rootpath
    )
    told = [line for line in done.stdout.splitlines() if " after " in line and line[0].isdigit()]
    expected = [f"{code} [] after {command}" for command, code in zip(given, COMMANDS.values(), strict=True)]
    assert told == expected, done.stderr


def test_a_sweep_without_parquet_is_told_before_jax(pytestconfig, tmp_path):
    known = "import importlib.util as u; f = u.find_spec\n"
    known += "u.find_spec = lambda name, *a: None if name == 'pyarrow' else f(name, *a)\n"
    commands = [
        f"sweep studies/dse/quickstart.yaml --out {tmp_path / 'sweep'}",
        f"serve rates served/qwen3-30b-a3b_rtxpro6000_2 --rates 2 --out {tmp_path / 'rates'}",
    ]
    call = [sys.executable, "-c", known + SCRIPT, *commands]
    done = subprocess.run(call, capture_output=True, text=True, cwd=pytestconfig.rootpath)
    assert done.stdout.splitlines()[-2:] == [f"2 [] after {command}" for command in commands], done.stderr
    assert done.stderr.count("needs pyarrow; install it with: ") == done.stderr.count("pip install '") == 2


@pytest.mark.parametrize(("given", "level"), [({}, "3"), ({"TF_CPP_MIN_LOG_LEVEL": "0"}, "0")])
def test_what_xla_tells_its_developers_stays_off_the_screen_unless_asked_for(given, level):
    script = "import os, sys; from jaxmoe.cli.app import main; sys.argv = ['jaxmoe', '--version']\ntry: main()\n"
    script += "except SystemExit: print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    others = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=others | given)
    assert done.stdout.splitlines()[-1] == level, done.stderr


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        (("network",), get_args(Order)),
        (("trace", "convert"), TRACES),
        (("trace", "synth"), PRESETS),
        (("tune",), OPTIMISERS),
        (("list",), KINDS),
        (("sweep",), ("scenario:", "axes:", "set:", "metrics:")),
        (("evaluate",), ("jaxmoe list scenarios",)),
        (("calibrate",), ("jaxmoe list machines",)),
    ],
)
def test_help_lists_every_choice(run, arguments, choices, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shown = run(*arguments, "--help").output
    assert [choice for choice in choices if choice not in shown] == []


@pytest.mark.parametrize("name", SystemConfig.known)
def test_a_scenario_has_the_defaults_of_the_system_itself(name):
    given, system = SystemConfig.known[name](name=name).model_dump(), asdict(METHODS[name]())
    assert {key: given[key] for key in system} == system
    assert given.keys() - system.keys() <= {"name", "plan", "gate"}
