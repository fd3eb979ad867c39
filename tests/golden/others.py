"""Cases without a system: strategies under exchanges, schedules, copies, slots, bounds, derivatives, searches."""

from functools import lru_cache

import jax
import numpy as np

from jaxmoe.experiment.advice import Case as Serving
from jaxmoe.experiment.advice import advise
from jaxmoe.experiment.replica_plans import FIT_BATCHES, FP8_DISPATCH, drawn_loads, placed_for_time, serving_scenario
from jaxmoe.experiment.strategies import standard_strategies
from jaxmoe.traces import Batch
from jaxmoe.tune import PlacementProblem, TunerSettings, tune
from jaxmoe.tune.replica_placement import ReplicaProblem

from . import scenarios
from .case import Case
from .pricing import counts, plans
from .store import Arrays, named, under

MESH, WAFER = "hd_moe/mixtral-8x7b_4x4_5TFLOPs_50GBps", "expert_streaming/qwen3-30b-a3b_wafer_4x4"
CLUSTER, CHIPLETS, WIDE = "qwen3-235b-a22b_dgx_b200_4x8", "expert_streaming/hd_moe_2x2", "moentwine/deepseek-v3_6x6"


def _batches(name: str) -> Arrays:
    return named(scenarios.frozen_batches(scenarios.ready(name).batches), "batches/")


def _thawed(decisions: Arrays) -> Batch:
    return scenarios.thawed(under(decisions, "batches/"))


def _first(batches: Batch) -> Batch:
    return jax.tree.map(lambda leaf: leaf[0, 0], batches)


# Standard strategies, each under its own exchange and several others.

OTHERS = ("lowest_host", "token_home_tree", "reduce_scatter", "least_loaded")
# The order of plans in recorded figures; a golden file sorts its arrays by name.
PLANS = ("tp", "tp_both_ways", "ep_random", "ep_balanced", "ep", "hybrid", "hybrid_ring", "hybrid_complete")


def _standard(name: str) -> Case:
    def decide() -> tuple[Arrays, Arrays]:
        made = standard_strategies(scenarios.ready(name).inputs)
        found = {f"share/{each.name}": each.placement.share for each in made}
        found |= {f"exchange/{each.name}": np.array(each.placement.exchange) for each in made}
        return found | {f"fits/{each.name}": np.array(each.fits) for each in made} | _batches(name), {}

    def price(decisions: Arrays) -> Arrays:
        inputs, batches = scenarios.ready(name).inputs, _thawed(decisions)
        named_shares, exchanges = under(decisions, "share/"), under(decisions, "exchange/")
        shares = {plan: named_shares[plan] for plan in PLANS}
        own = {plan: str(exchanges[plan][0]) for plan in PLANS}
        under_all = np.stack([*shares.values()])
        found: Arrays = {}
        for exchange in OTHERS:
            figures = plans.price_plans(inputs.model, under_all, inputs.exchange(exchange), batches)
            found |= named(figures, f"all/{exchange}/")
        for exchange in dict.fromkeys(own.values()):
            some = np.stack([share for plan, share in shares.items() if own[plan] == exchange])
            figures = plans.price_plans(inputs.model, some, inputs.exchange(exchange), batches)
            found |= named(figures, f"own/{exchange}/")
        return found

    return Case(decide, price)


# Schedules, with attention beside experts and weights that travel.

SCHEDULES = ("serial", "overlap", "pipelined(2)", "pipelined(4)", "idle_links")


def _drawn_share(rng: np.random.Generator, experts: int, nodes: int) -> np.ndarray:
    """Whole experts, and some in parts of two or three nodes."""
    share = np.zeros((experts, nodes), np.float32)
    for expert in range(experts):
        hosts = rng.choice(nodes, 1 + expert % 3, replace=False)
        parts = rng.uniform(0.5, 1.5, len(hosts))
        share[expert, hosts] = parts / parts.sum()
    return share


def _schedules(names: tuple[str, ...]) -> Case:
    def decide() -> tuple[Arrays, Arrays]:
        rng, model = np.random.default_rng(0), scenarios.ready(WAFER).inputs
        share = _drawn_share(rng, model.moe.num_experts, model.num_nodes)
        sent = np.zeros(share.shape, np.uint8)
        sent[rng.choice(len(share), 6, replace=False)] = rng.integers(0, 2, (6, model.num_nodes))
        return {"share": share, "sent": sent} | _batches(WAFER), {}

    def price(decisions: Arrays) -> Arrays:
        ready, batch = scenarios.ready(WAFER), _first(_thawed(decisions))
        return plans.price_schedules(ready, names, decisions["share"], decisions["sent"], batch)

    return Case(decide, price, rules=False)


# Derivatives, bounds, and what stands beside experts.


def _drawn_plan(name: str, layers: int | None = None) -> Arrays:
    inputs, rng = scenarios.ready(name).inputs, np.random.default_rng(1)
    count = len(inputs.layer_ids) if layers is None else layers
    made = [_drawn_share(rng, inputs.moe.num_experts, inputs.num_nodes) for _ in range(count)]
    return {"share": np.stack(made)} | _batches(name)


def _slopes(name: str) -> Case:
    def price(decisions: Arrays) -> Arrays:
        model, batch = scenarios.ready(name).inputs.model, _first(_thawed(decisions))
        return plans.slopes(model, decisions["share"][0], batch)

    return Case(lambda: (_drawn_plan(name, 1), {}), price, rules=False)


def _bounds(name: str) -> Case:
    def price(decisions: Arrays) -> Arrays:
        ready = scenarios.ready(name)
        found = plans.bounds(ready, decisions["share"], _thawed(decisions))
        return found | named(plans.even_parts(ready, (1.0, 64.0)), "beside/")

    return Case(lambda: (_drawn_plan(name), {}), price, rules=False)


# Slots on counts, and balancers over iterations.


def _counts(schedule: str) -> Case:
    def decide() -> tuple[Arrays, Arrays]:
        rng = np.random.default_rng(2)
        slots = np.stack([np.arange(16), *rng.integers(-1, 16, (2, 16))], axis=1)
        many = np.stack([slots, np.roll(slots, 3, axis=0), np.where(np.arange(3) == 2, -1, slots)])
        return {"slots": many, "loads": rng.integers(0, 200, (3, 16)), "groups": rng.integers(0, 90, (3, 4, 16))}, {}

    def price(decisions: Arrays) -> Arrays:
        alike = counts.price_counts(schedule, decisions["slots"], decisions["loads"])
        by_group = counts.price_counts(schedule, decisions["slots"], decisions["groups"])
        return named(alike, "alike/") | named(by_group, "by_group/")

    return Case(decide, price, rules=False)


def _balancer(name: str, invasive: bool) -> Case:
    def decide() -> tuple[Arrays, Arrays]:
        rng = np.random.default_rng(3)
        loads = rng.integers(10, 20, (8, counts.LAYERS, counts.DIES))
        loads[:4, :, 5], loads[4:, :, 9] = 200, 150
        return {"loads": loads}, {}

    return Case(decide, lambda decisions: counts.balance(name, invasive, decisions["loads"]), rules=False)


# Copies of experts: `plan place`, `plan advise`, and the model that they ask.

SERVED = {"wafer": ("moentwine_4x4", "qwen3-30b-a3b", 256, 160), "nodes": ("camoe_4nodes", "mixtral-8x7b", 128, 12)}


def _windows(experts: int) -> np.ndarray:
    """Loads that drift, [window, layer, expert]."""
    rng = np.random.default_rng(4)
    base, drift = rng.lognormal(0, 1, (2, experts)), rng.lognormal(0, 0.4, (8, 2, experts))
    return np.round(1000 * base * drift)


@lru_cache(maxsize=2)
def _served(key: str):
    machine, model, tokens, slots = SERVED[key]
    path = scenarios.ROOT / "configs" / "hardware" / f"{machine}.yaml"
    return serving_scenario(path, model, tokens, costs=FP8_DISPATCH), tokens, slots


def _copies(key: str, choice: str) -> Case:
    def decide() -> tuple[Arrays, Arrays]:
        scenario, tokens, count = _served(key)
        rng, experts = np.random.default_rng(5), scenario.model.num_experts
        rows = [np.concatenate([np.arange(experts), rng.integers(0, experts, count - experts)]) for _ in range(2)]
        slots, before = (np.stack([rng.permutation(row) for row in rows]) for _ in range(2))
        loads = drawn_loads(_windows(experts), tokens * scenario.model.top_k, 4, 0)
        return {"slots": slots, "before": before, "loads": loads.astype(int)}, {}

    def price(decisions: Arrays) -> Arrays:
        model = counts.copies_model(_served(key)[0], choice)
        return counts.price_copies(model, decisions["slots"], decisions["before"], decisions["loads"])

    return Case(decide, price, rules=False)


def _placed(key: str) -> Case:
    def price(decisions: Arrays) -> Arrays:
        model = counts.copies_model(_served(key)[0], "nearest")
        return counts.price_copies(model, decisions["slots"], decisions["before"], decisions["loads"])

    def decide() -> tuple[Arrays, Arrays]:
        scenario, tokens, count = _served(key)
        experts, choices = scenario.model.num_experts, tokens * scenario.model.top_k
        windows = _windows(experts)
        model = counts.copies_model(scenario, "nearest")
        found = placed_for_time(ReplicaProblem(model, np.swapaxes(windows, 0, 1), count), windows, choices)
        loads = drawn_loads(windows, choices, FIT_BATCHES, 0)
        told = {f"fitted/{name}": np.array(value) for name, value in found.fitted.items()}
        told |= {f"later/{name}": np.array(value) for name, value in (found.later or {}).items()}
        before = np.tile(np.arange(count) % experts, (2, 1))
        return {"slots": found.slots, "before": before, "loads": loads.astype(int)}, told

    return Case(decide, price, searched="fitted/tuned")


def _advised(key: str) -> Case:
    def decide() -> tuple[Arrays, Arrays]:
        scenario, tokens, _ = _served(key)
        found = advise(Serving(scenario, tokens, 1000, moves=2000), _windows(scenario.model.num_experts))
        told = {f"token_s/{each.action.name}": each.per_token for each in found.outcomes}
        told |= {f"moving_s/{each.action.name}": np.array(each.moving) for each in found.outcomes}
        told |= {"gain": np.array(found.gain)}
        deployed = found.deployed
        before = np.tile(np.arange(deployed.shape[1]) % scenario.model.num_experts, (len(deployed), 1))
        loads = drawn_loads(_windows(scenario.model.num_experts), tokens * scenario.model.top_k, 4, 0)
        return {"slots": deployed, "before": before, "loads": loads.astype(int)}, told

    return Case(decide, _placed(key).price, searched="token_s/")


# Tuned plans.

QUICK = TunerSettings(
    restarts=2, steps=60, refine_steps=150, refine_chains=2, refine_batches=8, batches_per_step=2, hybrid_cuts=1, seed=3
)


def _tuned(name: str) -> Case:
    def decide() -> tuple[Arrays, Arrays]:
        inputs = scenarios.ready(name).inputs
        exchanges = ("least_loaded", "reduce_scatter", "ring_both_ways")
        tokens = inputs.scenario.workload.batch_tokens
        found = tune(PlacementProblem(inputs.model, inputs.trace, tokens, exchanges=exchanges), QUICK)
        told = {f"cost/{stage}": value for stage, value in found.stages.items() if stage == "final"}
        decisions = {"share": found.share, "exchange": np.array(found.exchange)} | _batches(name)
        return decisions, told | {"bound": found.bound}

    def price(decisions: Arrays) -> Arrays:
        inputs, batches = scenarios.ready(name).inputs, _thawed(decisions)
        found: Arrays = {}
        for row, exchange in enumerate(decisions["exchange"]):
            one = jax.tree.map(lambda leaf, at=row: leaf[at : at + 1], batches)
            share = decisions["share"][None, row : row + 1]
            figures = plans.price_plans(inputs.model, share, inputs.exchange(str(exchange)), one)
            found |= named(figures, f"{row}/")
        return found

    return Case(decide, price, searched="cost/")


BALANCERS = ("none", "eplb", "greedy", "topology_aware", "gradient")
FAMILIES: dict[str, dict[str, Case]] = {
    "strategies": {f"strategies/{name}": _standard(name) for name in (MESH, WIDE, CLUSTER, CHIPLETS)},
    "layers": {f"schedules/{name}": _schedules((name,)) for name in SCHEDULES}
    | {f"slopes/{name}": _slopes(name) for name in (MESH, CHIPLETS)}
    | {f"bounds/{name}": _bounds(name) for name in (MESH, CLUSTER, CHIPLETS)},
    "counts": {f"counts/{name}": _counts(name) for name in ("serial", "pipelined(4)")}
    | {
        f"balancer/{name}_{'invasive' if invasive else 'non_invasive'}": _balancer(name, invasive)
        for name in BALANCERS
        for invasive in (True, False)
    },
    "copies": {
        f"copies/{key}_{choice}": _copies(key, choice) for key in SERVED for choice in ("even", "nearest", "fixed")
    },
    "searches": {f"place/{key}": _placed(key) for key in SERVED}
    | {f"advise/{key}": _advised(key) for key in SERVED}
    | {f"tune/{name}": _tuned(name) for name in (MESH, "quickstart")},
}
