"""Tuning with copies: batches name copies, regions are rivals, and what is returned is a plan of copies."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from small_problem import EXPERTS, LAYERS, NODES, SETTINGS, SHAPE, small_problem

from jaxmoe.engine import evaluate, serving_of
from jaxmoe.hardware import node_memory
from jaxmoe.network import build_exchange
from jaxmoe.placement import Placement, PlanError
from jaxmoe.placement.regions import Regions, by_least_work, region_copies, regions_named, shipped_regions
from jaxmoe.tune import evaluator, local_search, regions, tune
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.regions import in_regions, region_cuts, within_budget
from jaxmoe.tune.settings import StopSwitch


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    monkeypatch.setattr(evaluator, "SELECTION_BATCHES", (8, 8))
    monkeypatch.setattr(evaluator, "REBALANCE_BATCHES", 32)


def test_copies_share_the_work_of_their_expert():
    problem = replace(small_problem(), regions=(1, 2))
    assert problem.num_experts == 2 * EXPERTS
    np.testing.assert_allclose(problem.frequency.sum(axis=1), 1)
    halves = problem.frequency.reshape(LAYERS, 2, EXPERTS)
    np.testing.assert_allclose(halves[:, 0], halves[:, 1])
    np.testing.assert_allclose(halves.sum(axis=1), problem.expert_frequency)


def test_batches_name_the_copy_of_the_region_where_a_token_lives():
    plain = small_problem()
    problem = replace(plain, regions=(2, 1))
    experts, copies = (np.asarray(each.draw(3, 1).experts) for each in (plain, problem))
    # On a 2x2 mesh the first half of the tokens lives on nodes 0 and 1, of x = 0.
    region = (np.arange(plain.batch_tokens) * NODES // plain.batch_tokens) // 2
    np.testing.assert_array_equal(copies, experts + EXPERTS * region[:, None])


def test_a_plan_of_copies_takes_as_long_to_the_tuner_as_to_those_who_serve_it():
    problem = replace(small_problem(), regions=(1, 2))
    topology = problem.model.machine.topology
    copies = region_copies(regions_named("regions_1x2_ep"), problem.expert_frequency, topology)
    drawn, named = small_problem().draw(4, 7), problem.draw(4, 7)
    tuned = evaluate(problem.model, jnp.asarray(copies.share), problem.merged(named))
    served = evaluate(problem.model, jnp.asarray(copies.share), drawn, serving=serving_of(copies))
    np.testing.assert_allclose(tuned.total, served.total, 1e-5)


@pytest.mark.parametrize("numbers", [(2, 1), (1, 2)])
def test_tokens_that_choose_a_region_are_timed_as_they_are_served(numbers):
    problem = replace(small_problem(), regions=numbers, served_by="least_work")
    copies = by_least_work(
        region_copies(Regions(numbers, "ep"), problem.expert_frequency, problem.model.machine.topology)
    )
    drawn = small_problem().draw(4, 7)
    np.testing.assert_array_equal(problem.draw(4, 7).experts, drawn.experts)
    served = evaluate(problem.model, jnp.asarray(copies.share), drawn, serving=serving_of(copies))
    tuned = local_search.seconds_of_all(local_search.search_of(problem), jnp.asarray(copies.share), drawn)
    np.testing.assert_allclose(tuned, served.total, 1e-5)
    assert (lower_bound(problem, drawn) <= served.mean * (1 + 1e-6)).all()


def test_a_search_where_tokens_choose_their_region():
    problem = replace(small_problem(), regions=(1, 2), served_by="least_work")
    result = tune(problem, SETTINGS)
    placement = Placement.of_copies(problem.placed(result.share), SHAPE, tuple(range(LAYERS)), exchange=result.exchange)
    assert placement.copies.serving.together
    assert (result.cost <= result.shipped.seconds * (1 + 1e-6)).all()


def test_regions_are_what_a_plan_of_copies_competes_with():
    problem = in_regions(small_problem(), 2, 0).shipped
    assert problem.regions in region_cuts(small_problem(), 2) == [(1, 2), (2, 1)]
    with StopSwitch() as stop:
        seen = Evaluator(problem, 0, stop).looks
    cut = "x".join(map(str, problem.regions))
    assert set(seen) == {f"regions_{cut}_tp", f"regions_{cut}_ep"}  # a region of two nodes has no other groups
    of_cut = shipped_regions(
        problem.regions, problem.expert_frequency, problem.model.machine.topology, ("least_loaded",)
    )
    rings = {each.name: each.exchanges for each in of_cut}
    assert rings[f"regions_{cut}_tp"] == (f"rings_{cut}_both_ways", "least_loaded")
    assert rings[f"regions_{cut}_ep"] == ("least_loaded",)


def test_the_cuts_and_rules_are_those_of_a_loop_over_all(monkeypatch):
    monkeypatch.setattr(evaluator, "at_once", lambda nodes: 2)  # so that a look has two batches of eight
    plain = small_problem(exchanges=("random_host", "corner_host", "ring_both_ways"))
    topology, dealt, every = plain.model.machine.topology, {}, {}
    for rule in ("home", "least_work"):
        for cut in region_cuts(plain, 2):
            problem = replace(plain, regions=cut, served_by=rule)
            search, batches = local_search.search_of(problem), Evaluator(problem, 0, StopSwitch()).selection
            for each in shipped_regions(cut, problem.expert_frequency, topology, tuple(problem.gathers)):
                for name in each.exchanges:
                    exchange = problem.gathers.get(name) or build_exchange(name, topology)
                    seconds = local_search.seconds_of_all(search, jnp.asarray(each.share), batches, exchange).mean()
                    every[rule, cut, each.name, name] = float(seconds)
                    dealt |= {} if each.name.endswith("tp") else {(rule, cut, each.name, name): float(seconds)}
    found = in_regions(plain, 2, 0)
    for problem, seconds in ((found.searched, dealt), (found.shipped, every)):
        rule, cut, _, name = min(seconds, key=seconds.__getitem__)
        assert (problem.served_by, problem.regions) == (rule, cut)
        assert name in {**problem.gathers, **problem.hybrids}


def test_exchanges_that_are_far_slower_are_left_out_after_the_first_rule(monkeypatch):
    plain = small_problem(exchanges=("random_host", "ring_both_ways"))
    seconds, rules = {"lowest_host": 1.0, "random_host": 1.2, "rings_1x2_both_ways": 2, "rings_2x1_both_ways": 2}, {}

    def part_seconds(run, share, exchange, part):
        rules.setdefault(exchange.name, set()).add(run.problem.served_by)
        return np.full((LAYERS, run._at_once), seconds[exchange.name])

    monkeypatch.setattr(Evaluator, "_part_seconds", part_seconds)
    assert in_regions(plain, 2, 0).searched.exchanges == ("ring_both_ways",)
    assert rules["random_host"] == {"home"}
    assert rules["lowest_host"] == {"home", "least_work"}


def test_what_is_returned_is_legal_and_no_slower_than_any_region():
    choices = in_regions(small_problem(), 2, SETTINGS.seed)
    problem, result = choices.tuned(lambda problem: tune(problem, SETTINGS), SETTINGS.seed)
    copies = problem.placed(result.share)
    placement = Placement.of_copies(copies, SHAPE, tuple(range(LAYERS)), exchange=result.exchange)
    assert placement.memory(1.0).sum() == pytest.approx(2 * EXPERTS * LAYERS)
    assert (result.cost <= result.shipped.seconds * (1 + 1e-6)).all()
    batches = problem.draw(8, 99)
    for row, name in enumerate(result.exchange):
        exchange = build_exchange(name, problem.model.machine.topology)
        seconds = evaluate(problem.model, jnp.asarray(result.share, jnp.float32), batches, exchange).mean
        assert lower_bound(problem, batches)[row] <= seconds[row] * (1 + 1e-6)


def reading_bound():
    """A problem in which reading weights takes longest: more copies are more to read."""
    plain = small_problem(exchanges=("random_host",), flops_factor=1e3, link_factor=1e3)
    memory = node_memory(jnp.full(NODES, 1e9), jnp.full(NODES, jnp.inf))
    machine = replace(plain.model.machine, memory=memory)
    return replace(plain, model=replace(plain.model, machine=machine))


class ShippedOnly:
    """A search that ends with the best shipped plan, and notes what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, problem, to_come):
        self.asked.append((problem.num_experts // EXPERTS, to_come))
        with StopSwitch() as stop:
            evaluator = Evaluator(problem, 0, stop)
            return evaluator.conclude(evaluator.shipped.plan, {}, {})


@pytest.mark.parametrize("known_bound", [True, False])
def test_fewer_copies_within_a_budget_are_returned_where_they_are_faster(monkeypatch, known_bound):
    if not known_bound:
        monkeypatch.setattr(regions, "_least_bound", lambda *_: 0.0)
    problem, search = reading_bound(), ShippedOnly()
    found = within_budget(problem, 4, search, 0)
    assert found.problem is problem
    assert search.asked == [(1, 3)] if known_bound else [(1, 3), (2, 2), (4, 1)]
    one, *more = found.front
    assert [each.copies for each in found.front] == [1, 2, 4]
    assert found.result.cost.mean() == one.seconds
    for each in more:
        assert each.bound > one.seconds if known_bound else each.seconds > one.seconds
        plans = in_regions(problem, each.copies, 0).shipped
        assert ShippedOnly()(plans, 1).cost.mean() >= each.bound


def test_as_many_copies_as_the_budget_has_are_returned_where_they_are_fastest():
    search = ShippedOnly()
    found = within_budget(small_problem(link_factor=1e-3), 4, search, 0)  # links decide, and every node has all experts
    assert [each.copies for each in found.front] == [1, 2, 4]
    assert found.problem.num_experts == 4 * EXPERTS
    assert found.result.cost.mean() == min(each.seconds for each in found.front)
    assert found.problem.exchanges == small_problem().exchanges


def test_ctrl_c_ends_the_searches_with_more_copies():
    search = ShippedOnly()
    found = within_budget(
        small_problem(link_factor=1e-3), 4, lambda *given: replace(search(*given), stopped="interrupted"), 0
    )
    assert search.asked == [(1, 3)]
    assert found.result.stopped == "interrupted"


def test_copies_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match=r"3 regions do not divide a machine of 4 nodes; use one of 1, 2, 4"):
        in_regions(small_problem(), 3, 0)
    with pytest.raises(PlanError, match=r"3 regions do not divide a machine of 4 nodes; use one of 1, 2, 4"):
        within_budget(small_problem(), 3, ShippedOnly(), 0)
    with pytest.raises(PlanError, match=r"the experts of a layer need 12 .* have fewer copies"):
        within_budget(small_problem(room=2.0), 2, ShippedOnly(), 0)
    replicated = replace(small_problem(), model=replace(small_problem().model, mode="replicated"))
    with pytest.raises(PlanError, match=r"regions are .* of a replicated plan"):
        replace(replicated, regions=(1, 2))
