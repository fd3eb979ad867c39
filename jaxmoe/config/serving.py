"""Section `serving` of a scenario: who asks when, the engines that answer, and the limits that users set."""

# ruff: noqa: N815

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxmoe.config.base import Count, Fraction, Name, NonNegative, Portion, Positive, Rate, Section, Seed
from jaxmoe.errors import RuleError


class RandomArrivals(Section):
    """Requests that come at random."""

    kind: Literal["random"] = Field(default="random", description="the kind of arrivals", examples=["random"])
    rate_per_s: Positive = Field(description="the mean number of requests in a second", examples=[4])
    variation: NonNegative = Field(
        default=1.0,
        description="the standard deviation of the gaps between requests over their mean: 1 for a Poisson process, "
        "more for bursts, 0 for a clock",
        examples=[1],
    )
    requests: Count = Field(default=1000, description="the number of requests", examples=[1000])


class FileArrivals(Section):
    """Recorded requests. A relative path starts at the YAML file that holds it, with `--set` at the working folder."""

    kind: Literal["file"] = Field(description="the kind of arrivals", examples=["file"])
    path: Name = Field(
        description="the path of a .jsonl, .csv or .npz file with a row for each request", examples=["trace.jsonl"]
    )
    rate_per_s: Positive | None = Field(
        default=None, description="the mean rate that gaps are scaled to, or null for that of the file", examples=[4]
    )
    requests: Count | None = Field(
        default=None, description="the number of requests from the start of the file, or null for all", examples=[1000]
    )


class UserArrivals(Section):
    """Users who send their next request when the last is answered: a closed loop."""

    kind: Literal["users"] = Field(description="the kind of arrivals", examples=["users"])
    users: Count = Field(description="the number of users", examples=[64])
    requests: Count = Field(default=1000, description="the number of requests of all users", examples=[1000])


Arrivals = Annotated[RandomArrivals | FileArrivals | UserArrivals, Field(discriminator="kind")]


class LengthsConfig(Section):
    """Lognormal lengths of prompts and outputs."""

    prompt_tokens: Positive = Field(description="the mean number of tokens of a prompt", examples=[1024])
    output_tokens: Positive = Field(description="the mean number of tokens of an answer", examples=[256])
    prompt_variation: NonNegative = Field(
        default=1.0, description="the standard deviation of prompts over their mean", examples=[1]
    )
    output_variation: NonNegative = Field(
        default=1.0, description="the standard deviation of answers over their mean", examples=[1]
    )


class PrefixesConfig(Section):
    """Texts that prompts begin with, such as system prompts."""

    count: Count = Field(description="the number of different texts", examples=[64])
    tokens: Count = Field(description="the number of tokens of each, which come before prompt_tokens", examples=[2048])
    skew: NonNegative = Field(default=1.0, description="the Zipf exponent of their popularity, 0 for even")


class BufferingConfig(Section):
    """Requests that wait at a layer whose expert would be loaded for few tokens (expert_streaming_fse_dp)."""

    slack: Fraction = Field(
        default=0.2,
        description="the part of its forward passes that a request may wait, in all: once for 1 / slack of them, as a "
        "whole number; 0 for none. Steps take what the experts that their tokens choose take, in either case",
        examples=[0.1],
    )
    least_tokens: Count = Field(
        default=2, description="the tokens below which an expert makes requests wait, theta_min", examples=[2]
    )


class LimitsConfig(Section):
    """Limits within which a request counts as served well."""

    first_token_s: Positive | None = Field(
        default=2.0, description="the seconds from arrival to the first token, or null for any", examples=[2]
    )
    per_token_ms: Positive | None = Field(
        default=100.0,
        description="the mean milliseconds from token to token after that, or null for any",
        examples=[50],
    )
    part: Portion = Field(
        default=0.99,
        description="the part of requests that has to keep both for a rate to count as served",
        examples=[1],
    )


class EngineConfig(Section):
    """How an engine batches: of each of its data-parallel ranks."""

    token_budget: Count | None = Field(
        default=None, description="the tokens of a step at most, or null for the backend's default", examples=[8192]
    )
    seats: Count | None = Field(
        default=None, description="the requests that run at a time at most, or null for the backend's default"
    )
    cache_tokens: Count | None = Field(
        default=None, description="the tokens whose keys and values are kept, or null for what memory leaves"
    )
    block_tokens: Count = Field(default=16, description="the tokens of a block of keys and values", examples=[16])
    prefix_cache: bool = Field(
        default=True, description="whether keys and values of prompts are kept for others that begin alike"
    )


class TopicsConfig(Section):
    """Topics of requests, each with experts of its own, whose popularity drifts. Paths start as those of arrivals."""

    path: Name | None = Field(
        default=None,
        description="the path of an .npz file of load counts by group, each a topic, or null for made-up topics",
        examples=["load_mmlu_test.npz"],
    )
    count: Count = Field(default=16, description="the number of topics that are made up", examples=[16])
    gating_spread: NonNegative = Field(
        default=0.8,
        description="the standard deviation of the logarithm of an expert's popularity in a topic that is made up",
        examples=[0.8],
    )
    spread: NonNegative = Field(
        default=1.5, description="the standard deviation of the logarithm of a topic's popularity", examples=[1.5]
    )
    drift_s: Positive = Field(
        default=1200.0,
        description="the seconds in which the correlation of a topic's popularity falls to 1/e",
        examples=[1200],
    )
    window_s: Positive = Field(
        default=10.0, description="the seconds for which the loads of experts are taken as equal", examples=[10]
    )


class RebalanceConfig(Section):
    """What places experts anew while engines serve, and how often."""

    method: Literal["eplb", "eplb_renamed", "greedy", "topology_aware"] = Field(
        default="eplb",
        description="the rule: EPLB as published, EPLB whose packs go to the GPUs that hold most of them, or copies in "
        "the slots of redundant_experts alone, on the coldest GPUs or by moentwine's Algorithm 1",
    )
    every_s: Positive = Field(
        description="the seconds between two placements, a multiple of topics.window_s", examples=[60]
    )
    bandwidth_GB_per_s: Rate | None = Field(
        default=None,
        description="the rate at which a GPU sends and receives weights, or null for that of the slowest link, which "
        "it then has to itself: give its part where GPUs share an uplink",
        examples=[450],
    )


Router = Literal["round_robin", "least_loaded"]


class DecodePoolConfig(Section):
    """Engines of the same deployment that only decode, after the others have read the prompts."""

    engines: Count = Field(default=1, description="the number of engines", examples=[1])
    router: Router = Field(default="round_robin", description="which of them gets the next request")
    bandwidth_GB_per_s: Rate = Field(
        default=50.0, description="the rate at which each GPU sends keys and values of its own", examples=[50]
    )
    latency_us: NonNegative = Field(
        default=0.0, description="the microseconds that a transfer takes beside its bytes", examples=[30]
    )


class ServingConfig(Section):
    """Requests over time, and the engines of the scenario's deployment that serve them, each on GPUs of its own."""

    arrivals: Arrivals = Field(
        description="the arrivals as a mapping: {kind: random, rate_per_s: ..}, {kind: file, path: ..} or "
        "{kind: users, users: ..}",
        examples=[{"kind": "random", "rate_per_s": 4}],
    )
    lengths: LengthsConfig | None = Field(
        default=None,
        description="the lengths as a mapping, or null for those of a file of arrivals, and elsewhere the means of the "
        "deployment",
        examples=[{"prompt_tokens": 1024, "output_tokens": 256}],
    )
    prefixes: PrefixesConfig | None = Field(
        default=None,
        description="the texts that prompts begin with as a mapping, or null for none, or those that a file names",
        examples=[{"count": 64, "tokens": 2048}],
    )
    engines: Count = Field(default=1, description="the number of engines that requests are spread over", examples=[1])
    router: Router = Field(default="round_robin", description="which engine gets the next request")
    engine: EngineConfig = Field(default=EngineConfig(), description="how an engine batches, as a mapping")
    context_tokens: Count | None = Field(
        default=None,
        description="the tokens of a prompt and its answer that the model takes at most, or null for any that memory "
        "holds",
        examples=[32768],
    )
    decode: DecodePoolConfig | None = Field(
        default=None,
        description="the engines that only decode as a mapping, or null where each engine does all",
        examples=[{"engines": 1}],
    )
    topics: TopicsConfig | None = Field(
        default=None,
        description="the topics of requests as a mapping, or null where steps do not depend on them",
        examples=[{"drift_s": 1200}],
    )
    rebalance: RebalanceConfig | None = Field(
        default=None,
        description="what places experts anew as a mapping, or null where they stay",
        examples=[{"method": "eplb", "every_s": 60}],
    )
    buffering: BufferingConfig | None = Field(
        default=None,
        description="when requests wait for others at a layer as a mapping, under system expert_streaming, or null for "
        "steps that take what they take on average",
        examples=[{"slack": 0.1}],
    )
    limits: LimitsConfig = Field(default=LimitsConfig(), description="what users wait at most, as a mapping")
    seed: Seed = Field(default=0, description="the seed of arrivals, lengths and prefixes", examples=[0])

    @model_validator(mode="after")
    def _names_prefixes_once(self) -> "ServingConfig":
        if self.prefixes is not None and self.arrivals.kind == "file":
            expected = "null where arrivals are a file, whose own prefixes count"
            raise RuleError(("prefixes",), "a mapping", expected, "Leave out prefixes, or draw arrivals at random")
        return self

    @model_validator(mode="after")
    def _blocks_divide_prefixes(self) -> "ServingConfig":
        block = self.engine.block_tokens
        if self.prefixes is not None and self.engine.prefix_cache and self.prefixes.tokens % block:
            expected = f"a multiple of engine.block_tokens, {block}"
            remedy = f"Write {-(-self.prefixes.tokens // block) * block}"
            raise RuleError(("prefixes", "tokens"), self.prefixes.tokens, expected, remedy)
        return self

    @model_validator(mode="after")
    def _topics_come_over_time(self) -> "ServingConfig":
        if self.topics is not None and self.arrivals.kind == "users":
            expected = "null where users send when they are answered, at times that nobody knows before"
            raise RuleError(("topics",), "a mapping", expected, "Leave out topics, or take other arrivals")
        return self

    @model_validator(mode="after")
    def _rebalances_in_whole_windows(self) -> "ServingConfig":
        if self.rebalance is None:
            return self
        if self.topics is None:
            remedy = "Write topics: {drift_s: 1200}, or leave out rebalance"
            raise RuleError(("rebalance",), "a mapping", "null without topics, as loads then stay as they are", remedy)
        every, window = self.rebalance.every_s, self.topics.window_s
        if abs(every / window - round(every / window)) > 1e-9 or every < window:
            remedy = f"Write {max(round(every / window), 1) * window:g}"
            raise RuleError(("rebalance", "every_s"), every, f"a multiple of topics.window_s, {window:g}", remedy)
        return self
