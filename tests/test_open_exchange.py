"""An exchange of a user's own, `halving`: one class, and one function that says how the simulator carries it out."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from typer.testing import CliRunner, Result

import jaxmoe as jm
from jaxmoe.cli.app import app
from jaxmoe.des import fabric_of, replay_layer
from jaxmoe.des.exchanges import SIMULATED, phases
from jaxmoe.engine import Deciding, Layer, evaluate, schedule_of
from jaxmoe.experiment.evaluation import describe_model
from jaxmoe.hardware import AbstractTopology
from jaxmoe.models import MoEModel
from jaxmoe.network import AbstractExchange, Flows, Phases, Visits, build_exchange
from jaxmoe.network.exchange import MergeKey
from jaxmoe.placement.exchange import EXCHANGES, ExchangeError, Registered, exchange_of
from jaxmoe.traces import Batch, synthetic_trace
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.bounds import lower_bound

SHAPE, EXPERTS, TOP_K, TOKENS = (1, 8), 8, 4, 32


class Halving(AbstractExchange):
    """Recursive halving over all nodes: step by step, nodes send a partner half of the parts that they still hold.

    Nodes add up what they receive, and each ends with an equal part of every token's result.
    """

    def alike(self, topology: AbstractTopology) -> MergeKey:
        return MergeKey()

    def __call__(self, topology: AbstractTopology, visits: Visits) -> Phases:
        node, held, steps = np.arange(topology.num_nodes), visits.visited, []
        for step in range(topology.num_nodes.bit_length() - 1):
            partner = node ^ (topology.num_nodes >> (step + 1))
            sent = visits.weight @ held
            vectors = sent / 2 ** (step + 1)
            steps.append((Flows(jnp.diag(jnp.minimum(sent, 1)), jnp.asarray(partner, jnp.int32), vectors),))
            held = jnp.maximum(held, held[:, partner])
        return tuple(steps)


def halved(exchange, fabric, visited, home, size, mirrored):
    """Every step of it: one message from each node that holds part of any token."""
    node, held, steps = np.arange(fabric.num_nodes), visited, []
    for step in range(fabric.num_nodes.bit_length() - 1):
        partner = node ^ (fabric.num_nodes >> (step + 1))
        sent = held.sum(axis=0) * size / 2 ** (step + 1)
        some = sent > 0
        steps.append((node[some], partner[some], sent[some]))
        held = held | held[:, partner]
    return phases(fabric, steps, mirrored)


class Partial(Halving):
    """The same, if it said that something is left out."""

    complete = False


class Boastful(Halving):
    """The same, if it were not true of itself."""

    unicast = True


class Asking(Halving):
    """The same, once every node has told each other one how many tokens chose which of its experts."""

    def deciding(self, topology: AbstractTopology, visits: Visits) -> Phases:
        nodes = topology.num_nodes
        return ((Flows(jnp.ones((nodes, nodes)), jnp.arange(nodes), jnp.asarray(4.0 * EXPERTS), jnp.ones(nodes)),),)


def asked(exchange, fabric, visited, home, size, mirrored):
    """As `halving`."""
    return halved(exchange, fabric, visited, home, size, mirrored)


def counts_of_all(exchange, fabric, visited, home):
    """Every node's 32 B for each other node, in one phase."""
    source, destination = np.nonzero(~np.eye(fabric.num_nodes, dtype=bool))
    return phases(fabric, [(source, destination, np.full(len(source), 4.0 * EXPERTS))], mirrored=False)


asked.deciding = counts_of_all


PARTS = {"asking": Asking, "halving": Halving, "partial": Partial, "boastful": Boastful}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    for name, part in PARTS.items():
        EXCHANGES.register(name, part)
    SIMULATED.register("halving", halved)
    SIMULATED.register("partial", halved)
    SIMULATED.register("asking", asked)
    yield
    for name in PARTS:
        EXCHANGES.remove(name)
    SIMULATED.remove("halving")
    SIMULATED.remove("partial")
    SIMULATED.remove("asking")


@pytest.fixture(scope="module")
def model() -> Layer:
    machine = cases.random_machine(np.random.default_rng(0), SHAPE)
    machine.link_bandwidth *= 0.01
    return cases.layer_model(machine, rule="token_home")


@pytest.fixture
def problem(model: Layer) -> Callable[..., PlacementProblem]:
    """The problem of a machine that tokens need many nodes of, among these exchanges."""
    trace = synthetic_trace(400, [0], EXPERTS, TOP_K, skew=1.0, coactivation=0.0, reuse=0.0, seed=0)
    rate = jnp.full(8, 2e8)  # so slow that a node has no time for all experts of a token
    slow = replace(model, machine=replace(model.machine, die=replace(model.machine.die, flops=rate)))
    return lambda *names: PlacementProblem(slow, trace, TOKENS, exchanges=names)


def plans(count: int = 24) -> np.ndarray:
    """Whole experts at random, and all everywhere."""
    rng = np.random.default_rng(1)
    host = np.stack([rng.permutation(8) for _ in range(count)])
    return np.concatenate([np.eye(8)[host], np.full((1, EXPERTS, 8), 1 / 8)]).astype(np.float32)


def times_of(model: Layer, exchange: AbstractExchange, batches: Batch) -> np.ndarray:
    """Mean time of every plan."""
    some = jnp.asarray(plans())
    return np.array([evaluate(model, each[None], batches, exchange).total.mean() for each in some])


def test_it_is_known_by_its_name(model):
    topology = model.machine.topology
    assert exchange_of("halving") == Registered("halving")
    made = build_exchange("halving", topology)
    assert isinstance(made, Halving)
    assert (made.merges, made.unicast, made.complete, made.groups) == (True, False, True, 0)
    with pytest.raises(ExchangeError, match=r"exchange is 'halvin' \(did you mean halving\?\)"):
        build_exchange("halvin", topology)


def test_what_makes_no_exchange_is_refused(model):
    EXCHANGES.register("seven", lambda name, topology: 7)
    try:
        with pytest.raises(ExchangeError, match="exchange seven is registered as what makes a int, expected"):
            build_exchange("seven", model.machine.topology)
    finally:
        EXCHANGES.remove("seven")


def test_a_family_reads_its_parameters_from_the_name(model):
    EXCHANGES.register("halving_{2:[0-9]+}", lambda name, topology: Halving() if name.endswith("_2") else None)
    try:
        assert isinstance(build_exchange("halving_2", model.machine.topology), Halving)
        assert exchange_of("halving_8") == Registered("halving_8")
    finally:
        EXCHANGES.remove("halving_{2:[0-9]+}")


def test_its_bound_holds_and_is_that_of_exchanges_that_merge(problem):
    halving, tree, unicasts = problem("halving"), problem("least_loaded_tree"), problem("least_loaded")
    batches = halving.draw(6, 0)
    (bound,), (of_trees,), (of_unicasts,) = (lower_bound(each, batches) for each in (halving, tree, unicasts))
    assert bound == of_trees < of_unicasts  # whatever it is called
    assert lower_bound(problem("boastful"), batches) == of_unicasts  # by what it states alone
    for name in ("halving", "token_home"):
        exchange = build_exchange(name, halving.model.machine.topology)
        assert 0 < bound <= times_of(halving.model, exchange, batches).min() * (1 + 1e-6)


def test_equal_tokens_are_merged_and_times_stay(problem):
    asked = replace(problem("halving"), batch_tokens=300)  # more than there are kinds of token
    drawn, halving = asked.draw(4, 0), build_exchange("halving", asked.model.machine.topology)
    merged = asked.merged(drawn, halving)
    assert merged.experts.size < drawn.experts.size / 4
    np.testing.assert_allclose(times_of(asked.model, halving, merged), times_of(asked.model, halving, drawn), rtol=1e-6)


def test_time_has_a_slope(model):
    exchange, rng = build_exchange("halving", model.machine.topology), np.random.default_rng(0)
    batch = jax.tree.map(
        lambda leaf: leaf[0, 0],
        PlacementProblem(
            model, synthetic_trace(64, [0], EXPERTS, TOP_K, 1.0, 0.0, 0.0, seed=0), TOKENS, exchanges=("halving",)
        ).draw(1, 0),
    )
    share = jnp.asarray(cases.random_share(rng, EXPERTS, 8), jnp.float32)

    def seconds(vector_bytes: jax.Array) -> jax.Array:
        costs = replace(model.costs, combine_bytes=vector_bytes)
        return replace(model, costs=costs)(share, batch, exchange).combine

    at = model.costs.combine_bytes
    slope, step = jax.grad(seconds)(at), 0.01 * at
    assert float(slope) == pytest.approx(float((seconds(at + step) - seconds(at - step)) / (2 * step)), rel=1e-3)


def test_tuning_leaves_out_what_is_not_complete(problem):
    with pytest.raises(ExchangeError, match="partial leaves traffic out, from which no plan may profit"):
        problem("partial")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


SLOW_LINKS = ("--set", "hardware.link.bandwidth_GB_per_s=0.1", "--set", "hardware.router.chunk_B=null")


@pytest.fixture(autouse=True)
def _unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())


def test_the_simulator_carries_it_out(scenario, tmp_path):
    named = ("--set", "costs.exchange=halving")
    result = run("validate", scenario, "--plan", "ep", *named, *SLOW_LINKS, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    ep = summary_of(tmp_path / "out")["strategies"]["ep"]
    assert {*ep["exchange"]} == {"halving"}
    (sizes,) = ep["batch_tokens"].values()
    for batch in (batch for layer in sizes["layers"] for batch in layer["batches"]):
        for stage in ("dispatch_s", "combine_s"):
            assert batch["simulated"][stage] == pytest.approx(batch["model"][stage], rel=0.02)


def test_deciding_is_part_of_dispatch_in_model_and_simulator():
    """32 B from each of 8 nodes in a row to each other: 4 x 4 messages cross the middle either way."""
    mesh = jm.mesh(SHAPE, bandwidth=1e8, latency=0.0)
    machine, moe = jm.machine(mesh, flops=1e12), MoEModel("small", 64, 128, 8, 2, (0,), 1)
    layer = jm.layer(machine, moe, exchange="asking", cut_through=True)
    share, batch = jnp.eye(8), cases.batch(cases.random_tokens(np.random.default_rng(0), 64, 8, 2))
    batch = replace(batch, weight=jnp.ones(64))
    time, plain = layer(share, batch), layer(share, batch, build_exchange("halving", mesh))
    assert float(time.dispatch - plain.dispatch) == pytest.approx(16 * 32 / 1e8, rel=1e-4)
    assert float(time.total - plain.total) == pytest.approx(16 * 32 / 1e8, rel=1e-4)
    piped = replace(layer, schedule=schedule_of("pipelined(2)"))
    assert float(piped(share, batch).total) < 1.5 * float(time.total)  # links alone serve it
    described = describe_model(layer, fabric_of(mesh, None, cut_through=True), "sharded", "asking")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(asked, "deciding")
        with pytest.raises(ExchangeError, match="asking takes traffic to decide"):
            describe_model(layer, fabric_of(mesh, None, cut_through=True), "sharded", "asking")
    seen = replay_layer(described, np.asarray(share), jax.tree.map(np.asarray, batch))
    assert seen.stages["dispatch"] == pytest.approx(float(time.dispatch), rel=0.02)
    assert seen.total_s == pytest.approx(sum(seen.stages.values()))


def test_what_has_to_know_the_batch_is_charged_in_model_and_simulator():
    """Two choices of 1 us each, as the model and the simulator are told apart."""
    mesh = jm.mesh(SHAPE, bandwidth=1e8, latency=0.0)
    layer = jm.layer(jm.machine(mesh, flops=1e12), MoEModel("small", 64, 128, 8, 2, (0,), 1), "asking")
    layer = replace(layer, costs=replace(layer.costs, deciding=Deciding(jnp.asarray(1e-6), jnp.asarray(0.0))))
    fabric, share = fabric_of(mesh, None), np.eye(8, dtype=np.float32)
    batch = replace(cases.batch(cases.random_tokens(np.random.default_rng(0), 64, 8, 2)), weight=jnp.ones(64))
    with pytest.raises(ExchangeError, match=r"asking has to know the batch, which costs\.deciding"):
        describe_model(layer, fabric, "sharded", "asking")
    with pytest.MonkeyPatch.context() as patch:
        before = float(layer(jnp.asarray(share), batch).dispatch)
        patch.setattr(asked, "choices_in_turn", lambda exchange, tokens: 0, raising=False)
        free = replay_layer(describe_model(layer, fabric, "sharded", "asking"), share, batch)
        patch.setattr(asked, "choices_in_turn", lambda exchange, tokens: tokens // 32)
        patch.setattr(Asking, "choices_in_turn", lambda self, tokens: tokens // 32)
        paid = replay_layer(describe_model(layer, fabric, "sharded", "asking"), share, batch)
        assert float(layer(jnp.asarray(share), batch).dispatch) - before == pytest.approx(2e-6, rel=1e-3)
        assert paid.stages["dispatch"] - free.stages["dispatch"] == pytest.approx(2e-6, rel=1e-6)


def test_without_an_entry_for_the_simulator_that_is_said(scenario, tmp_path):
    named = ("--set", "costs.exchange=boastful")
    result = run("validate", scenario, "--plan", "ep", *named, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "exchange boastful cannot be replayed" in " ".join(result.stderr.split())
    assert "jaxmoe.simulated_exchanges" in result.stderr.replace("\n", "")


def test_plans_are_evaluated_and_tuned_under_it(scenario, tmp_path):
    out = tmp_path / "tuned"
    result = run("tune", scenario, "--set", "tuning.exchanges=[halving]", *SLOW_LINKS, "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert "halving" in summary["exchanges"]
    assert "halving" in summary["strategies"]["ep"]["under"]
    assert summary["tuning"]["gap"] >= -1e-6


def test_one_that_leaves_traffic_out_is_compared_with_nothing(scenario, tmp_path):
    out = tmp_path / "out"
    result = run("evaluate", scenario, "--set", "costs.exchange=partial", "--out", out)
    assert result.exit_code == 0, result.output
    summary = summary_of(out)
    assert "partial" not in summary["exchanges"]
    ep = summary["strategies"]["ep"]
    assert (ep["comparable"], ep["under"]) == (False, {})
    assert ep["note"] == "the exchange partial leaves traffic out"


def test_a_sweep_names_it(scenario, tmp_path):
    study = tmp_path / "study.yaml"
    study.write_text(f"scenario: {scenario}\naxes: {{exchange: [halving, reduce_scatter]}}\n")
    result = run("sweep", study, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
