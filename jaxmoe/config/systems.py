"""Which system runs a plan, and its settings: a section for each, told by its name."""

from typing import Annotated, Literal

from pydantic import Field

from jaxmoe.config.base import Count, Fraction, Name, NonNegative, Positive, Section


class PlannedSystem(Section):
    """What all systems start from."""

    plan: Name = Field(
        default="ep_balanced",
        description="the strategy that places the experts, or the path of a plan.npz",
        examples=["ep_balanced"],
    )


class StaticConfig(PlannedSystem):
    """The plan as it is, in every iteration."""

    name: Literal["static"] = Field(default="static", description="the name of the system", examples=["static"])


class HDMoEConfig(PlannedSystem):
    """Pre-broadcast of hd_moe IV-D on top of the plan."""

    name: Literal["hd_moe"] = Field(description="the name of the system", examples=["hd_moe"])
    forecast: Literal["moving_average", "static", "perfect", "cross_layer"] = Field(
        default="moving_average", description="what expert loads are forecast from", examples=["moving_average"]
    )
    rate: Fraction = Field(
        default=0.5, description="the weight of the latest iteration in the moving average", examples=[0.5]
    )
    prior: Positive = Field(
        default=10.0,
        description="the number of choices by the frequencies that every row of cross_layer starts with",
        examples=[10],
    )
    experts: Count = Field(
        default=2,
        description="the number of experts of a layer that are broadcast, with window: last the most",
        examples=[2],
    )
    window: Literal["fixed", "last"] = Field(
        default="fixed",
        description="whether as many are broadcast as `experts` says, or as fit the time of the layer before",
        examples=["last"],
    )
    broadcast: Literal["hidden", "charged"] = Field(
        default="hidden",
        description="whether the broadcast has the links to itself during the layer before, or the schedule charges it",
        examples=["charged"],
    )


class MoentwineConfig(PlannedSystem):
    """Token layouts and balancers of moentwine. The plan has to be of whole experts, unless a layout slices them."""

    name: Literal["moentwine"] = Field(description="the name of the system", examples=["moentwine"])
    plan: Name = Field(
        default="ep",
        description="the strategy that places the experts, or the path of a plan.npz",
        examples=["ep_balanced"],
    )
    layout: Literal["baseline", "er", "her", "esp", "baseline_esp"] = Field(
        default="er", description="where tokens live: how devices form groups and domains", examples=["her"]
    )
    tp: Count = Field(default=4, description="the number of devices that share the attention of a token", examples=[4])
    fetch: Literal["domain", "nearest"] = Field(
        default="domain", description="from which member of a group a device fetches its tokens", examples=["nearest"]
    )
    all_gather: bool | None = Field(
        default=None,
        description="whether all members of a group get its tokens after attention, or null for the layout's own way",
        examples=[False],
    )
    both_ways: bool = Field(default=True, description="whether rings go both ways round", examples=[False])
    closing: bool = Field(
        default=False, description="whether the sums of a token's holders are reduced at the end of a layer"
    )
    linear_speedup: Positive = Field(
        default=2.0,
        description="how many times as fast as the die's rate linear layers of attention are, 2 for INT8 beside FP16",
        examples=[1],
    )
    balancer: Literal["none", "eplb", "greedy", "topology_aware"] = Field(
        default="topology_aware", description="what places copies of experts anew", examples=["eplb"]
    )
    migration: Literal["invasive", "non_invasive"] = Field(
        default="non_invasive",
        description="whether inference waits for weights that move, or they take what links leave idle",
        examples=["invasive"],
    )
    alpha: NonNegative = Field(
        default=0.0,
        description="the expected (max - mean) / mean of loads, summed over layers, above which the balancer acts",
        examples=[20],
    )
    beta: NonNegative = Field(
        default=0.0, description="the iterations that it waits after it last acted", examples=[10]
    )
    shadow_slots: Count = Field(default=1, description="the number of slots for copies on every node", examples=[1])
    rate: Fraction = Field(
        default=0.1, description="the weight of the latest iteration in the forecast of loads", examples=[0.1]
    )
    weights_from: Literal["copy", "edge"] = Field(
        default="copy",
        description="whether weights come from the nearest copy, or from disks at the wafer's edge",
        examples=["edge"],
    )


class ExpertStreamingConfig(PlannedSystem):
    """Experts that stream through dies in micro-slices (expert_streaming_fse_dp); the plan is not used."""

    name: Literal["expert_streaming"] = Field(description="the name of the system", examples=["expert_streaming"])
    strategy: Literal["fse_naive", "fse", "fse_paired", "fse_rule5", "fse_buffered"] = Field(
        default="fse_paired", description="what streams how, A1 to A5 of VI-C", examples=["fse"]
    )
    micro_slices: Count = Field(
        default=8, description="the number of parts that the slice of every die is cut into", examples=[8]
    )
    control_ns: NonNegative = Field(
        default=200.0,
        description="what setting up each load, transfer and computation of a micro-slice takes in ns",
        examples=[200],
    )
    scheduling_ns: NonNegative = Field(
        default=500.0, description="what the scheduler takes before the first expert in ns", examples=[500]
    )
    buffer_MB: Positive | None = Field(  # noqa: N815
        default=None,
        description="the buffer of a die for micro-slices in MB, or null for the capacity of the nearest memory level",
        examples=[8],
    )
    redistribute: bool = Field(
        default=False, description="whether the tokens of an expert are spread evenly over the dies first"
    )
    loaded_by: Literal["all", "trajectory"] = Field(
        default="all",
        description="whether all dies load a part of every expert, or those alone that hold its tokens",
        examples=["trajectory"],
    )
    attention: bool = Field(default=True, description="whether attention by heads comes before the experts")
    slack: Fraction = Field(
        default=0.2,
        description="the part of its forward passes that a request may wait, of fse_buffered, 0 to 1",
        examples=[0.1],
    )
    least_tokens: NonNegative = Field(
        default=2.0,
        description="the tokens below which an expert makes requests wait, theta_min of fse_buffered",
        examples=[2],
    )


SystemConfig = Annotated[
    StaticConfig | HDMoEConfig | MoentwineConfig | ExpertStreamingConfig, Field(discriminator="name")
]
