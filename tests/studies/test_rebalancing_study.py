"""The study of EPLB's interval: subjects that drift, what a plan sees of them, and what it is worth, by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.errors import InputError
from jaxmoe.placement.eplb import eplb
from jaxmoe.serving.online.rebalancing import imbalance

STUDY = Path(__file__).parents[2] / "studies" / "serving"


@pytest.fixture(scope="module")
def drift():
    sys.path.insert(0, str(STUDY))
    import drift

    yield drift
    sys.path.remove(str(STUDY))
    sys.modules.pop("drift", None)


@pytest.fixture(scope="module")
def rebalancing(drift):
    import rebalancing

    yield rebalancing
    sys.modules.pop("rebalancing", None)


def test_files_without_a_common_subject_are_told(drift, tmp_path):
    counts = np.ones((1, 2, 4), int)
    for name, subject in (("a", "law/x"), ("b", "art/x"), ("c", "law/y")):
        np.savez(tmp_path / f"{name}.npz", group_name=[subject], counts_by_group=counts)
    with pytest.raises(InputError, match="have no subject in common"):
        drift.read_subjects(tmp_path / "a.npz", tmp_path / "b.npz")
    assert drift.read_subjects(tmp_path / "a.npz", tmp_path / "c.npz").served.shape == (1, 2, 4)


@pytest.mark.parametrize("interval", [10.0, 60.0, 600.0])
def test_a_plan_is_of_the_interval_before_it_alone(rebalancing, drift, interval):
    """Tokens of other times change nothing, those of the interval do; until then the plan before stands."""
    rng = np.random.default_rng(0)
    subjects = drift.Subjects(*rng.dirichlet(np.full(32, 0.3), (2, 5, 3)))
    start, every = round(rebalancing.HISTORY / rebalancing.WINDOW), round(interval / rebalancing.WINDOW)
    tokens = rng.exponential(size=(start + 2 * every + 3, 5)) ** 3
    policy = rebalancing.Policy("any", interval)
    at = start + every
    plans = list(rebalancing.plans(policy, tokens, subjects))
    elsewhere, inside = tokens.copy(), tokens.copy()
    elsewhere[: at - every], elsewhere[at:] = 1.0, 1.0
    inside[at - every : at] = rng.permuted(tokens[at - every : at], axis=1)
    assert (list(rebalancing.plans(policy, elsewhere, subjects))[every] == plans[every]).all()
    assert (list(rebalancing.plans(policy, inside, subjects))[every] != plans[every]).any()
    assert all(plan is plans[every] for plan in plans[every : 2 * every])
    assert plans[2 * every] is not plans[every]


def test_without_copies_experts_stay_in_turn(rebalancing, drift):
    subjects = drift.Subjects(*np.random.default_rng(0).dirichlet(np.ones(32), (2, 4, 3)))
    plans = list(rebalancing.plans(rebalancing.POLICIES[0], np.ones((70, 4)), subjects))
    assert len(plans) == 10
    assert all((plan == np.arange(32)).all() for plan in plans)


def test_copies_by_loads_of_other_questions_even_devices(drift, shared):
    """Of each subject by itself, what was planned from other questions is nearer to even than no copies."""
    folder = shared / "traces" / "gpt-oss-20b"
    subjects = drift.read_subjects(folder / "load_mmlu_validation.npz", folder / "load_mmlu_test.npz")
    layers, experts = subjects.served.shape[1:]
    assert (len(subjects.served), layers, experts) == (57, 24, 32)
    in_turn = np.tile(np.arange(experts), (layers, 1))
    for planned, served in zip(subjects.planned, subjects.served, strict=True):
        copied = imbalance(served, eplb(planned, experts + 8, 8), 8)
        assert 1 <= copied < imbalance(served, in_turn, 8)
