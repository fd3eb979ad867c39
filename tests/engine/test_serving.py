"""Copies in the model: layers worked by hand, choices against a plain loop, one copy as none, and derivatives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats
from oracles.topologies import NETWORKS, mesh

from jaxmoe.engine import Decisions, evaluate, serving_of
from jaxmoe.hardware import Die, Machine
from jaxmoe.placement.copies import ByDraw, ByHome, Copies, LeastWork
from jaxmoe.relax import SmoothMax, SoftSupport
from jaxmoe.traces import Batch

EXPERTS, TOKENS, TOP_K = 4, 12, 2


def batch_of(experts, source=None, draw=None) -> Batch:
    experts = np.asarray(experts)
    return Batch(
        experts=jnp.asarray(experts, jnp.int32),
        token_draw=jnp.full(len(experts), 0.1, jnp.float32),
        draw=jnp.full(experts.shape, 0.1, jnp.float32) if draw is None else floats(draw),
        weight=jnp.ones(len(experts), jnp.float32),
        source=None if source is None else jnp.asarray(source, jnp.int32),
    )


def stacked(batch: Batch) -> Batch:
    """As one layer with one batch."""
    return jax.tree.map(lambda leaf: leaf[None, None], batch)


def machine_on(topology) -> Machine:
    return Machine(topology, Die(jnp.full(topology.num_nodes, 1e12, jnp.float32)))


def served(copies: Copies, batch: Batch) -> np.ndarray:
    """The copies that serve a batch of the first layer."""
    rule = jax.tree.map(lambda leaf: leaf[0], serving_of(copies))
    return np.asarray(eqx.filter_jit(rule)(jnp.asarray(copies.share[0]), batch).experts)


def random_copies(rng, experts, each, nodes, rule="least_work", hosts=3) -> Copies:
    """So many copies of every expert, on one to three nodes."""
    count = experts * each
    copy_of = rng.permutation(np.repeat(np.arange(experts), each))[None]
    share = cases.random_share(rng, count, nodes, min(hosts, nodes)).astype(np.float32)[None]
    if rule == "least_work":
        return Copies(copy_of, share, LeastWork(np.array([1.0]), np.array([0.3])))
    if rule == "by_draw":
        parts = rng.uniform(0.5, 1.5, count)
        return Copies(copy_of, share, ByDraw((parts / np.bincount(copy_of[0], parts)[copy_of[0]])[None]))
    able = [np.flatnonzero(copy_of[0] == expert) for expert in range(experts)]
    return Copies(copy_of, share, ByHome(np.array([[rng.choice(some, nodes) for some in able]])))


# Two nodes, and two experts whole on each of them: copies 0 and 1 are at node 0, copies 2 and 3 at node 1.
TWO = {"copy_of": np.array([[0, 1, 0, 1]]), "share": np.array([[[1, 0], [1, 0], [0, 1], [0, 1]]], np.float32)}
LINE = mesh((1, 2), bandwidth=1e9, latency=1e-7)


def test_tokens_served_where_they_live_by_hand():
    copies = Copies(**TWO, serving=ByHome(np.array([[[0, 2], [1, 3]]])))
    batch = batch_of([[0, 1], [0, 1], [0, 1], [1, -1]])  # two tokens live at each node
    assert served(copies, batch).tolist() == [[0, 1], [0, 1], [2, 3], [3, -1]]
    model = cases.model_on(machine_on(LINE), rule="token_home")
    time = evaluate(model, jnp.asarray(copies.share), stacked(batch), serving=serving_of(copies))
    assert float(time.communication[0, 0]) == 0
    flops = cases.COSTS.flops_per_token_expert
    np.testing.assert_allclose(time.busy["compute"]["node"][0], [4 * flops / 1e12, 3 * flops / 1e12], rtol=1e-6)
    # One copy of each, expert 0 at node 0 and expert 1 at node 1: three and four choices, and vectors on the link.
    alone = evaluate(model, jnp.eye(2)[None], stacked(batch))
    assert float(alone.communication[0, 0]) > 0
    np.testing.assert_allclose(alone.busy["compute"]["node"][0], [3 * flops / 1e12, 4 * flops / 1e12], rtol=1e-6)


def test_draws_pick_copies_by_hand():
    copies = Copies(**TWO, serving=ByDraw(np.array([[0.25, 1.0, 0.75, 0.0]])))
    assert served(copies, batch_of([[0, 1], [0, 1]], draw=[[0.2, 0.9], [0.25, 0.0]])).tolist() == [[0, 1], [2, 1]]


@pytest.mark.parametrize(
    ("visits", "expected"),
    [
        # By work alone, nodes take turns, the lower number first.
        (0.0, [[0, 3], [0, 3], [0, -1], [2, -1]]),
        # Six choices, three a node. A new visit costs as much as a third of the even work, so that a token stays at a
        # node for its second choice.
        (0.4, [[0, 1], [2, 3], [0, -1], [2, -1]]),
    ],
)
def test_least_work_by_hand(visits, expected):
    copies = Copies(**TWO, serving=LeastWork(np.array([1.0]), np.array([visits])))
    assert served(copies, batch_of([[0, 1], [0, 1], [0, -1], [0, -1]])).tolist() == expected


def plain_least_work(copies: Copies, experts: np.ndarray, work: float, visits: float) -> list[list[int]]:
    """As the rule is worded, in exact steps; ties are taken for such where rounding alone parts them."""
    share, nodes = copies.share[0].astype(float), range(copies.share.shape[2])
    done, even, named = [0.0] * len(nodes), (experts >= 0).sum() / len(nodes), []
    for token in experts:
        seen, row = set(), []
        for expert in token:
            if expert < 0:
                row.append(-1)
                continue
            best, least = -1, np.inf
            for copy in range(len(share)):
                if copies.copy_of[0, copy] != expert:
                    continue
                hosts = {node for node in nodes if share[copy, node] > 0}
                cost = work * max(done[node] + share[copy, node] for node in hosts) / even + visits * len(hosts - seen)
                if cost < least * (1 - 1e-6):
                    best, least = copy, cost
            row.append(best)
            for node in nodes:
                done[node] += share[best, node]
            seen |= {node for node in nodes if share[best, node] > 0}
        named.append(row)
    return named


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numbers", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.2), (0.0, 0.0)])
def test_least_work_is_that_of_a_plain_loop(seed, numbers):
    rng = np.random.default_rng(seed)
    copies = random_copies(rng, EXPERTS, 3, 6)
    copies = Copies(copies.copy_of, copies.share, LeastWork(*(np.array([number]) for number in numbers)))
    experts = cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K, missing=True).experts
    assert served(copies, batch_of(experts)).tolist() == plain_least_work(copies, experts, *numbers)


def test_least_work_together_by_hand():
    # A token with both experts takes both at one node; with seven choices of which four are done at node 0, three are
    # left for node 1.
    copies = Copies(**TWO, serving=LeastWork(np.array([1.0]), np.array([0.0]), together=True))
    assert served(copies, batch_of([[0, 1], [0, 1], [0, -1], [1, 0]])).tolist() == [[0, 1], [2, 3], [0, -1], [3, 2]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("numbers", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.2)])
def test_least_work_together_is_that_of_a_plain_loop(seed, numbers):
    rng = np.random.default_rng(seed)
    copies = random_copies(rng, EXPERTS, 3, 6)
    rule = LeastWork(*(np.array([number]) for number in numbers), together=True)
    copies = Copies(copies.copy_of, copies.share, rule)
    experts = cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K, missing=True).experts
    share, nodes = copies.share[0].astype(float), range(6)
    places = [[copy for copy in range(len(share)) if copies.copy_of[0, copy] == expert] for expert in range(EXPERTS)]
    done, even, expected = [0.0] * 6, (experts >= 0).sum() / 6, []
    for token in experts:
        best, least = -1, np.inf
        for place in range(3):
            able = [places[expert][place] for expert in token if expert >= 0]
            after = [done[node] + sum(share[copy, node] for copy in able) for node in nodes]
            hosts = [node for node in nodes if any(share[copy, node] > 0 for copy in able)]
            cost = numbers[0] * max((after[node] for node in hosts), default=0) / even + numbers[1] * len(hosts)
            if cost < least * (1 - 1e-6):
                best, least, after_best = place, cost, after
        done = after_best
        expected.append([places[expert][best] if expert >= 0 else -1 for expert in token])
    assert served(copies, batch_of(experts)).tolist() == expected


@pytest.mark.parametrize("network", ["mesh", "torus", "clusters", "detours"])
@pytest.mark.parametrize("rule", ["by_home", "by_draw", "least_work", "together"])
def test_one_copy_of_each_expert_is_the_plan_without_copies(network, rule):
    rng, topology = np.random.default_rng(3), NETWORKS[network]
    share = cases.random_share(rng, EXPERTS, topology.num_nodes).astype(np.float32)[None]
    own = np.arange(EXPERTS)
    rules = {
        "by_home": ByHome(np.tile(own[:, None], topology.num_nodes)[None]),
        "by_draw": ByDraw(np.ones((1, EXPERTS))),
        "least_work": LeastWork(np.ones(1), np.ones(1)),
        "together": LeastWork(np.ones(1), np.ones(1), together=True),
    }
    copies = Copies(own[None], share, rules[rule])
    tokens = [cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K)) for _ in range(3)]
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves)[None], *tokens)
    model = cases.model_on(machine_on(topology), rule="fewest_hops_tree")
    plain = evaluate(model, jnp.asarray(share), batches)
    with_copies = evaluate(model, jnp.asarray(copies.share), batches, serving=serving_of(copies))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(with_copies), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rules_are_vmapped_over_plans():
    rng = np.random.default_rng(1)
    plans = [random_copies(rng, EXPERTS, 2, 6) for _ in range(3)]
    batch = cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))
    rules = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *map(serving_of, plans))
    shares = jnp.concatenate([jnp.asarray(plan.share) for plan in plans])
    found = jax.vmap(lambda rule, share: rule(share, batch).experts)(rules, shares)
    np.testing.assert_array_equal(found, [served(plan, batch) for plan in plans])


@pytest.mark.parametrize("rule", ["by_home", "by_draw", "least_work"])
@pytest.mark.parametrize("what", ["share", "link_bandwidth", "flops"])
def test_gradients_agree_with_central_differences(rule, what):
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        model = cases.layer_model(cases.random_machine(rng, (2, 3)), rule="corner_host_tree")
        copies = random_copies(rng, EXPERTS, 2, 6, rule)
        serving = jax.tree.map(lambda leaf: leaf[0], serving_of(copies))
        batch = cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))
        share = floats(copies.share[0].astype(float))
        where = {
            "share": lambda given: given[1],
            "link_bandwidth": lambda given: given[0].machine.topology.link_bandwidth,
            "flops": lambda given: given[0].machine.die.flops,
        }[what]

        def time(value):
            changed, plan = eqx.tree_at(where, (model, share), value)
            return changed.time(Decisions(plan, serving=serving), batch).total

        point = np.asarray(where((model, share)), float)
        found, timed = np.asarray(jax.jit(jax.grad(time))(floats(point))), jax.jit(time)
        assert np.isfinite(found).all()
        assert np.abs(found).max() > 0
        moved = [tuple(at) for at in np.argwhere(point > 0)]
        for at in moved[:: max(len(moved) // 6, 1)]:
            step = np.zeros_like(point)
            step[at] = 1e-6 * point[at]
            slope = float(timed(floats(point + step)) - timed(floats(point - step))) / (2 * step[at])
            np.testing.assert_allclose(found[at], slope, rtol=1e-5, atol=1e-8 * np.abs(found).max())


def test_what_does_not_go_with_copies_is_refused():
    rng = np.random.default_rng(2)
    copies, batch = random_copies(rng, EXPERTS, 2, 6), cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K))
    share, rule = jnp.asarray(copies.share), serving_of(copies)
    model = cases.layer_model(cases.random_machine(rng, (2, 3)))
    replicated = cases.layer_model(cases.random_machine(rng, (2, 3)), "replicated")
    with pytest.raises(ValueError, match="copies are sharded, and their rule says which serves"):
        evaluate(replicated, share, stacked(batch), serving=rule)
    merged = eqx.tree_at(lambda b: b.weight, jax.tree.map(lambda leaf: leaf[None], batch), jnp.ones((1, 3, TOKENS)))
    with pytest.raises(ValueError, match="give batches that are not merged"):
        evaluate(model, share, merged, serving=rule)
    soft = eqx.tree_at(
        lambda b: b.chosen, stacked(batch), jnp.ones((1, 1, TOKENS, EXPERTS)), is_leaf=lambda x: x is None
    )
    with pytest.raises(ValueError, match="a gate with a derivative chooses experts, not copies"):
        evaluate(model, share, soft, serving=rule)


@pytest.mark.parametrize("rule", ["by_home", "by_draw", "least_work"])
def test_a_rule_describes_the_copies_that_it_was_made_of(rule):
    copies = random_copies(np.random.default_rng(4), EXPERTS, 3, 6, rule)
    back = jax.tree.map(lambda leaf: leaf[0], serving_of(copies)).described(copies.share[0])
    np.testing.assert_array_equal(back.copy_of, copies.copy_of)
    np.testing.assert_array_equal(back.borders, copies.borders)
    for name, array in copies.serving.arrays().items():
        np.testing.assert_allclose(back.serving.arrays()[name], array, rtol=1e-6)


@pytest.mark.parametrize("rule", ["by_home", "by_draw", "least_work"])
def test_the_relaxed_time_tends_to_the_exact_one(rule):
    with jax.enable_x64(True):
        rng = np.random.default_rng(6)
        model = cases.layer_model(cases.random_machine(rng, (2, 3)), rule="corner_host_tree")
        copies = random_copies(rng, EXPERTS, 2, 6, rule)
        batch = stacked(cases.batch(cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K)))
        share, serving = floats(copies.share.astype(float)), serving_of(copies)

        def time(share, temperature):
            relaxed = (SmoothMax(temperature), SoftSupport(temperature))
            return evaluate(model, share, batch, None, None, *relaxed, serving=serving).total.sum()

        exact = float(evaluate(model, share, batch, serving=serving).total.sum())
        off = [abs(float(time(share, temperature)) / exact - 1) for temperature in (0.1, 0.01, 0.001)]
        assert off[0] > off[1] > off[2]
        assert off[2] < 1e-2
        assert np.isfinite(jax.grad(time)(share, 0.1)).all()


def test_relaxed_work_of_a_node_counts_as_far_as_it_hosts():
    # Copies of expert 0 are on nodes 0 and 1, but for crumbs on node 2, which alone has expert 1 and is busy with it.
    share = np.array([[[0.99, 0, 0.01], [0, 0.99, 0.01], [0, 0, 1]]], np.float32)
    serving = serving_of(Copies(np.array([[0, 0, 1]]), share, LeastWork(np.ones(1), np.zeros(1))))
    serving = jax.tree.map(lambda leaf: leaf[0], serving)
    batch = batch_of([[1]] * 20 + [[0]] * 10)
    exact = np.asarray(serving(jnp.asarray(share[0]), batch).experts)[20:, 0]
    relaxed = np.asarray(serving(jnp.asarray(share[0]), batch, SoftSupport(jnp.asarray(0.1))).experts)[20:, 0]
    assert (exact == 0).all()  # both copies wait for node 2: the first of equals
    assert np.bincount(relaxed).tolist() == [5, 5]  # crumbs count for a tenth
    hard = np.asarray(serving(jnp.asarray(share[0]), batch, SoftSupport(jnp.asarray(1e-6))).experts)[20:, 0]
    np.testing.assert_array_equal(hard, exact)
