"""Every exchange on every kind of network, against loops over tokens and over the links of their paths."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles import exchange as oracle
from oracles.arrays import floats, full
from oracles.layer import Tokens
from oracles.own_topologies import Dragonfly
from oracles.topologies import mesh, with_random_numbers

from jaxmoe.engine import LayerTime
from jaxmoe.hardware import AbstractTopology, Die, Machine, clusters, ring, switch, torus, wafers
from jaxmoe.network import Congestion, build_exchange
from jaxmoe.placement.exchange import ExchangeError

EXPERTS, TOKENS, TOP_K = 6, 9, 3

NETWORKS: dict[str, AbstractTopology] = {
    "mesh": mesh((2, 4)),
    "yx_mesh": mesh((4, 2), routing="yx"),
    "line": mesh((1, 6)),
    "odd_mesh": mesh((3, 3)),
    "wafers": wafers((2, 1), (1, 4), 1.0, 0.0, 1.0, 0.0),
    "torus": torus((2, 4), 1.0, 0.0),
    "clusters": clusters(2, 4, 1.0, 0.0, 1.0, 0.0),
    "switch": switch(6, 1.0, 0.0),
    "ring": ring(6, 1.0, 0.0),
    "dragonfly": Dragonfly.uniform(1.0, 0.0, groups=3, routers=2, terminals=1),
}
WITH_PORTS = ("yx_mesh", "clusters", "line", "dragonfly")


def random_tokens(rng: np.random.Generator, nodes: int) -> Tokens:
    """Tokens of weight 0, 1 and 2, some without choices, in nodes of their own."""
    tokens = cases.random_tokens(rng, TOKENS, EXPERTS, TOP_K, missing=True)
    tokens.weight = rng.permutation(np.resize([1.0, 2.0, 0.0, 1.0], TOKENS))
    tokens.source = rng.integers(nodes, size=TOKENS)
    return tokens


def measured(model, time_models: list[Congestion], share, batch) -> list[LayerTime]:
    return [eqx.tree_at(lambda m: m.time_model, model, each)(share, batch) for each in time_models]


# Many layers are compiled here, each to run once: without optimising, in either tier.
compiled = eqx.filter_jit(measured, compiler_options={"xla_backend_optimization_level": 0})


def check(
    network: str,
    name: str,
    mode: str,
    chunk_bytes: float = 512.0,
    cut_through: bool = False,
    pair_by_pair: tuple[bool, ...] = (False,),
    one_of_many: bool = False,
) -> None:
    """The layer against the loops, its delays flow by flow, pair by pair, or each in turn.

    Rings of a network share one program. Gathers share most of their operations, which `one_of_many` runs one by one:
    with many gathers to compile none of them whole takes half the time.
    """
    rng = np.random.default_rng(len(name) + 100 * len(network))
    topology = with_random_numbers(NETWORKS[network], rng, ports=network in WITH_PORTS)
    nodes = topology.num_nodes
    share, tokens = cases.random_share(rng, EXPERTS, nodes), random_tokens(rng, nodes)
    model = cases.model_on(Machine(topology, Die(full(nodes, 1e15))), mode, name)
    time_models = [Congestion(jnp.asarray(chunk_bytes), cut_through, each) for each in pair_by_pair]
    run = measured if one_of_many and not model.exchange.groups else compiled
    found = run(model, time_models, floats(share), cases.batch(tokens))
    phases = oracle.combine_phases(name, topology, share, tokens, mode)
    sizes = {"dispatch": cases.COSTS.dispatch_bytes, "combine": cases.COSTS.combine_bytes}
    for stage, vector_bytes in sizes.items():
        backwards = stage == "dispatch"
        ordered = phases[::-1] if backwards else phases
        expected = oracle.priced(ordered, topology, vector_bytes, chunk_bytes, cut_through, backwards)
        for seen, each in zip(found, pair_by_pair, strict=True):
            where = f"{stage} of {name} on {network}, {mode}, {'pair by pair' if each else 'flow by flow'}"
            np.testing.assert_allclose(seen.busy[stage]["link"], expected.link_time, 1e-5, 1e-11, err_msg=where)
            np.testing.assert_allclose(seen.busy[stage]["port"], expected.port_time, 1e-5, 1e-11, err_msg=where)
            assert float(seen.stages[stage]) == pytest.approx(expected.total, rel=1e-5), where


EVERY = [(network, name) for network, topology in NETWORKS.items() for name in oracle.names_of(topology)]
MODES = ("sharded", "replicated")
both_modes = pytest.mark.parametrize("mode", MODES)

# Of the gathers on a mesh all that differ, of rings one of each kind; elsewhere what networks treat in their own way.
FEW = [
    ("mesh", "lowest_host"),
    ("mesh", "random_host_tree"),
    ("mesh", "least_loaded_split_tree"),
    ("mesh", "token_home_cross_tree"),
    ("mesh", "least_congested"),
    ("mesh", "least_congested_visited_by_3"),
    ("mesh", "least_congested_token_home"),
    ("mesh", "priced"),
    ("mesh", "priced_token_home"),
    ("mesh", "reduce_scatter"),
    ("mesh", "rings_2x2"),
    ("mesh", "rings_1x2_both_ways_alone"),
    ("yx_mesh", "fewest_hops_tree"),
    ("yx_mesh", "least_loaded_cross_tree"),
    ("yx_mesh", "least_congested"),
    ("yx_mesh", "priced_visited"),
    ("yx_mesh", "rings_2"),
    ("yx_mesh", "ring_both_ways"),
    ("clusters", "random_host"),
    ("clusters", "fewest_hops_tree"),
    ("clusters", "least_congested"),
    ("clusters", "least_congested_unicast_by_3"),
    ("clusters", "priced"),
    ("clusters", "reduce_scatter"),
    ("clusters", "rings_2_both_ways"),
    ("clusters", "two_level_2"),
    ("mesh", "two_level_4"),
    ("dragonfly", "least_loaded"),
    ("dragonfly", "random_host_tree"),
    ("dragonfly", "least_congested_visited_unicast"),
    ("dragonfly", "least_congested"),
    ("dragonfly", "priced_visited"),
    ("dragonfly", "reduce_scatter"),
    ("dragonfly", "rings_3_both_ways"),
]


@pytest.mark.parametrize(("network", "name", "mode"), [(*pair, MODES[index % 2]) for index, pair in enumerate(FEW)])
def test_exchanges_equal_the_loops(network, name, mode):
    """The two modes in turn: the slow test of every exchange has both of each."""
    check(network, name, mode)


@pytest.mark.parametrize(
    ("network", "name"),
    [
        ("mesh", "least_loaded_split_tree"),
        ("yx_mesh", "fewest_hops_tree"),
        ("clusters", "random_host"),
        ("mesh", "rings_2x2"),
        ("clusters", "two_level_2"),
    ],
)
def test_delays_pair_by_pair_equal_the_loops(network, name):
    check(network, name, "sharded", pair_by_pair=(True,))


@pytest.mark.slow
@both_modes
@pytest.mark.parametrize(("network", "name"), EVERY)
def test_every_exchange_on_every_network_equals_the_loops(network, name, mode):
    check(network, name, mode, pair_by_pair=(False, True), one_of_many=True)


@pytest.mark.parametrize("name", ["least_loaded", "token_home_tree", "rings_2"])
def test_exchanges_that_cut_through_equal_the_loops(name):
    """Trees do not: their routers hold a chunk whole before they add it up."""
    check("yx_mesh", name, "sharded", cut_through=True)


@pytest.mark.parametrize("name", ["least_loaded_split_tree", "reduce_scatter", "ring_both_ways"])
def test_messages_in_one_piece_equal_the_loops(name):
    check("mesh", name, "sharded", chunk_bytes=0.0)


@pytest.mark.parametrize(
    ("network", "name", "message"),
    [
        (
            "torus",
            "token_home_cross_tree",
            "mesh, whose paths .* not a Graph; use token_home_tree or token_home",
        ),
        ("switch", "lowest_host_split_tree", "needs a mesh"),
        ("clusters", "rings_2x2", "cuts a mesh into rectangles, and the network is a Graph; use rings_4"),
        ("mesh", "rings_3", "needs equal groups of 8 nodes; use one of 1, 2, 4, 8"),
        ("mesh", "rings_2x3", "rings_2x3: a 2x4 mesh cannot be cut into 2x3"),
        ("mesh", "gossip", "exchange is 'gossip', expected one of lowest_host, "),
    ],
)
def test_exchanges_that_do_not_suit_a_network_are_refused(network, name, message):
    with pytest.raises(ExchangeError, match=message):
        build_exchange(name, NETWORKS[network])
