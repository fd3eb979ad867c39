"""Which package of jaxmoe may import which, read from the sources; and what importing it leaves alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import jaxmoe

ROOT = Path(jaxmoe.__file__).parent
STUDIES = [path for folder in ("studies", "figures") for path in sorted((ROOT.parent / folder).rglob("*.py"))]

LEAVES = {"errors", "extras", "files", "registry", "settings", "threads", "units", "relax"}
DESCRIPTIONS = LEAVES | {"hardware", "models", "traces"}
TRAFFIC = DESCRIPTIONS | {"placement"}
TIMES = TRAFFIC | {"network"}
DECIDED = TIMES | {"compiling", "engine"}
RUNS = DECIDED | {"methods", "tune", "des", "config", "memory", "serving"}

# Beside itself, each package may import these. "" is the top: `__init__`, which only hands on, and `__main__`.
ALLOWED = {
    "": RUNS | {"api", "experiment", "cli"},
    "compiling": set(),
    "errors": set(),
    "extras": {"errors"},
    "files": set(),
    "memory": set(),
    "progress": set(),
    "registry": {"errors"},
    "run_folders": {"errors", "files"},
    "settings": {"errors"},
    "threads": set(),
    "units": set(),
    "relax": set(),
    "hardware": {"errors", "registry", "settings", "units", "relax"},
    "models": {"errors", "units", "relax"},
    "traces": {"errors", "extras", "files", "registry", "threads", "units", "relax"},
    "placement": DESCRIPTIONS,
    "network": TRAFFIC,
    "engine": TIMES | {"compiling"},
    "tune": DECIDED | {"methods"},  # methods: whose numbers may be tuned
    "methods": DECIDED | {"des"},  # des: a system carries out what it decided there
    "des": {"errors", "registry", "threads", "units", "hardware", "models", "traces", "placement"},
    "serving": {"errors", "files", "relax", "units", "hardware", "models", "placement", "engine", "methods", "des"},
    "report": {"errors", "extras", "files", "hardware"},
    "config": {
        "errors",
        "registry",
        "settings",
        "units",
        "hardware",
        "models",
        "placement",
        "network",
        "engine",
        "tune",
        "methods",
    },  # for settings
    "experiment": RUNS | {"progress"},
    "sweep": RUNS | {"experiment", "run_folders"},
    "api": RUNS | {"experiment"},
    "testing": RUNS | {"experiment", "api"},
    "cli": RUNS | {"experiment", "sweep", "report", "run_folders", "progress"},
}


def package_of(module: str) -> str:
    """The part of jaxmoe that a module belongs to; "" for its top."""
    return module.split(".")[1] if module.count(".") else ""


def imported_modules(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Modules of jaxmoe that a source names in imports, wherever they stand in it."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            # `from jaxmoe import cli` names a package; deeper names may be of objects and change nothing.
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "jaxmoe")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = [*path.relative_to(ROOT.parent).with_suffix("").parts]
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def package_imports() -> set[tuple[str, str, str]]:
    """Every (importing package, imported package, importing module)."""
    found = set()
    for module, path in modules():
        package = "" if path.name == "__main__.py" and path.parent == ROOT else package_of(module)
        for name in imported_modules(path.read_text(), module, path.name == "__init__.py"):
            found.add((package, package_of(name), module))
    return found


def test_every_package_has_its_place_in_the_order():
    assert {package_of(module) for module, _ in modules()} - {"__main__"} <= set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_stands_before_it(package):
    wrong = [
        f"{module} imports {imported}"
        for importing, imported, module in sorted(package_imports())
        if importing == package and imported != package and imported not in ALLOWED[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_studies_and_figures_stay_off_the_command_line(path):
    assert [name for name in imported_modules(path.read_text(), path.stem) if package_of(name) == "cli"] == []


def test_the_studies_are_really_read():
    edges = {
        (path.parent.parent.name, package_of(name))
        for path in STUDIES
        for name in imported_modules(path.read_text(), path.stem)
    }
    assert ("studies", "experiment") in edges


def test_the_sources_are_really_read():
    edges = {(package, imported) for package, imported, _ in package_imports()}
    assert {
        ("tune", "engine"),
        ("engine", "network"),
        ("des", "hardware"),
        ("cli", "experiment"),
        ("", "cli"),
    } <= edges


def test_the_order_has_no_cycle():
    placed: set[str] = set()
    while len(placed) < len(ALLOWED):
        ready = {package for package, before in ALLOWED.items() if before <= placed} - placed
        assert ready, f"a cycle among {set(ALLOWED) - placed}"
        placed |= ready


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import jaxmoe.engine.layer", "engine"),
        ("import numpy as np, jaxmoe.tune as t", "tune"),
        ("from jaxmoe.network import loads", "network"),
        ("from jaxmoe import cli", "cli"),
        ("def late():\n    from jaxmoe.sweep import run", "sweep"),
        ("if TYPE_CHECKING:\n    from jaxmoe.des.event_loop import SimulatedRun", "des"),
        ("from .tasks import TaskGraph", "des"),
        ("from ..engine import evaluate", "engine"),
        ("from .. import tune", "tune"),
    ],
)
def test_an_import_is_found_in_any_form(source, expected):
    assert [package_of(name) for name in imported_modules(source, "jaxmoe.des.event_loop")] == [expected]


@pytest.mark.slow
def test_importing_everything_changes_no_setting_of_jax():
    script = """
import importlib, pkgutil
import jax
jax.config.update("jax_compilation_cache_dir", "/nowhere")
before = dict(jax.config.values)
import jaxmoe
for module in pkgutil.walk_packages(jaxmoe.__path__, "jaxmoe."):
    importlib.import_module(module.name)
changed = {name: value for name, value in jax.config.values.items() if before.get(name) != value}
assert "jax_enable_x64" in before and "jax_compilation_cache_dir" in before
assert before["jax_compilation_cache_dir"] == "/nowhere"
print(changed)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"
