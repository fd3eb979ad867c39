"""The study of balancers under load: who comes at a rate, and what a plan sees, by hand."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxmoe.serving.online.rebalancing import imbalance

STUDY = Path(__file__).parents[2] / "studies" / "serving"
OF_STUDY = ("balancers", "rebalancing", "drift")


@pytest.fixture(scope="module")
def balancers():
    sys.path.insert(0, str(STUDY))
    import balancers

    yield balancers
    sys.path.remove(str(STUDY))
    for name in OF_STUDY:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def subjects(balancers):
    drawn = np.random.default_rng(0).dirichlet(np.full(32, 0.3), (2, 5, 3))
    return balancers.Subjects(*drawn)


def test_who_comes_at_a_rate_comes_at_higher_ones_as_well(balancers, subjects, monkeypatch):
    monkeypatch.setattr(balancers, "HISTORY", 20.0)
    monkeypatch.setattr(balancers, "SERVED", 60.0)
    come, tokens = balancers.users(subjects, 1.5, 120.0, 0)
    few, many = come.at(50.0), come.at(100.0)
    assert np.isin(few.arrival, many.arrival).all()
    assert len(few) == pytest.approx(50 * 60, rel=0.1)
    assert len(many) == pytest.approx(100 * 60, rel=0.1)
    assert tokens.shape == (8, 5)
    assert balancers.users(subjects, 1.5, 120.0, 0)[1].tolist() == tokens.tolist()


@pytest.mark.parametrize("name", ["none", "eplb, static", "eplb renamed, 1 min", "greedy, 1 min"])
def test_plans_even_loads_out_and_change_when_they_are_asked_to(balancers, subjects, name, monkeypatch):
    monkeypatch.setattr(balancers, "HISTORY", 60.0)
    monkeypatch.setattr(balancers, "the_server", lambda: SimpleNamespace(table=lambda *_: None))
    (own,) = (each for each in balancers.balancers(4) if each.name == name)
    tokens = np.random.default_rng(1).exponential(size=(6 + 13, 5)) ** 3
    held = list(balancers.plans(own, tokens, subjects))
    in_turn = list(balancers.plans(balancers.Balancer("none"), tokens, subjects))
    changed = [at for at in range(1, 13) if (held[at] != held[at - 1]).any()]
    assert changed == ([6, 12] if own.interval_s == 60 else [])
    seen = balancers.loads(tokens[:6].sum(axis=0), subjects.planned)
    uneven, even = (imbalance(seen, each[0], balancers.DEVICES) for each in (in_turn, held))
    assert even < uneven if own.rule else even == uneven
    for slots in (*in_turn, *held):
        assert all({*layer.tolist()} >= {*range(32)} for layer in slots)


def test_requests_that_are_not_there_keep_no_rate(balancers):
    come = balancers.Users(balancers.Requests(np.arange(3.0), np.ones(3, int), np.ones(3, int)), np.full(3, 0.5))
    assert len(come.at(balancers.MOST / 4)) == 0
    assert len(come.at(balancers.MOST)) == 3
