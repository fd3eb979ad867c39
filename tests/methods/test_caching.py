"""Copies by heat map: by hand, and what must hold after any steps."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import full

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.engine import FetchCosts, FetchLayer, LayerTime, rollout, traffic_figures
from jaxmoe.methods import (
    AllocationCosts,
    CrossToken,
    Dealt,
    GreedyAllocation,
    Guidance,
    LLCPrefetch,
    WaferPolicy,
    copies_that_fit,
    guide,
)
from jaxmoe.placement.placement import PlanError
from jaxmoe.traces import Batch

BYTES = 3 * 4096 * 1536.0
COSTS = FetchCosts(BYTES, 2 * BYTES)
MACHINE = build_machine(load_hardware("configs/hardware/dojo_5x5.yaml"))
LAYER = FetchLayer(MACHINE, COSTS)
NO_TIMES = LayerTime({}, {}, 0.0)  # of the step before, at which the policy does not look
LAYERS, EXPERTS, STEPS, REQUESTS = 2, 16, 6, 120


def experts_of(seed):
    rng = np.random.default_rng(seed)
    weight = np.exp(rng.standard_normal((LAYERS, EXPERTS)))
    race = rng.exponential(size=(LAYERS, STEPS, REQUESTS, EXPERTS)) / weight[:, None, None]
    return np.argsort(race, axis=-1)[..., :4].astype(np.int32)


def policy(capacity=3.0, allocation="allo", block=50, **settings_):
    home = jnp.asarray(np.stack([np.random.default_rng(row).permutation(EXPERTS) for row in range(LAYERS)]))
    room = full(25, capacity)
    hops, costs = jnp.asarray(MACHINE.topology.hop_counts()), AllocationCosts.of(MACHINE, COSTS)
    chosen = Dealt(block) if allocation == "base" else GreedyAllocation(hops, costs, block, cost="serial", begin="idle")
    return WaferPolicy(home, room, chosen, **settings_)


def run(chosen, guidance):
    """The last copies, times [step, layer], who fetched what, and figures of traffic."""
    copies, time, asked = rollout(chosen, LAYER, guidance)
    return jax.tree.map(np.asarray, (copies, time, asked, traffic_figures(LAYER, asked)))


def guided(seed, top=4):
    return guide(CrossToken(full((LAYERS, EXPERTS, EXPERTS), 0.0), top), jnp.asarray(experts_of(seed)))


def test_the_map_counts_pairs_of_neighbouring_tokens_of_a_request():
    chosen = experts_of(1)
    pairs = np.zeros((LAYERS, EXPERTS, EXPERTS))
    for layer, request in np.ndindex(LAYERS, REQUESTS):
        for before in chosen[layer, 0, request]:
            pairs[layer, before, chosen[layer, 1, request]] += 1
    known = guided(1)
    np.testing.assert_array_equal(known.popularity[:, 1], pairs.sum(axis=1))
    assert (
        np.take_along_axis(pairs, np.asarray(known.following[:, 1]), axis=-1).min(axis=-1) >= np.sort(pairs)[..., -4]
    ).all()
    counts = [np.bincount(chosen[0, step].ravel(), minlength=EXPERTS) for step in (0, 1)]
    np.testing.assert_array_equal(known.counts[0, 0], counts[0])
    np.testing.assert_array_equal(known.next_counts[0, 0], counts[1])
    assert known.counts.shape == (LAYERS, STEPS, EXPERTS)


def test_the_example_of_fig_10():
    """A die computes experts 1 and 4; the rows predict 2, 4 and 6; it reads 1 and 4 from afar: it copies 4 alone."""
    following = np.zeros((1, 1, 8, 2), int) + 7
    following[0, 0, 1], following[0, 0, 4] = [2, 4], [4, 6]
    counts = jnp.zeros((1, 1, 8), int).at[0, 0, 1].set(10).at[0, 0, 4].set(10)
    known = Guidance(counts, counts, jnp.asarray(following), full((1, 1, 8), 1.0))
    # Dealing on one row of two dies: expert 1 to die 0, expert 4 to die 1; blocks of 5 give both to both.
    chosen = WaferPolicy(jnp.full((1, 8), 2), full(3, 9.0), Dealt(3))
    now = jax.tree.map(lambda leaf: np.asarray(leaf)[:, 0], known)
    copies, asked = eqx.filter_jit(chosen.step)(MACHINE, chosen.init(MACHINE), now, NO_TIMES)
    assert (np.asarray(asked.requests[0]) > 0).sum() == 6
    np.testing.assert_array_equal(np.argwhere(asked.copied[0]), [[4, 0], [4, 1]])
    np.testing.assert_array_equal(np.argwhere(copies.held[0]), [[4, 0], [4, 1]])


@pytest.mark.parametrize(
    ("allocation", "prediction", "eviction"),
    [
        ("base", "heatmap", "least_popular"),
        ("allo", "heatmap", "least_recent"),
        ("base", "perfect", "keep"),
    ],
)
def test_copies_never_exceed_capacity_and_serve_what_is_read(allocation, prediction, eviction):
    """Line 7, after each step; and nothing is copied that was not read from afar just then."""
    chosen = policy(2.0, allocation=allocation, prediction=prediction, eviction=eviction, block=20)
    known = guided(11)
    copies, _, asked, figures = run(chosen, known)
    assert copies.most.max() <= 2
    assert (copies.held.sum(axis=(0, 1)) <= copies.most).all()
    np.testing.assert_array_equal(asked.requests.sum(axis=-1), np.swapaxes(known.counts, 0, 1))
    assert (asked.copied <= (asked.requests > 0) * (1 - asked.local)).all()
    assert figures["local_write"].sum() == pytest.approx(asked.copied.sum() * BYTES)


def test_without_limit_perfect_foresight_reads_nothing_twice_in_steady_state():
    """The same tokens in every step: after the first, what dealing computes is at hand."""
    chosen = np.repeat(experts_of(3)[:, :1], STEPS, axis=1)
    known = guide(CrossToken(full((LAYERS, EXPERTS, EXPERTS), 0.0), 4), jnp.asarray(chosen))
    endless = policy(np.inf, allocation="base", prediction="perfect", block=20)
    *_, figures = run(endless, known)
    assert figures["hops"][0].min() > 0
    assert figures["hops"][1:].max() == 0 == figures["remote_read"][1:].max()


def test_a_full_die_keeps_the_most_popular():
    every = CrossToken(full((LAYERS, EXPERTS, EXPERTS), 1.0), EXPERTS)  # predicts every expert
    known = guide(every, jnp.asarray(experts_of(7)))
    chosen = policy(3.0, allocation="base", block=20)
    copies, decide = chosen.init(MACHINE), eqx.filter_jit(chosen.step)
    known = jax.tree.map(np.asarray, known)
    for step in range(STEPS):
        now = jax.tree.map(lambda leaf, at=step: leaf[:, at], known)
        before = np.asarray(copies.held)
        copies, asked = decide(MACHINE, copies, now, NO_TIMES)
        offered = before | ((np.asarray(asked.requests) > 0) & ~(np.asarray(asked.local) > 0))
        worth = np.broadcast_to(np.asarray(now.popularity)[..., None], offered.shape)
        for die in range(25):
            kept = np.sort(worth[..., die][np.asarray(copies.held)[..., die]])
            best = np.sort(worth[..., die][offered[..., die]])[-3:]
            np.testing.assert_array_equal(kept, best)


def test_home_experts_that_do_not_fit_are_refused():
    home = np.zeros((2, 4), int)
    with pytest.raises(PlanError, match=r"die 0 is home to 8 experts of 30.0 MB, but has 0.1 GB; spread"):
        copies_that_fit(np.full(3, 1e8), home, 30e6, 2)
    np.testing.assert_array_equal(copies_that_fit(np.full(2, 1e9), home, 30e6, 4), [8, 16])


def test_what_never_followed_is_not_predicted():
    """A map of nothing predicts nothing: a die that knows no pairs copies nothing in the first step."""
    known = guided(5, EXPERTS)
    assert (np.asarray(known.following[:, 0]) == -1).all()
    chosen = policy(np.inf, allocation="base", block=20)
    *_, figures = run(chosen, known)
    assert figures["local_write"][0].sum() == 0 < figures["local_write"][1].sum()


def test_the_llc_is_filled_in_idle_time_and_saves_reads():
    """Whole slices of home experts, no more than the LLC holds; no layer slower; each byte from HBM or the LLC."""
    across = full((LAYERS - 1, EXPERTS, EXPERTS), 1.0)
    heatmap = CrossToken(full((LAYERS, EXPERTS, EXPERTS), 0.0), 4)
    known = guide(heatmap, jnp.asarray(experts_of(2)), across)
    np.testing.assert_allclose(known.forecast.sum(axis=-1)[0], known.counts.sum(axis=-1)[0], rtol=1e-5)
    plain = run(policy(prediction="none", block=20), replace(known, forecast=None))
    told = run(policy(prediction="none", block=20, llc=LLCPrefetch(LAYER)), known)
    hits = told[2].hits
    assert set(np.unique(hits)) <= {0.0, 0.5, 1.0}
    assert hits[:, 0].max() == 0 < hits[:, 1].max()
    assert (hits.sum(axis=2) * BYTES <= 64e6).all()
    assert told[3]["llc_read"].sum() > 0
    reads = {
        name: sum(done[3][each].sum() for each in ("local_read", "remote_read", "llc_read"))
        for name, done in (("plain", plain), ("told", told))
    }
    assert reads["told"] == pytest.approx(reads["plain"], rel=0.2)


def test_a_policy_without_a_heat_map_takes_no_batches():
    draw = full((LAYERS, STEPS, REQUESTS, 4), 0.5)
    batch = Batch(jnp.asarray(experts_of(0)), draw[..., 0], draw, full((STEPS, REQUESTS), 1.0))
    with pytest.raises(ValueError, match="has no heat map"):
        policy().prepare(LAYER, batch)
