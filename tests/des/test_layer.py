"""Replay of a layer: a 2x2 mesh worked by hand, and a token-by-token count of what its links carry."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.arrays import floats, full
from oracles.paths import xy_path

from jaxmoe.des import LayerDescription, Memory, fabric_of, layer_seconds, replay_layer, replay_plan
from jaxmoe.hardware import Mesh
from jaxmoe.hardware.networks import num_links
from jaxmoe.placement.exchange import Gather, Rings, exchange_of
from jaxmoe.traces import Batch

# Nodes 0 = (0,0), 1 = (0,1), 2 = (1,0), 3 = (1,1). Links by their number:
# 0: 0>2   1: 1>3   2: 2>0   3: 3>1   4: 0>1   5: 2>3   6: 1>0   7: 3>2
# A chunk of 4 B takes 2 s on a link and 0.25 s to the next node; a message is two chunks.
LAYER = LayerDescription(
    fabric=fabric_of(Mesh(full(8, 2.0), full(8, 0.25), shape=(2, 2)), chunk_bytes=4.0),
    flops=np.array([4.0, 4.0, 4.0, 2.0]),
    dispatch_bytes=8.0,
    combine_bytes=8.0,
    expert_bytes=100.0,
    flops_per_token_expert=6.0,
    mode="sharded",
)
SHARE = np.array([[0.5, 0, 0, 0.5], [0, 1, 0, 0], [0, 0, 0.25, 0.75]])


def make_batch(experts, gather_slot, draw) -> Batch:
    return Batch(
        experts=jnp.asarray(experts, jnp.int32),
        token_draw=jnp.asarray((np.array(gather_slot) + 0.5) / np.shape(experts)[1], jnp.float32),
        draw=jnp.asarray(draw, jnp.float32),
        weight=full(len(experts), 1.0),
    )


BATCH = make_batch([[0, 1], [2, 0], [1, -1]], [0, 0, 0], [[0.5, 0.9], [0.125, 0.25], [0.0, 0.0]])


def own_memory(bandwidth) -> tuple[Memory, ...]:
    """A channel for every node."""
    return (Memory(np.asarray(bandwidth, float), np.zeros(len(bandwidth)), np.arange(len(bandwidth))),)


def on_links(**seconds: float) -> list[float]:
    """Busy seconds of the eight links from those that are busy, as link6=8."""
    busy = [0.0] * 8
    for name, value in seconds.items():
        busy[int(name.removeprefix("link"))] = value
    return busy


def test_a_sharded_layer_by_hand():
    # Token 0 visits 0, 1, 3 and gathers at 0, the lowest host of expert 0; token 1 visits 0, 2, 3 and gathers
    # at 2; token 2 visits 1 alone.
    result = replay_layer(LAYER, SHARE, BATCH)
    # Combine: 1>0 over link 6, 3>0 over 3 and 6, 0>2 over 0, 3>2 over 7.
    # Link 6 serves 1>0 in 0..4. The chunks of 3>0 reach it at 2.25 and 4.25 and are served in 4..6 and 6..8.
    assert result.stages["combine"] == 8.25
    assert result.link_busy["combine"].tolist() == on_links(link6=8, link3=4, link0=4, link7=4)
    # Dispatch: 0>1 over link 4, 0>3 over 4 and 1, 2>0 over 2, 2>3 over 5. The first two both start on link 4:
    # 0..4, then 4..8. The chunks of 0>3 reach link 1 at 6.25 and 8.25: 6.25..8.25, 8.25..10.25, there at 10.5.
    assert result.stages["dispatch"] == 10.5
    assert result.link_busy["dispatch"].tolist() == on_links(link4=8, link1=4, link2=4, link5=4)
    # Work: node 0 halves of two tokens; node 1 two tokens; node 2 a quarter; node 3 0.5 + 0.5 + 0.75.
    # Seconds: work * 6 / [4, 4, 4, 2].
    assert result.node_busy.tolist() == [1.5, 3.0, 0.375, 5.25]
    assert result.stages["compute"] == 5.25
    assert result.total_s == 10.5 + 5.25 + 8.25
    # Free running: node 3 has its last input at 10.5 and computes until 15.75; then 3>0 finds its links idle:
    # 8/2 + 4/2 + 2 * 0.25 = 6.5 s. All else is over earlier.
    assert result.free_running_s == 15.75 + 6.5


def test_a_replicated_layer_by_hand():
    # Slices of expert 0: [0, 0.5) node 0, [0.5, 1) node 3; of expert 2: [0, 0.25) node 2, [0.25, 1) node 3.
    # Token 0: draw 0.5 takes expert 0 to node 3, expert 1 is on node 1; gathers at 3, which serves its slot.
    # Token 1: expert 2 on node 2, expert 0 on node 0; gathers at 2. Token 2 visits 1 alone.
    result = replay_layer(replace(LAYER, mode="replicated"), SHARE, BATCH)
    assert result.link_busy["combine"].tolist() == on_links(link1=4, link0=4)
    assert result.link_busy["dispatch"].tolist() == on_links(link3=4, link2=4)
    assert result.stages["dispatch"] == result.stages["combine"] == 4.25
    # One token-expert each on 0, 2, 3 and two on 1, at 6 / [4, 4, 4, 2] s each.
    assert result.node_busy.tolist() == [1.5, 3.0, 1.5, 3.0]
    assert result.total_s == 4.25 + 3.0 + 4.25
    # Node 0 has its input at 4.25, computes 1.5 and sends 4.25. So does node 1, but computes 3.
    assert result.free_running_s == 4.25 + 3.0 + 4.25


def test_a_replica_may_be_cut_from_shares_that_do_not_sum_to_one():
    # As float32 they seldom do. Scaled to 1, the slices of expert 0 meet at 0.5 all the same.
    result = replay_layer(replace(LAYER, mode="replicated"), SHARE * 0.5, BATCH)
    assert result.link_busy["combine"].tolist() == on_links(link1=4, link0=4)


def test_gathering_where_the_hops_are_fewest():
    # Token 0 visits 0, 1, 3 with 3, 2, 3 hops in all: node 1. Token 1 visits 0, 2, 3: node 2.
    result = replay_layer(replace(LAYER, exchange=Gather("fewest_hops")), SHARE, BATCH)
    assert result.link_busy["combine"].tolist() == on_links(link4=4, link3=4, link0=4, link7=4)
    assert result.stages["combine"] == result.stages["dispatch"] == 4.25


def test_of_equally_near_nodes_the_lowest_gathers():
    # Replicated: token 0 visits 1 and 3, token 1 visits 0 and 2. Gather at 1 and 0: 3>1 and 2>0.
    result = replay_layer(replace(LAYER, mode="replicated", exchange=Gather("fewest_hops")), SHARE, BATCH)
    assert result.link_busy["combine"].tolist() == on_links(link3=4, link2=4)


def test_memory_can_be_the_slower():
    fast, slow = np.full(4, 1e9), np.full(4, 10.0)
    assert replay_layer(replace(LAYER, memory=own_memory(fast)), SHARE, BATCH).stages["compute"] == 5.25
    # Weights 100 * [0.5, 1, 0.25, 1.25], and 8 B in and out for each of [2, 2, 1, 2] visits, at 10 B/s.
    sharded = replay_layer(replace(LAYER, memory=own_memory(slow)), SHARE, BATCH)
    np.testing.assert_allclose(sharded.node_busy, [8.2, 13.2, 4.1, 15.7])
    # Replicated: a host reads the whole of every expert that it serves, here one each, for visits [1, 2, 1, 1].
    replicated = replay_layer(replace(LAYER, mode="replicated", memory=own_memory(slow)), SHARE, BATCH)
    np.testing.assert_allclose(replicated.node_busy, [11.6, 13.2, 11.6, 11.6])
    # An expert that no token uses is not read.
    unused = replay_layer(replace(LAYER, memory=own_memory(slow)), SHARE, make_batch([[1]], [0], [[0.0]]))
    np.testing.assert_allclose(unused.node_busy, [0, 11.6, 0, 0])


def test_rings_by_hand():
    # One ring of 4: all 3 tokens visit it, so 3 * 8 / 4 = 6 B a step, 3 steps of 6/2 + 0.25 s.
    one = replay_layer(replace(LAYER, exchange=Rings()), SHARE, BATCH)
    assert one.stages["dispatch"] == one.stages["combine"] == 3 * 3.25
    assert one.total_s == 2 * 9.75 + 5.25
    # The ring 1>3>2>0>1 uses links 1, 7, 2, 4 three times for 3 s, and its mirror their opposites 3, 5, 0, 6.
    assert one.link_busy["combine"].tolist() == on_links(link1=9, link7=9, link2=9, link4=9)
    assert one.link_busy["dispatch"].tolist() == on_links(link3=9, link5=9, link0=9, link6=9)
    # Two rings {0, 2} and {1, 3}: 2 and 3 tokens visit them, 8 and 12 B in one step each.
    two = replay_layer(replace(LAYER, exchange=Rings((1, 2), between=False)), SHARE, BATCH)
    assert two.stages["combine"] == 12 / 2 + 0.25
    assert two.link_busy["combine"].tolist() == on_links(link0=4, link2=4, link1=6, link3=6)
    # Both ways round, 3 B each: the ring and its mirror use different links, so a step takes 3/2 + 0.25 s.
    both = replay_layer(replace(LAYER, exchange=Rings(both_ways=True)), SHARE, BATCH)
    assert both.stages["dispatch"] == both.stages["combine"] == 3 * 1.75
    assert both.link_busy["combine"].tolist() == [4.5] * 8
    # Rings of one node send nothing, and a ring that no token visits sends nothing.
    assert replay_layer(replace(LAYER, exchange=Rings((2, 2), between=False)), SHARE, BATCH).total_s == 5.25
    idle = replay_layer(replace(LAYER, exchange=Rings((1, 2), between=False)), SHARE, make_batch([[1]], [0], [[0.0]]))
    assert idle.link_busy["combine"].tolist() == on_links(link1=2, link3=2)


def test_a_token_without_experts_costs_nothing():
    padded = make_batch([[-1, -1], [1, -1]], [0, 0], np.zeros((2, 2)))
    result = replay_layer(LAYER, SHARE, padded)
    assert result.total_s == result.stages["compute"] == 1.5


# Expert 0 is whole everywhere: token 0 is served where it is for expert 1, token 1 at one of the hosts of expert 2.
SERVED = np.array([[1, -1], [-1, 2], [-1, -1]])


def test_what_a_policy_decided_by_hand():
    # Token 0 visits 1 alone. Token 1 visits 2 and 3 and gathers at 2, the lowest host of its expert 2.
    result = replay_layer(LAYER, SHARE, BATCH, SERVED)
    assert result.link_busy["combine"].tolist() == on_links(link7=4)
    assert result.link_busy["dispatch"].tolist() == on_links(link5=4)
    # Work: node 1 all of expert 1 twice and of 0 once; node 2 a quarter and a whole; node 3 three quarters.
    assert result.node_busy.tolist() == [0, 4.5, 1.875, 2.25]
    assert result.total_s == 4.25 + 4.5 + 4.25
    # Weights 100 * [0, 1 + 1, 0.25 + 1, 0.75], and 8 B in and out for each of [0, 2, 1, 1] visits, at 10 B/s.
    slow = replay_layer(replace(LAYER, memory=own_memory(np.full(4, 10.0))), SHARE, BATCH, SERVED)
    np.testing.assert_allclose(slow.node_busy, [0, 23.2, 14.1, 9.1])
    # A copy that serves two tokens is read once; one that serves at two nodes, at both.
    again = make_batch([[0, 1], [0, 1], [0, -1]], [0, 0, 0], np.zeros((3, 2)))
    twice = replay_layer(
        replace(LAYER, memory=own_memory(np.full(4, 10.0))), SHARE, again, np.array([[1, -1], [1, -1], [3, -1]])
    )
    np.testing.assert_allclose(twice.node_busy, [0, (200 + 32) / 10, 0, (100 + 16) / 10])


def test_a_token_gathers_where_its_gather_slot_is_served():
    batch = replace(BATCH, token_draw=floats([0.25, 0.75, 0.25]))
    result = replay_layer(LAYER, SHARE, batch, np.array([[1, -1], [-1, 3], [-1, -1]]))
    assert result.link_busy["combine"].tolist() == on_links(link5=4)
    assert result.link_busy["dispatch"].tolist() == on_links(link7=4)
    assert result.node_busy.tolist() == [0, 4.5, 0.375, 5.25]


@pytest.mark.parametrize("served", [None, SERVED])
def test_the_seconds_alone_are_those_of_the_whole_replay(served):
    """Those are by a simulation with barriers, these by one of each stage."""
    whole = replay_layer(LAYER, SHARE, BATCH, served).total_s
    assert layer_seconds(LAYER, SHARE, BATCH, served) == pytest.approx(whole, rel=1e-12)


def test_deciding_nothing_changes_nothing():
    nothing, static = replay_layer(LAYER, SHARE, BATCH, np.full((3, 2), -1)), replay_layer(LAYER, SHARE, BATCH)
    assert nothing.total_s == static.total_s
    assert nothing.node_busy.tolist() == static.node_busy.tolist()


@pytest.mark.parametrize(
    ("served", "mode", "message"),
    [
        ([[1], [-1], [-1]], "sharded", "shape"),
        ([[4, -1], [-1, -1], [-1, -1]], "sharded", r"-1\.\.4"),
        ([[-2, -1], [-1, -1], [-1, -1]], "sharded", r"-2\.\.-1"),
        ([[-1, -1], [-1, -1], [-1, 0]], "sharded", "no expert"),
        ([[1, -1], [-1, -1], [-1, -1]], "replicated", "replicated"),
    ],
)
def test_a_decision_that_cannot_be_simulated_is_refused(served, mode, message):
    with pytest.raises(ValueError, match=message):
        replay_layer(replace(LAYER, mode=mode), SHARE, BATCH, np.array(served))


SHAPE = (3, 4)


def random_case(seed: int, tokens: int = 30, top_k: int = 3):
    """A layer on unequal links, sparse shares of 8 experts, and a batch."""
    rng = np.random.default_rng(seed)
    nodes, links = SHAPE[0] * SHAPE[1], num_links(SHAPE)
    share = rng.random((8, nodes)) * (rng.random((8, nodes)) < 0.2)
    share[np.arange(8), rng.integers(nodes, size=8)] += 0.5
    mesh = Mesh(
        jnp.asarray(rng.uniform(1, 2, links), jnp.float32),
        jnp.asarray(rng.uniform(0, 0.1, links), jnp.float32),
        shape=SHAPE,
    )
    layer = replace(
        LAYER,
        fabric=fabric_of(mesh, chunk_bytes=4.0),
        flops=rng.uniform(1, 2, nodes),
    )
    experts = np.stack([rng.choice(8, top_k, replace=False) for _ in range(tokens)])
    batch = make_batch(experts, rng.integers(top_k, size=tokens), rng.random((tokens, top_k)))
    return layer, share / share.sum(axis=1, keepdims=True), batch


def count_messages(layer: LayerDescription, share: np.ndarray, batch: Batch) -> list[tuple[int, int]]:
    """Source and destination of every combine message, token by token in the plainest way."""
    messages = []
    leaves = (np.asarray(leaf) for leaf in (batch.experts, batch.gather_slot, batch.draw))
    for experts, slot, draws in zip(*leaves, strict=True):
        hosts = []
        for expert, draw in zip(experts, draws, strict=True):
            holders = np.flatnonzero(share[expert]).tolist()
            if layer.mode == "replicated":
                reached = [node for node in holders if share[expert, : node + 1].sum() > draw]
                holders = reached[:1]
            hosts.append(holders)
        visited = sorted({node for holders in hosts for node in holders})
        gather = min(hosts[slot])
        if layer.exchange == Gather("fewest_hops"):
            gather = min(visited, key=lambda node: sum(len(xy_path(SHAPE, other, node)) for other in visited))
        messages += [(node, gather) for node in visited if node != gather]
    return messages


@pytest.mark.parametrize("gather", ["lowest_host", "fewest_hops"])
@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_crosses_the_links_it_should(seed, mode, gather):
    layer, share, batch = random_case(seed)
    layer = replace(layer, mode=mode, exchange=Gather(gather))
    result = replay_layer(layer, share, batch)
    combine, dispatch = np.zeros(num_links(SHAPE)), np.zeros(num_links(SHAPE))
    ends = {tuple(xy_path(SHAPE, a, b)): (a, b) for a in range(12) for b in range(12) if a != b}
    opposite = {link[0]: xy_path(SHAPE, b, a)[0] for link, (a, b) in ends.items() if len(link) == 1}
    for source, destination in count_messages(layer, share, batch):
        for link in xy_path(SHAPE, source, destination):
            combine[link] += layer.combine_bytes
            dispatch[opposite[link]] += layer.combine_bytes
    np.testing.assert_allclose(result.link_busy["combine"] * layer.fabric.rate, combine, rtol=1e-12)
    np.testing.assert_allclose(result.link_busy["dispatch"] * layer.fabric.rate, dispatch, rtol=1e-12)


@pytest.mark.parametrize("exchange", ["lowest_host", "ring", "rings_1x2_alone", "rings_3x2", "fewest_hops_split_tree"])
@pytest.mark.parametrize("seed", range(3))
def test_stages_keep_their_order_and_their_bounds(seed, exchange):
    layer, share, batch = random_case(seed)
    result = replay_layer(replace(layer, exchange=exchange_of(exchange)), share, batch)
    # Between barriers a stage runs as it does alone.
    np.testing.assert_allclose(
        result.total_s, result.stages["dispatch"] + result.stages["compute"] + result.stages["combine"], rtol=1e-9
    )
    assert result.stages["dispatch"] >= result.link_busy["dispatch"].max()
    assert result.stages["combine"] >= result.link_busy["combine"].max()
    both_ways = result.link_busy["dispatch"] + result.link_busy["combine"]
    assert result.free_running_s >= max(both_ways.max(), result.stages["compute"]) * (1 - 1e-12)


def test_a_plan_is_replayed_layer_by_layer_and_batch_by_batch():
    cases = [[random_case(seed)[2] for seed in (layer, layer + 10, layer + 20)] for layer in (0, 1)]
    layer, share, _ = random_case(5)
    shares = np.stack([share, share[::-1]])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(2, 3, *leaves[0].shape), *cases[0], *cases[1])
    seen: list[tuple[int, int]] = []
    replays = replay_plan(layer, shares, stacked, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]
    for row, batches in enumerate(cases):
        for column, batch in enumerate(batches):
            assert replays[row][column].total_s == replay_layer(layer, shares[row], batch).total_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": floats([1.0, 2.0, 1.0])}, "weight"),
        ({"experts": jnp.array([[0, 3], [0, 1], [0, 1]])}, "expert ids"),
        ({"experts": jnp.array([[0, -2], [0, 1], [0, 1]])}, "expert ids"),
    ],
)
def test_a_batch_that_cannot_be_simulated_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replay_layer(LAYER, SHARE, replace(BATCH, **change))


def test_shares_must_fit_the_mesh_and_the_batches():
    with pytest.raises(ValueError, match="5 nodes"):
        replay_layer(LAYER, np.full((3, 5), 0.2), BATCH)
    stacked = jax.tree.map(lambda leaf: leaf[None, None], BATCH)
    with pytest.raises(ValueError, match="2 layers"):
        replay_plan(LAYER, np.stack([SHARE, SHARE]), stacked)
    with pytest.raises(ValueError, match="flops"):
        replace(LAYER, flops=np.ones(3))
