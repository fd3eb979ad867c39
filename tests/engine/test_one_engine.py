"""There is one way from a decision to a time: nothing outside the engine makes or changes one (read from sources)."""

import ast
from pathlib import Path

import pytest

import jaxmoe

ROOT = Path(jaxmoe.__file__).parent
OUTSIDE = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] != "engine"]
MAKES = {"LayerTime", "Usage", "Priced"}  # constructors that the engine alone calls
TIMES = {"stages", "busy", "total", "energy", "delay"}  # fields of a LayerTime


def called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def makes_a_time(source: str) -> list[int]:
    """Lines that construct a time, or change a field of one by `replace` or `tree_at`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if called(node) in MAKES or (
            called(node) == "replace" and {keyword.arg for keyword in node.keywords} & (TIMES - {"energy"})
        ):
            lines.append(node.lineno)
        elif called(node) == "tree_at" and node.args and isinstance(node.args[0], ast.Lambda):
            # Fields of a StageTime of the network have other names.
            read = {each.attr for each in ast.walk(node.args[0]) if isinstance(each, ast.Attribute)}
            if read & TIMES:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_time_is_made_or_changed_outside_the_engine(path):
    assert makes_a_time(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "LayerTime({}, {}, 0)",
        "engine.LayerTime(stages, busy, total)",
        "replace(time, total=time.total + waiting)",
        "eqx.tree_at(lambda t: t.busy, time, {})",
        "Usage(seconds, {}, {}, delay)",
    ],
)
def test_what_is_looked_for_is_found(source):
    assert makes_a_time(source) == [1]


def test_one_scan_rolls_out_every_system():
    """Systems and their runs say what decides and how it is replayed; steps go through `jaxmoe.engine.rollout`."""
    classes = [
        each
        for path in OUTSIDE
        if "methods" in path.parts
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ClassDef) and any(ast.unparse(b).endswith(("System", "Run")) for b in each.bases)
    ]
    assert len(classes) > 10
    for each in classes:
        calls = {called(node) for node in ast.walk(each) if isinstance(node, ast.Call)}
        assert not calls & {"scan", "while_loop", "fori_loop"}, f"{each.name} rolls out by itself"
