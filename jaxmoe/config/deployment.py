"""A model as it is served on GPUs, as a user describes it: parallelism, precisions, requests."""

from typing import Annotated, Literal

from pydantic import Field

from jaxmoe.config.base import Count, Fraction, Positive, Section

Precision = Literal["bfloat16", "fp8", "fp8_block", "nvfp4", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"]


class SpeculativeConfig(Section):
    """Tokens that a layer more of the model (MTP) drafts, and how many of them a step that verifies them accepts."""

    tokens: Annotated[int, Field(ge=0)] = Field(
        default=1, description="the number of tokens that are drafted for each sequence in a step", examples=[1]
    )
    acceptance: Fraction = Field(
        description="the probability that a drafted token is right where those before it are", examples=[0.85]
    )


class DeploymentConfig(Section):
    """How a model is laid over the GPUs of the machine, and what its users ask."""

    backend: Literal["sglang", "vllm", "trtllm"] = Field(description="the engine that serves", examples=["sglang"])
    tensor: Count = Field(default=1, description="the number of GPUs that attention is cut over", examples=[8])
    data: Count = Field(default=1, description="the number of groups that share the requests", examples=[1])
    expert_ranks: Count = Field(
        default=1, description="the number of groups of GPUs that have different experts", examples=[8]
    )
    products: Precision | None = Field(
        default=None,
        description="the precision of all weights but the experts', or null for what model.bytes tells",
        examples=["fp8_block"],
    )
    experts: Precision | None = Field(
        default=None, description="the precision of experts, or null for what model.bytes tells", examples=["fp8_block"]
    )
    cache: Literal["bfloat16", "fp8"] | None = Field(
        default=None, description="the precision of keys and values, or null for what model.bytes tells"
    )
    overlap: Literal["serial", "two_batches", "shared_beside_dispatch"] = Field(
        default="serial",
        description="what runs beside what: nothing, one half's exchange beside the other's compute, or shared experts "
        "beside the way there",
        examples=["two_batches"],
    )
    exchange: Literal["collectives", "deepep_normal", "deepep_low_latency", "all_to_all", "engine"] = Field(
        default="collectives",
        description="how tokens get to their experts and back: DeepEP's and all_to_all need expert_ranks of all GPUs; "
        "all_to_all is TensorRT-LLM's between GPUs that NVLink joins; with engine all is timed by the machine's own "
        "links and dies, under system and costs.exchange, as on machines without measured kernels",
        examples=["collectives"],
    )
    processors: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="the number of a GPU's processors that an exchange takes while it runs, or null for 24 of "
        "all but deepep_low_latency, which has a hook and 0",
        examples=[24],
    )
    redundant_experts: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="the number of further copies of experts of a layer, made and placed by EPLB",
        examples=[32],
    )
    speculative: SpeculativeConfig | None = Field(
        default=None,
        description="tokens that are drafted, which costs a layer, or null for none",
        examples=[{"tokens": 1, "acceptance": 0.85}],
    )
    concurrency: Count = Field(default=64, description="the number of requests in flight", examples=[64])
    prompt_tokens: Count = Field(default=1024, description="the mean number of tokens of a prompt", examples=[1024])
    output_tokens: Count = Field(default=1024, description="the mean number of tokens of an answer", examples=[1024])
    gating_spread: Positive = Field(
        default=0.8, description="the standard deviation of the logarithm of an expert's popularity", examples=[0.8]
    )
    price_per_device_hour: Positive | None = Field(
        default=None,
        description="what one device costs an hour, in a currency of your choice, or null for that of hardware.die",
        examples=[2.5],
    )
