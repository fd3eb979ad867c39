"""Exchanges that choose by congestion or by prices, with one, two and four copies of every expert.

Every network is cut into as many regions as there are copies, with each expert once in each; inside are tensor, expert
and hybrid parallelism. Rules that say which copy serves a token take turns over plans and exchanges. A small batch is a
large one in which every fourth token alone chooses. Trees are stored and forwarded, and so are unicasts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from setting import CHUNK, EXPERTS, NODES, SEED, TIMES, gating, model_on, network

from jaxmoe.des import Fabric, fabric_of, replay_plan
from jaxmoe.engine import AbstractServing, evaluate, serving_of
from jaxmoe.experiment.evaluation import describe_model
from jaxmoe.experiment.validation import agreement
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import build_exchange
from jaxmoe.placement.copies import ByDraw, Copies, LeastWork
from jaxmoe.placement.exchange import Exchange, PricedLinks, exchange_of
from jaxmoe.placement.regions import by_least_work, region_copies, regions_named
from jaxmoe.traces import Batch, GatingTrace, sample_batches

COPIES = (1, 2, 4)
EXCHANGES = (
    "least_congested",
    "least_congested_visited",
    "least_congested_token_home",
    "least_congested_unicast",
    "least_congested_by_8",
    "priced",
    "priced_visited",
    "priced_token_home",
)
INSIDE = ("tp", "ep", "hybrid_2")
RULES = ("by_home", "by_draw", "least_work", "least_work_together")
TOKENS, SMALL = 256, 64
VISITS = 0.1  # of a new visit under `least_work`, relative to even work
PRICES = (0.5, 2.0)  # of links, drawn evenly
KEY = ("network", "copies")
FIELDS = (*KEY, "latency_and_ports", "exchange", "plan", "served", "tokens")


def exchange_on(name: str, topology: AbstractTopology) -> Exchange:
    """The exchange of this name; one that goes by prices has drawn ones."""
    exchange = exchange_of(name)
    if not isinstance(exchange, PricedLinks):
        return exchange
    prices = np.random.default_rng(SEED).uniform(*PRICES, topology.num_links).astype(np.float32)
    return replace(exchange, price=tuple(prices.tolist()))


def served_by(copies: Copies, rule: str) -> Copies:
    """Copies of regions, which are served by home, by another rule."""
    match rule:
        case "by_draw":
            return replace(
                copies, serving=ByDraw(np.full(copies.copy_of.shape, copies.num_experts / copies.share.shape[1]))
            )
        case "least_work":
            return replace(copies, serving=LeastWork(np.ones(1), np.full(1, VISITS)))
        case "least_work_together":
            return by_least_work(copies)
    return copies


def batches_of(trace: GatingTrace) -> Batch:
    """A small and a large batch, leaves [1, 2, token, ...]."""
    large = sample_batches(trace, TOKENS, 1, SEED)
    some = (jnp.arange(TOKENS) % (TOKENS // SMALL) == 0)[:, None]
    small = replace(large, experts=jnp.where(some, large.experts, -1))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), small, large)


def lines(name: str, count: int) -> Iterator[dict[str, object]]:
    """Rows of a network with so many copies, with latency and ports and without, under every exchange."""
    trace = gating()
    batches, frequency = batches_of(trace), np.bincount(trace.experts.ravel()).astype(float)[None]
    for slow in (False, True):
        topology = with_ports(network(name, slow))
        fabric = fabric_of(topology, CHUNK)
        regions = [region_copies(regions_named(f"regions_{count}_{each}"), frequency, topology) for each in INSIDE]
        for turn, exchange in enumerate(EXCHANGES):
            rules = [RULES[(turn + at) % len(RULES)] if count > 1 else RULES[0] for at in range(len(INSIDE))]
            plans = [served_by(plan, rule) for plan, rule in zip(regions, rules, strict=True)]
            times = both(topology, fabric, exchange_on(exchange, topology), plans, batches)
            for (plan, rule), of_plan in zip(zip(INSIDE, rules, strict=True), times, strict=True):
                for tokens, seconds in zip((SMALL, TOKENS), of_plan, strict=True):
                    told = (name, count, slow, exchange, plan, rule, tokens)
                    yield dict(zip((*FIELDS, *TIMES), (*told, *seconds), strict=True))


def with_ports(topology: AbstractTopology) -> AbstractTopology:
    """The network itself, where its ports are without a limit with some that take no time, so that all compile once."""
    if topology.injection_bandwidth is not None:
        return topology
    port = jnp.full(NODES, jnp.inf, jnp.float32)
    return replace(topology, injection_bandwidth=port, ejection_bandwidth=port)


def both(
    topology: AbstractTopology, fabric: Fabric, exchange: Exchange, plans: Sequence[Copies], batches: Batch
) -> Float[np.ndarray, "plan batch time"]:
    """Seconds of communication, by model and by simulator, and in all, likewise."""
    model = model_on(topology, build_exchange(exchange, topology))
    shares = jnp.concatenate([jnp.asarray(plan.share) for plan in plans])
    missing = EXPERTS * COPIES[-1] - shares.shape[1]  # copies that nobody names, so that all numbers compile once
    shares = jnp.pad(shares, ((0, 0), (0, missing), (0, 0)))
    told = evaluate(
        model, shares, jax.tree.map(lambda *some: jnp.concatenate(some), *(served(p, batches) for p in plans))
    )
    layer = describe_model(model, fabric, "sharded", exchange)
    seen = [replay_plan(layer, plan.share, batches, copies=plan)[0] for plan in plans]
    simulated = [[(each.stages["dispatch"] + each.stages["combine"], each.total_s) for each in row] for row in seen]
    modelled = np.stack([told.communication, told.total], axis=-1)
    return np.stack([modelled, np.array(simulated)], axis=-1).reshape(*modelled.shape[:2], len(TIMES))


def served(plan: Copies, batches: Batch) -> Batch:
    """The batches with copies in place of experts, as the model picks them; the simulator picks on its own."""
    return _served(jax.tree.map(lambda leaf: leaf[0], serving_of(plan)), jnp.asarray(plan.share[0]), batches)


@eqx.filter_jit
def _served(rule: AbstractServing, share: Float[Array, "copy node"], batches: Batch) -> Batch:
    return jax.vmap(jax.vmap(lambda batch: rule(share, batch)))(batches)


def summary(rows: list[dict[str, str]]) -> str:
    """Agreement of every network and number of copies, as Markdown."""
    lines = ["| network | copies | cases | layer: R2 | error | communication alone: R2 | error |", "|" + " --- |" * 7]
    networks, counts = ([*dict.fromkeys(row[name] for row in rows)] for name in KEY)
    for where, count in [*product(networks, counts), *product(["all"], [*counts, "all"])]:
        of = [row for row in rows if where in ("all", row["network"]) and count in ("all", row["copies"])]
        if of:  # a table that is not done lacks some
            lines.append(f"| {where} | {count} | {len(of)} | {_figures(of, 'total')} | {_figures(of)} |")
    return "\n".join(lines)


def _figures(rows: list[dict[str, str]], what: str = "communication") -> str:
    told, seen = (np.array([float(row[f"{who}_{what}_s"]) for row in rows]) for who in ("model", "simulated"))
    found = agreement(told, seen)
    return f"{found['r2']:.5f} | {found['mean_abs_error_percent']:.2f} %"
