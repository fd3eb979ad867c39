"""A scenario's requests over time and the engines that serve them; the answers that a run of them gives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.config import Scenario
from jaxmoe.config.serving import EngineConfig, FileArrivals, RandomArrivals, ServingConfig, UserArrivals
from jaxmoe.errors import InputError
from jaxmoe.experiment.deployment import Deployed, deployed
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.serving.memory import cache_bytes
from jaxmoe.serving.online.arrivals import Lengths, Prefixes, at_rate, check_lengths, drawn, mean_rate
from jaxmoe.serving.online.capacity import Forbids, drained_rate, highest_rate, what_forbids
from jaxmoe.serving.online.engine import DecodePool, Engine, Fleet
from jaxmoe.serving.online.from_profile import profile_table
from jaxmoe.serving.online.from_step import step_table
from jaxmoe.serving.online.metrics import Limits, distribution, span_of, waits_of
from jaxmoe.serving.online.padding import Padding, graph_sizes
from jaxmoe.serving.online.profile import read_profile
from jaxmoe.serving.online.recorded import read_requests
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable
from jaxmoe.serving.step import ModelStep
from jaxmoe.units import GIGA, MICRO


@dataclass(frozen=True, eq=False)
class Serving:
    """Requests, the engines that serve them, seconds of their steps, and the limits that users set."""

    requests: Requests
    fleet: Fleet
    table: StepTable
    limits: Limits

    def at(self, rate: float | None = None, token_times: bool = False, steps: bool = False) -> tuple[Requests, Served]:
        """The requests, at another rate where one is given, and what becomes of them."""
        requests = self.requests if rate is None else at_rate(self.requests, rate)
        return requests, serve(requests, self.fleet, self.table, self.table, token_times=token_times, steps=steps)

    @property
    def identity(self) -> str:
        """A hash of all that decides how a run comes out at each rate."""
        asked, terms = self.requests, self.table.terms
        arrays = [asked.arrival, asked.prompt, asked.output, asked.prefix_starts, asked.prefix_blocks]
        arrays += [array for term in terms for array in (*term.grids, term.values)]
        found = sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))
        names = [(term.name, term.features, term.scope, term.weight) for term in terms]
        found.update(repr((asked.prefix_tokens, self.fleet, self.limits, names)).encode())
        return found.hexdigest()[:16]

    def meets(self, rate: float) -> bool:
        """Whether the requests drain at a rate, and the part of them that is asked keeps its limits."""
        requests, served = self.at(rate)
        within = waits_of(requests, served).within(self.limits)
        return bool(within.mean() >= self.limits.part) and drained_rate(served) is None

    def highest_rate(self, tolerance: float, check: Callable[[], None]) -> float | None:
        """The highest rate that meets the limits, 1/s; None for users of a closed loop, and where all come at once.

        `check` is called before each rate that is tried.
        """
        start = mean_rate(self.requests)
        if self.fleet.users is not None or not np.isfinite(start):
            return None

        def meets(rate: float) -> bool:
            check()
            return self.meets(rate)

        return highest_rate(meets, start, tolerance)

    def forbids(self, rate: float) -> Forbids:
        """Why a rate is not served."""
        requests, served = self.at(rate, steps=True)
        return what_forbids(requests, served, self.fleet, self.limits)


def serving_of(scenario: Scenario, profile: Path | None = None) -> Serving:
    """The requests and engines that a scenario describes, with steps of its deployment, or those of a kernel `profile`.

    Raises `OptionError` for a scenario without them, and `InputError` for requests that cannot be served.
    """
    asked = scenario.serving
    if asked is None:
        raise OptionError(
            "the scenario has no serving, so there are no requests. Write for example serving: {arrivals: {kind: "
            "random, rate_per_s: 4}}, or --set 'serving={arrivals: {kind: random, rate_per_s: 4}}'"
        )
    own = deployed(scenario)
    requests = _requests(asked, own)
    fleet = _fleet(asked, own)
    assert fleet.engine.kv_blocks is not None
    kept = fleet.engine.kv_blocks * fleet.engine.block_tokens + 1  # the last token's keys and values are not needed
    check_lengths(requests, kept, "serving.engine.cache_tokens, for which memory has to be there")
    fleet.check(requests)
    limits = asked.limits
    return Serving(
        requests,
        fleet,
        _table(own, fleet.engine, profile),
        Limits(limits.first_token_s or np.inf, (limits.per_token_ms or np.inf) / 1e3, limits.part),
    )


def answers(serving: Serving, requests: Requests, served: Served) -> dict[str, Any]:
    """Waits of users, by mean and percentiles, and how much is served within their limits."""
    waits, span = waits_of(requests, served), span_of(requests, served)
    within, rate = waits.within(serving.limits), mean_rate(requests)
    return {
        "requests": len(requests),
        "span_s": span,
        "waits_s": {name: distribution(values) for name, values in waits._asdict().items()},
        "sent_per_s": rate if serving.fleet.users is None and np.isfinite(rate) else None,
        "requests_per_s": len(requests) / span,
        "output_tokens_per_s": float(requests.output.sum()) / span,
        "goodput_per_s": float(within.sum()) / span,
        "within_limits": float(within.mean()),
        "drains": drained_rate(served) is None,
        "prompt_tokens_from_cache": float(served.cached.sum() / requests.prompt.sum()),
        "preemptions": int(served.preemptions.sum()),
    }


def check_drains(serving: Serving, arrivals: RandomArrivals, served: Served) -> None:
    """Raise `InputError` where requests come at random faster than they can ever be served, with what could be."""
    most = drained_rate(served)
    if most is not None:
        raise InputError(
            f"serving.arrivals.rate_per_s is {arrivals.rate_per_s:g}; expected less than {most:.3g}, which is what "
            f"{serving.fleet.engines} engines drain while requests wait. Lower it, or raise serving.engines"
        )


def _requests(asked: ServingConfig, own: Deployed[ModelStep]) -> Requests:
    arrivals = asked.arrivals
    if isinstance(arrivals, FileArrivals):
        requests = read_requests(Path(arrivals.path), arrivals.requests)
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
    if asked.context_tokens is not None:
        check_lengths(requests, asked.context_tokens, "serving.context_tokens")
    return requests


def _table(own: Deployed[ModelStep], engine: Engine, profile: Path | None) -> StepTable:
    """Seconds of steps; vLLM pads small ones to the sizes of its CUDA graphs."""
    padding = Padding(graph_sizes(engine.seats)) if own.deployment.backend == "vllm" else Padding()
    if profile is None:
        return step_table(own.step, padding)
    kernels, devices = own.step.kernels, own.deployment.devices
    return profile_table(
        read_profile(profile, own.deployment.tensor),
        own.step.model,
        own.deployment,
        lambda operation, sizes: np.asarray(kernels.collective(operation, sizes, devices), float),
        padding,
    )


def _lengths(asked: ServingConfig, own: Deployed[ModelStep]) -> Lengths:
    if asked.lengths is None:
        return Lengths(float(own.users.prompt), float(own.users.output))
    given = asked.lengths
    return Lengths(given.prompt_tokens, given.output_tokens, given.prompt_variation, given.output_variation)


def _fleet(asked: ServingConfig, own: Deployed[ModelStep]) -> Fleet:
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


def _engine(asked: EngineConfig, own: Deployed[ModelStep]) -> Engine:
    backend, ranks = own.backend, own.deployment.data
    tokens = asked.cache_tokens or int(own.memory.sequences * (own.users.prompt + own.users.output / 2))
    return Engine(
        batching="vllm" if backend.mixes else "sglang",
        token_budget=asked.token_budget or int(backend.chunk_of_rank(ranks)),
        seats=asked.seats or int(backend.seats),
        ranks=ranks,
        kv_blocks=max(tokens // asked.block_tokens, 1),
        block_tokens=asked.block_tokens,
        prefix_cache=asked.prefix_cache,
        lookahead=own.deployment.backend == "vllm",
    )
