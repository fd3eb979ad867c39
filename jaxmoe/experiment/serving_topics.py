"""Reads topics of requests from a scenario, and the rule that places experts anew while engines serve."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import HardwareConfig, build_machine
from jaxmoe.config.serving import RebalanceConfig, TopicsConfig
from jaxmoe.errors import InputError
from jaxmoe.experiment.deployment import Deployed
from jaxmoe.hardware import AbstractTopology
from jaxmoe.hardware.gpu.sheet import WEIGHT_BYTES
from jaxmoe.methods.moentwine.balancing import AbstractRule, Eplb, ShadowSlots
from jaxmoe.models import MoEModel
from jaxmoe.placement.slots import EMPTY
from jaxmoe.serving.online.rebalancing import Rebalancing, Slots
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.step_table import StepTable
from jaxmoe.serving.online.topics import Shares, TopicShares, drawn_topics, made_up_topics, popularity, windows_of
from jaxmoe.units import GIGA


def topic_shares(asked: TopicsConfig, model: MoEModel, read: Callable[[Path], Mapping[str, Shares]]) -> TopicShares:
    """Shares of experts of each topic, of a file that `read` reads or made up. Raises `InputError`."""
    if asked.path is None:
        return made_up_topics(asked.count, len(model.moe_layer_ids), model.num_experts, asked.gating_spread, 0)
    shares = np.stack([*read(Path(asked.path)).values()])
    if shares.shape[2] != model.num_experts:
        raise InputError(
            f"serving.topics.path is {asked.path}, whose loads are of {shares.shape[2]} experts; expected the "
            f"{model.num_experts} of the model. Take loads of that model"
        )
    return shares


def with_topics(requests: Requests, asked: TopicsConfig, topics: int, seed: int) -> Requests:
    """The requests, each with a topic drawn from those of its time."""
    window = windows_of(requests, asked.window_s)
    drift, draw = (np.random.default_rng([seed, part]) for part in (4, 5))
    parts = popularity(topics, int(window.max()) + 1, asked.window_s, asked.drift_s, asked.spread, drift)
    return replace(requests, topic=drawn_topics(window, parts, draw))


def rebalancing_of(
    hardware: HardwareConfig,
    asked: RebalanceConfig | None,
    own: Deployed,
    shares: TopicShares,
    window_s: float,
    steps: Callable[[Shares, Slots, int], StepTable],
) -> Rebalancing:
    """Where experts are at first, by loads of all topics alike, and what places them anew. Raises `InputError`."""
    model, deployment = own.step.model, own.deployment
    ranks, redundant = deployment.expert_ranks, deployment.redundant
    topology = build_machine(hardware).topology
    in_turn = Rebalancing(shares, _in_turn(shares, ranks, redundant), ranks, window_s, steps, Eplb())
    if asked is not None:
        _check(asked, ranks, redundant, model.num_experts)
        in_turn = replace(in_turn, rule=_rule(topology, asked, own))
    at_first = replace(in_turn, start=in_turn.placed(shares.mean(axis=0), in_turn.start)) if redundant else in_turn
    if asked is None:
        return at_first
    slowest = float(topology.link_bandwidth.min())
    rate = slowest if asked.bandwidth_GB_per_s is None else asked.bandwidth_GB_per_s * GIGA
    return replace(
        at_first,
        every_s=asked.every_s,
        expert_bytes=model.expert_parameters * WEIGHT_BYTES[deployment.experts],
        bytes_per_s=deployment.devices // ranks * rate,
        scale=len(model.moe_layer_ids) / shares.shape[1],
    )


def _check(asked: RebalanceConfig, ranks: int, redundant: int, experts: int) -> None:
    if ranks == 1:
        raise InputError(
            "serving.rebalance is given, but deployment.expert_ranks is 1; expected 2 or more, as every GPU has a part "
            "of every expert. Raise it, or leave out serving.rebalance"
        )
    if not redundant and not asked.method.startswith("eplb"):
        raise InputError(
            f"serving.rebalance.method is {asked.method}, which fills the slots of deployment.redundant_experts, but "
            f"there are none. Write a multiple of {ranks} there, or take eplb"
        )
    if experts % ranks and not asked.method.startswith("eplb"):
        raise InputError(
            f"serving.rebalance.method is {asked.method}, which leaves as many experts on each rank as it had, but the "
            f"{experts} of the model do not divide over deployment.expert_ranks, {ranks}. Take eplb, or other ranks"
        )


def _rule(topology: AbstractTopology, asked: RebalanceConfig, own: Deployed) -> AbstractRule:
    """The rule that chooses slots. A rank is the first of the GPUs that share its experts."""
    if asked.method.startswith("eplb"):
        return Eplb(renamed=asked.method == "eplb_renamed")
    ranks = own.deployment.expert_ranks
    share = own.deployment.devices // ranks
    hops = topology.hop_counts()[::share, ::share][:ranks, :ranks]
    native = own.step.model.num_experts // ranks
    return ShadowSlots(jnp.asarray(hops, jnp.float32), native, "coldest" if asked.method == "greedy" else "nearest")


def _in_turn(shares: TopicShares, ranks: int, redundant: int) -> Slots:
    """Experts in their order over ranks, with empty slots for copies behind those of each rank."""
    layers, experts = shares.shape[1:]
    held = np.full((ranks, (experts + redundant) // ranks), EMPTY)
    for slots, own in zip(held, np.array_split(np.arange(experts), ranks), strict=True):
        slots[: len(own)] = own
    return np.tile(held.ravel(), (layers, 1))
