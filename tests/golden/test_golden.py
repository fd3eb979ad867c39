"""Frozen decisions cost what they did, and rules decide as they did. README.md says what is frozen."""

import numpy as np
import pytest

from . import case as cased
from . import cases, store

# The everyday tier has at least one case of every kind of run; the rest takes minutes.
EVERYDAY = (
    "quickstart",
    "camoe/",
    "hd_moe/mixtral-8x7b_4x4",
    "hd_moe/qwen2-57b-a14b_4x8_5",
    "hd_moe/deepseek-v2-lite_8x8_5",
    "moentwine/deepseek-v3_6x6",
    "wafer_gpu/gpt-oss-20b",
    "expert_streaming/hd_moe_2x2",
    "expert_streaming/yuan2.0-m32_2x2",
    "variant/moentwine_invasive",
    "variant/hd_moe_charged",
    "variant/static_gated",
    "schedules/serial",
    "schedules/pipelined(2)",
    "bounds/",
    "slopes/hd_moe",
    "counts/",
    "balancer/topology_aware_invasive",
    "copies/nodes_nearest",
)
EVERY = [(family, name) for family, known in cases.FAMILIES.items() for name in known]


PARAMETERS = [
    pytest.param(each, id=each[1], marks=[] if each[1].startswith(EVERYDAY) else [pytest.mark.slow]) for each in EVERY
]


def frozen(family: str, name: str) -> tuple[store.Arrays, store.Arrays, store.Arrays, float]:
    """Decisions, figures, what deciding told beside, and the tolerance of figures here."""
    arrays, recorded = store.read(family)
    own = store.under(arrays, f"{name}:")
    parts = (store.under(own, f"{part}/") for part in ("decisions", "figures", "told"))
    return *parts, store.tolerance(recorded)


def agree(told: list[str]) -> None:
    assert not told, f"{len(told)} differ:\n" + "\n".join(told[:30])


@pytest.fixture(scope="module", params=PARAMETERS)
def golden(request) -> tuple[str, str]:
    """The family and name of a case: all tests of one case run in turn, for they share what they read and compile."""
    return request.param


def test_stored_decisions_cost_what_they_did(golden):
    family, name = golden
    decisions, figures, _, rtol = frozen(family, name)
    agree(store.differences(cases.FAMILIES[family][name].price(decisions), figures, rtol))


def test_rules_decide_as_they_did(golden):
    family, name = golden
    decisions, figures, beside, rtol = frozen(family, name)
    case = cases.FAMILIES[family][name]
    if not case.rules:
        pytest.skip("made by hand, not decided")
    decided, told = case.decide()
    if case.searched:
        agree(cased.worse(case, told, beside))
        return
    agree(store.undecided(decided, decisions, 0.0 if rtol == store.HERE else store.OTHERWISE))
    known = figures | beside
    agree(store.differences(told, {name: known[name] for name in told if name in known}, 3 * rtol))
    assert {*beside} <= {*told}


def test_every_golden_array_belongs_to_a_case():
    """What is no longer checked must not stay in the files."""
    for family, known in cases.FAMILIES.items():
        arrays, recorded = store.read(family)
        assert {name.split(":")[0] for name in arrays} == {*known}
        assert {*recorded} == {*store.fingerprint()}
    assert {path.stem for path in store.DATA.glob("*.npz")} == {*cases.FAMILIES}


# That the net can catch something.


@pytest.mark.parametrize("part", ["figures", "decisions"])
def test_a_changed_digit_is_noticed(part):
    family, name = "hd_moe", cases.SMALLEST
    decisions, figures, _, _ = frozen(family, name)
    case = cases.FAMILIES[family][name]
    if part == "figures":
        changed = figures | {"static/total": figures["static/total"] * np.where(np.arange(2) == 1, 1 + 3e-6, 1)}
        assert store.differences(figures, changed, store.HERE)
        assert not store.differences(figures, changed, store.ELSEWHERE)
        assert store.differences(figures, changed | {"static/more": np.zeros(2)}, 1.0)
    else:
        moved = decisions | {"plan": np.roll(decisions["plan"], 1, axis=2)}
        assert store.differences(case.price(moved), figures, store.ELSEWHERE)
        assert store.undecided(moved, decisions, 0.0)


def test_comparison_by_hand():
    expected = {"a": np.array([1.0, 100.0, np.nan, np.inf])}
    assert not store.differences(expected, expected, 0.0)
    assert not store.differences({"a": np.array([1.0 + 5e-6, 100.0, np.nan, np.inf])}, expected, 1e-6)
    assert store.differences({"a": np.array([1.0 + 2e-5, 100.0, np.nan, np.inf])}, expected, 1e-6)
    assert store.differences({"a": np.array([1.0, 100.0, 0.0, np.inf])}, expected, 1e-6)
    assert store.differences({"a": np.array([1.0, 100.0, np.nan, 1.0])}, expected, 1e-6)
    assert store.differences({"a": np.array([np.nan, 100.0, np.nan, np.inf])}, expected, 1e-6)
    assert store.differences({"a": np.zeros(3)}, expected, 1.0)
