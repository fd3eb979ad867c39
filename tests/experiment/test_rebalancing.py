"""Placements over time: what policies move and gain, when moving pays, and advice on prepared cases."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
import yaml

from jaxmoe.des import fabric_of, replay_plan
from jaxmoe.engine.copies import replica_model
from jaxmoe.experiment.advice import Action, ActionOutcome, Advice, Case, _scaled, advice_report, advise, outcomes
from jaxmoe.experiment.confidence import SampledGain
from jaxmoe.experiment.evaluation import describe_model
from jaxmoe.experiment.rebalancing import Policy, matched, rebalanced
from jaxmoe.experiment.replica_plans import FP8_DISPATCH, drawn_tokens, served_by, serving_scenario, token_seconds
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.placement import PlanError
from jaxmoe.placement.slots import copies_of_slots, new_copies, share_of_slots
from jaxmoe.tune.replica_placement import ReplicaProblem

EXPERTS, LAYERS, RANKS, TOKENS, STEPS = 16, 2, 8, 256, 500
MODEL = {
    "hidden_size": 1024,
    "expert_size": 512,
    "num_experts": EXPERTS,
    "top_k": 2,
    "moe_layer_ids": {"first": 0, "count": LAYERS},
    "attention": {"kind": "grouped_query", "heads": 8, "kv_heads": 2, "head_size": 64},
}


def windows_of(skew: float, drifting: bool, count: int, seed: int) -> np.ndarray:
    """Loads whose log-popularity forgets a tenth of itself from window to window, or stays but for chance."""
    rng = np.random.default_rng(seed)
    log = np.empty((count, LAYERS, EXPERTS))
    log[0] = skew * rng.normal(size=log.shape[1:])
    for window in range(1, count):
        kept = 0.9 if drifting else 1.0
        log[window] = kept * log[window - 1] + (1 - kept**2) ** 0.5 * skew * rng.normal(size=log.shape[1:])
    share = np.exp(log) / np.exp(log).sum(axis=2, keepdims=True)
    return np.random.default_rng(seed + 1).multinomial(40_000, share).astype(float)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))

    def case(fast: bool = True, tight: bool = False, steps: int = STEPS) -> Case:
        machine = {
            "kind": "clusters",
            "clusters": 2,
            "nodes_per_cluster": 4,
            "link": {"bandwidth_GB_per_s": 900 if fast else 20, "latency_ns": 0},
            "uplink": {"bandwidth_GB_per_s": 400 if fast else 8, "latency_ns": 500},
            "die": {
                "compute_TFLOPs_per_s": 100,
                "memory_bandwidth_GB_per_s": 2000,
                "memory_capacity_GB": 0.0405 if tight else 10,
            },
            "router": {"switching": "cut_through", "chunk_B": 65536},
        }
        path = folder / f"machine_{fast}_{tight}.yaml"
        path.write_text(yaml.safe_dump(machine))
        scenario = serving_scenario(path, str(folder / "model.yaml"), TOKENS, costs=FP8_DISPATCH)
        return Case(scenario, TOKENS, steps, moves=2000)

    return case


@pytest.fixture(scope="module")
def problem(case_of) -> ReplicaProblem:
    model = replica_model(case_of().layer(), "nearest")
    return ReplicaProblem(model, np.ones((LAYERS, 1, EXPERTS)), 24)


LOADS = _scaled(windows_of(1.0, True, 12, 0), 2.0 * TOKENS)


def run(problem: ReplicaProblem, policy: Policy, steps: int = STEPS):
    start = eplb(LOADS[:4].sum(axis=0), problem.slots, RANKS)
    return rebalanced(problem, LOADS[4:], LOADS[:4], start, policy, steps)


def test_never_moves_nothing_and_the_oracle_is_best(problem):
    never, oracle = run(problem, Policy("keep")), run(problem, Policy("oracle", moves=1000))
    assert never.experts.sum() == never.moving.sum() == oracle.moving.sum() == 0
    for policy in (Policy("eplb"), Policy("tuned", moves=1000), Policy("eplb", trigger=1.2)):
        found = run(problem, policy)
        assert oracle.seconds.mean() <= found.seconds.mean() * 1.002


def test_tuned_moves_less_the_shorter_the_steps(problem):
    policy = Policy("tuned", moves=1000)
    short, long = run(problem, policy, steps=1), run(problem, policy, steps=10**6)
    assert short.experts.sum() < long.experts.sum()
    assert long.seconds.mean() <= short.seconds.mean()
    assert new_copies(short.slots[-1], short.slots[-1], EXPERTS, RANKS).sum() == 0


def test_matching_keeps_the_packs_and_moves_no_more(problem):
    before, after = (eplb(LOADS[window], 24, RANKS) for window in (0, 4))
    given = matched(before, after, EXPERTS, RANKS)
    assert sorted(map(tuple, given[0].reshape(RANKS, -1))) == sorted(map(tuple, after[0].reshape(RANKS, -1)))
    moves = [new_copies(before, slots, EXPERTS, RANKS).sum() for slots in (after, given)]
    assert moves[1] <= moves[0]


CASES = [
    # skew, drifting, fast network, memory tight
    (1.2, True, True, False),
    (1.2, True, True, True),
    (1.2, True, False, False),
    (1.2, True, False, True),
    (1.2, False, True, False),
    (1.2, False, True, True),
    (1.2, False, False, False),
    (1.2, False, False, True),
    (0.05, True, True, False),
    (0.05, False, True, True),
    (0.05, True, False, True),
    (0.05, False, False, False),
]


def simulated_per_token(case: Case, outcome: ActionOutcome, later: np.ndarray) -> float:
    """Seconds of a token in the event simulator, layers replayed in every fourth window; the rest as the model says."""
    layer = case.layer()
    model = replica_model(layer, case.choice)
    fabric = fabric_of(layer.machine.topology, float(case.scenario.hardware.router.chunk_B), True)
    described = describe_model(layer, fabric, "sharded", "token_home")
    seen, some = 0.0, slice(0, len(later), 4)
    loads = _scaled(later, 2.0 * outcome.tokens)[some]
    priced = token_seconds(model, outcome.history[some], loads, outcome.tokens, 2, 0).mean()
    for window, row in np.ndindex(*loads.shape[:2]):
        slots = outcome.history[some][window, row : row + 1]
        batch = drawn_tokens(loads[window, row], outcome.tokens, 2, window * LAYERS + row)
        stacked = jax.tree.map(lambda leaf: leaf[None, None], batch)
        served = served_by(model, slots, stacked, EXPERTS)
        seen += replay_plan(described, share_of_slots(slots, EXPERTS, RANKS), stacked, served=served)[0][0].total_s
    return float(outcome.seconds.mean() + seen / len(loads) - priced) / outcome.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("skew", "drifting", "fast", "tight"), CASES)
def test_the_advised_action_is_the_best_of_those_simulated(case_of, skew, drifting, fast, tight):
    case, windows = case_of(fast, tight), windows_of(skew, drifting, 32, 7)
    advice = advise(case, windows[:16])
    later = outcomes(case, windows[:16], windows[16:])
    seconds = {each.action.name: simulated_per_token(case, each, windows[16:]) for each in later}
    assert seconds[advice.chosen.action.name] <= 1.02 * min(seconds.values()), (advice.sentence, seconds)


def test_flat_and_still_loads_are_left_alone(case_of):
    # Where copies are picked evenly: the nearest ones would save traffic even of flat loads.
    windows = windows_of(0.0, False, 8, 3)
    advice = advise(replace(case_of(), choice="even"), windows)
    assert not advice.chosen.action.placed, advice.sentence
    assert "Leave the placement as it is" in advice.sentence
    assert advice.gain == 0.0
    ranks = windows[4:].reshape(4, LAYERS, RANKS, 2).sum(axis=3)  # of each later window, not of their mean
    ratio = (ranks.max(axis=2) / ranks.mean(axis=2)).mean()
    assert advice.outcomes[0].balance["max_over_mean"] == pytest.approx(ratio)


def advised_of(gains, tokens=256.0):
    """Advice to place anew, of these gains in windows."""
    slots = np.zeros((len(gains), LAYERS, EXPERTS), int)
    outcome = ActionOutcome(Action(1, True), TOKENS, np.ones(len(gains)), 0.5, 0.0, 0.0, {}, 0.0, slots)
    return Advice(outcome, [outcome], SampledGain(np.array(gains), tokens, 0.01), 10.0, 1e-3, 1.0, slots[0])


def test_the_sentence_tells_the_interval_and_what_would_settle_a_doubt():
    sure = advised_of([0.1, 0.11, 0.1, 0.12, 0.1, 0.11]).sentence
    assert re.search(r"10\.7% less time .*95% interval 9\.\d% to 11\.\d%.*\(high confidence\)\.$", sure)
    doubtful = advised_of([0.3, -0.1])
    assert re.search(r"low confidence: the sample has 256 tokens, about [\d,]+ would settle it\)\.$", doubtful.sentence)
    few = replace(advised_of([0.1, 0.11, 0.1, 0.12]).sampled, least=1024.0)
    assert few.told_confidence == "low confidence: the sample has 256 tokens, about 1,000 would settle it"
    told = advice_report(doubtful, RANKS)
    assert (told["confidence"], told["gain"]) == ("low", pytest.approx(0.1))
    assert told["tokens_to_settle"] > 256 == told["tokens"]


@pytest.mark.slow
def test_skewed_loads_are_placed_and_memory_counts(case_of):
    windows = windows_of(1.2, False, 8, 3)
    roomy, tight = advise(case_of(fast=False), windows), advise(case_of(fast=False, tight=True), windows)
    assert roomy.chosen.action.placed
    assert roomy.gain > 0.01
    tokens = {each.action.extra: each.tokens for each in tight.outcomes}
    assert tokens[0] == TOKENS > tokens[1] > tokens[2]
    assert copies_of_slots(roomy.deployed, EXPERTS, RANKS).sum(axis=2).min() >= 1
    with pytest.raises(PlanError, match="expected 4 or more"):
        advise(case_of(), windows[:3])
