"""Reads serving over time from a scenario: its requests, its engines, and seconds of their steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxmoe.config import HardwareConfig, Scenario
from jaxmoe.config.serving import (
    EngineConfig,
    FileArrivals,
    RandomArrivals,
    RebalanceConfig,
    ServingConfig,
    TopicsConfig,
    UserArrivals,
)
from jaxmoe.experiment.deployment import Deployed, deployed, drafted_of, stated_deployment
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.machine_deployment import deployed_on_machine, in_engine
from jaxmoe.experiment.serving import Serving
from jaxmoe.experiment.serving_machine import buffering_of, check_buffering, grid_of, machine_table
from jaxmoe.experiment.serving_topics import rebalancing_of, topic_shares, with_topics
from jaxmoe.hardware.gpu.files import read_kernels
from jaxmoe.serving.closed_loop import BACKENDS
from jaxmoe.serving.gating import loads_of_layers
from jaxmoe.serving.memory import cache_bytes
from jaxmoe.serving.online.arrivals import Lengths, Prefixes, at_rate, check_lengths, drawn
from jaxmoe.serving.online.engine import DecodePool, Engine, Fleet
from jaxmoe.serving.online.from_profile import profile_table
from jaxmoe.serving.online.from_step import step_table, with_gating
from jaxmoe.serving.online.metrics import Limits
from jaxmoe.serving.online.padding import Padding, graph_sizes
from jaxmoe.serving.online.profile import read_profile
from jaxmoe.serving.online.rebalancing import Rebalancing, Slots
from jaxmoe.serving.online.recorded import read_requests
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.step_table import StepTable
from jaxmoe.serving.online.topics import Shares, read_topics
from jaxmoe.serving.step import AbstractStep, ModelStep
from jaxmoe.units import GIGA, MICRO

KEPT = 64  # deployments and tables of steps that are kept for the next scenarios
Made = TypeVar("Made")


def serving_of(scenario: Scenario, profile: Path | None = None) -> Serving:
    """The requests and engines of one scenario, as `ServingReader` reads them."""
    return ServingReader(profile)(scenario)


class ServingReader:
    """Reads scenarios one after another; what several have in common is read and priced once.

    Steps are those of each deployment, or those of a kernel `profile`.
    """

    def __init__(self, profile: Path | None = None) -> None:
        self._profile = profile
        self._kernels, self._recorded, self._loads = cache(read_kernels), cache(read_requests), cache(read_topics)
        self._deployed: dict[str, Deployed] = {}
        self._tables: dict[tuple, StepTable] = {}

    def __call__(self, scenario: Scenario) -> Serving:
        """The requests and engines that a scenario describes.

        Raises `OptionError` for a scenario without them, and `InputError` for requests that cannot be served.
        """
        asked = scenario.serving
        if asked is None:
            raise OptionError(
                "the scenario has no serving, so there are no requests. Write for example serving: {arrivals: {kind: "
                "random, rate_per_s: 4}}, or --set 'serving={arrivals: {kind: random, rate_per_s: 4}}'"
            )
        if drafted_of(stated_deployment(scenario)):
            raise OptionError(
                "deployment.speculative drafts tokens, which jaxmoe serve does not do; set its tokens to 0, or take "
                "jaxmoe evaluate --phase decode"
            )
        key = scenario.model_copy(update={"serving": None, "name": ""}).model_dump_json()
        if in_engine(scenario):
            return self._on_machine(scenario, asked, key)
        if asked.buffering is not None:
            check_buffering(scenario)
        own = _kept(self._deployed, key, lambda: deployed(scenario, self._kernels))
        requests, fleet = self._asked(asked, own)
        # vLLM pads small steps to the sizes of its CUDA graphs.
        padding = Padding(graph_sizes(fleet.engine.seats)) if own.deployment.backend == "vllm" else Padding()
        table = _kept(self._tables, (key, padding), lambda: self._table(own, padding))
        return Serving(
            requests,
            fleet,
            table,
            _limits(asked),
            fleet.all_engines * own.deployment.devices,
            None
            if asked.topics is None
            else self._rebalancing(scenario.hardware, asked.topics, asked.rebalance, own, table, padding),
        )

    def _on_machine(self, scenario: Scenario, asked: ServingConfig, key: str) -> Serving:
        """Requests and engines on a machine that the engine times."""
        _check_on_machine(scenario, asked, self._profile)
        own = _kept(self._deployed, key, lambda: deployed_on_machine(scenario))
        requests, fleet = self._asked(asked, own)
        sizes, by_experts = grid_of(fleet.engine.token_budget + fleet.engine.seats), asked.buffering is not None
        called = (key, len(sizes), by_experts)
        table = _kept(self._tables, called, lambda: machine_table(scenario, own, sizes, by_experts))
        gpus = fleet.all_engines * own.deployment.devices
        waits = asked.buffering
        buffering = None if waits is None else buffering_of(scenario, waits, len(requests), asked.seed)
        return Serving(requests, fleet, table, _limits(asked), gpus, buffering=buffering)

    def _asked(self, asked: ServingConfig, own: Deployed[AbstractStep]) -> tuple[Requests, Fleet]:
        """Requests, and engines that can serve them. Raises `InputError`."""
        requests, fleet = self._requests(asked, own), _fleet(asked, own)
        assert fleet.engine.kv_blocks is not None
        kept = fleet.engine.kv_blocks * fleet.engine.block_tokens + 1  # the last token's keys and values are not needed
        check_lengths(requests, kept, "serving.engine.cache_tokens, for which memory has to be there")
        fleet.check(requests)
        return requests, fleet

    def _requests(self, asked: ServingConfig, own: Deployed[AbstractStep]) -> Requests:
        arrivals = asked.arrivals
        if isinstance(arrivals, FileArrivals):
            requests = self._recorded(Path(arrivals.path), arrivals.requests)
            if asked.lengths is not None:
                prompt, output = _lengths(asked, own).draw(len(requests), np.random.default_rng([asked.seed, 1]))
                requests = replace(requests, prompt=prompt, output=output)
            if arrivals.rate_per_s is not None:
                requests = at_rate(requests, arrivals.rate_per_s)
        else:
            rate, variation = (
                (arrivals.rate_per_s, arrivals.variation) if isinstance(arrivals, RandomArrivals) else (1.0, 0.0)
            )
            prefixes = None if asked.prefixes is None else Prefixes(**dict(asked.prefixes))
            requests = drawn(rate, variation, arrivals.requests, _lengths(asked, own), asked.seed, prefixes)
        if isinstance(arrivals, UserArrivals):
            requests = replace(requests, arrival=np.zeros(len(requests)))
        if asked.topics is not None:
            shares = topic_shares(asked.topics, own.step.model, self._loads)
            requests = with_topics(requests, asked.topics, len(shares), asked.seed)
        if asked.context_tokens is not None:
            check_lengths(requests, asked.context_tokens, "serving.context_tokens")
        return requests

    def _rebalancing(
        self,
        hardware: HardwareConfig,
        topics: TopicsConfig,
        asked: RebalanceConfig | None,
        own: Deployed[ModelStep],
        table: StepTable,
        padding: Padding,
    ) -> Rebalancing:
        if self._profile is not None:
            raise OptionError(
                "--profile is given, but serving.topics needs experts of any loads, and a profile has them with even "
                "ones; leave out one of the two"
            )
        model, ranks = own.step.model, own.deployment.expert_ranks

        def steps(loads: Shares, held: Slots, window: int) -> StepTable:
            return with_gating(table, own.step, loads_of_layers(loads, held, model.top_k, ranks, window), padding)

        shares = topic_shares(topics, model, self._loads)
        return rebalancing_of(hardware, asked, own, shares, topics.window_s, steps)

    def _table(self, own: Deployed[ModelStep], padding: Padding) -> StepTable:
        if self._profile is None:
            return step_table(own.step, padding)
        kernels, devices = own.step.kernels, own.deployment.devices
        return profile_table(
            read_profile(self._profile, own.deployment.tensor),
            own.step.model,
            own.deployment,
            lambda operation, sizes: np.asarray(kernels.collective(operation, sizes, devices), float),
            padding,
        )


def _kept(known: dict[Any, Made], key: object, make: Callable[[], Made]) -> Made:
    """The value of a key, made where it is not known; the oldest goes."""
    if key not in known:
        if len(known) >= KEPT:
            del known[next(iter(known))]
        known[key] = make()
    return known[key]


def _limits(asked: ServingConfig) -> Limits:
    limits = asked.limits
    return Limits(limits.first_token_s or np.inf, (limits.per_token_ms or np.inf) / 1e3, limits.part)


def _check_on_machine(scenario: Scenario, asked: ServingConfig, profile: Path | None) -> None:
    """Raise `OptionError` for what needs kernels of GPUs, and for buffering that its system has no use for."""
    kernels = {"--profile": profile, "serving.topics": asked.topics, "serving.decode": asked.decode}
    given = [name for name, value in kernels.items() if value is not None]
    if given:
        raise OptionError(
            f"{given[0]} is given, but {scenario.hardware.name} is timed by the engine; expected a machine with "
            "measured kernels, such as h200_sxm_8. Leave it out, or take one"
        )
    if asked.buffering is not None:
        check_buffering(scenario)


def _lengths(asked: ServingConfig, own: Deployed[AbstractStep]) -> Lengths:
    if asked.lengths is None:
        return Lengths(float(own.users.prompt), float(own.users.output))
    given = asked.lengths
    return Lengths(given.prompt_tokens, given.output_tokens, given.prompt_variation, given.output_variation)


def _fleet(asked: ServingConfig, own: Deployed[AbstractStep]) -> Fleet:
    engine, decode = _engine(asked.engine, own), asked.decode
    pool = None
    if decode is not None:
        pool = DecodePool(
            engine,
            kv_bytes_per_token=cache_bytes(own.step.model, own.deployment, 1),
            bytes_per_s=decode.bandwidth_GB_per_s * GIGA,
            latency_s=decode.latency_us * MICRO,
            engines=decode.engines,
            router=decode.router,
        )
    users = asked.arrivals.users if isinstance(asked.arrivals, UserArrivals) else None
    return Fleet(engine, asked.engines, asked.router, users, pool)


def _engine(asked: EngineConfig, own: Deployed[AbstractStep]) -> Engine:
    backend, ranks = own.backend, own.deployment.data
    if asked.cache_tokens is None and not np.isfinite(own.memory.sequences):
        raise OptionError(
            "serving.engine.cache_tokens is not given, and the machine states no memory that would limit it; expected "
            "the tokens whose keys and values are kept. Write for example --set serving.engine.cache_tokens=65536"
        )
    seats = backend.seats if np.isfinite(backend.seats) else BACKENDS[own.deployment.backend].seats
    tokens = asked.cache_tokens or int(own.memory.sequences * (own.users.prompt + own.users.output / 2))
    return Engine(
        batching="vllm" if backend.mixes else "sglang",
        token_budget=asked.token_budget or int(backend.chunk_of_rank(ranks)),
        seats=asked.seats or int(seats),
        ranks=ranks,
        kv_blocks=max(tokens // asked.block_tokens, 1),
        block_tokens=asked.block_tokens,
        prefix_cache=asked.prefix_cache,
        lookahead=own.deployment.backend == "vllm",
    )
