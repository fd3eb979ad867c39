"""Which system runs a plan, and its settings: a section for each, told by its name."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jaxmoe.config.base import Count, Fraction, Name, NonNegative, Positive, Section


class PlannedSystem(Section):
    """What all systems start from."""

    keeps_requests: ClassVar[bool] = False  # whether successive batches are of the same requests, row by row
    uses_plan: ClassVar[bool] = True

    plan: Name = Field(
        default="ep_balanced",
        description="the strategy that places the experts, or the path of a plan.npz",
        examples=["ep_balanced"],
    )


class GateConfig(Section):
    """The cost-aware gate of camoe in front of another system: what a token's paths cost biases its choices."""

    lambda_cost: NonNegative = Field(
        default=0.2, description="how strongly costs bias the gate, 0 for not at all", examples=[0.2]
    )
    logits: Literal["recorded", "reconstructed"] = Field(
        default="recorded",
        description="whether the trace has logits, or they are reconstructed from gate weights",
        examples=["reconstructed"],
    )


class GatedPlan(PlannedSystem):
    """A system whose tokens go to experts at places, and so may have a gate that knows what the way costs."""

    gate: GateConfig | None = Field(
        default=None,
        description="the gate of camoe before it, or null for the model's own",
        examples=[{"lambda_cost": 0.2}],
    )


class StaticConfig(GatedPlan):
    """The plan as it is, in every iteration."""

    name: Literal["static"] = Field(default="static", description="the name of the system", examples=["static"])


class HDMoEConfig(GatedPlan):
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


class MoentwineConfig(GatedPlan):
    """Token layouts and balancers of moentwine. The plan has to be of whole experts, unless a layout slices them."""

    name: Literal["moentwine"] = Field(description="the name of the system", examples=["moentwine"])
    plan: Name = Field(
        default="ep",
        description="the strategy that places the experts, or the path of a plan.npz",
        examples=["ep_balanced"],
    )
    layout: Literal["baseline", "er", "her", "esp", "baseline_esp"] = Field(
        default="er",
        description="where tokens live: in blocks (baseline), entwined rings (er), rings of each wafer (her), or with "
        "experts in slices over domains (esp, baseline_esp)",
        examples=["her"],
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
    balancer: Literal["none", "eplb", "greedy", "topology_aware", "gradient"] = Field(
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


class CAMoEConfig(PlannedSystem):
    """The cost-aware gate of camoe on a plan of whole experts."""

    name: Literal["camoe"] = Field(description="the name of the system", examples=["camoe"])
    lambda_cost: NonNegative = Field(
        default=0.2, description="how strongly costs bias the gate, 0 for not at all", examples=[0.2]
    )
    own_node: Literal["counted", "left_out"] = Field(
        default="counted",
        description="whether a node's own experts, which cost nothing, are in the scores of costs, as in the paper",
        examples=["left_out"],
    )
    bias: Literal["rule", "gradient"] = Field(
        default="rule",
        description="whether the bias is the paper's, or by gradient descent with as much gate mass lost",
        examples=["gradient"],
    )
    copies: Literal["assignment", "node"] = Field(
        default="assignment",
        description="whether a vector is sent for every expert that a token chose, or once to every node",
        examples=["node"],
    )
    time_model: Literal["alpha_beta", "congestion"] = Field(
        default="alpha_beta",
        description="whether every pair of nodes is priced by itself, or links that they share",
        examples=["congestion"],
    )
    profile: Name | None = Field(
        default=None,
        description="the path of a profile.csv of jaxmoe network profile that the bias is made of, or null for the "
        "machine's own numbers",
        examples=["fitted/profile.csv"],
    )
    logits: Literal["recorded", "reconstructed"] = Field(
        default="recorded",
        description="whether the trace has logits, or they are reconstructed from gate weights",
        examples=["reconstructed"],
    )


class WaferGPUConfig(PlannedSystem):
    """Task allocation and copies of remote experts on a wafer of GPU dies. The plan says where weights stay."""

    keeps_requests: ClassVar[bool] = True

    name: Literal["wafer_gpu"] = Field(description="the name of the system", examples=["wafer_gpu"])
    plan: Name = Field(
        default="ep_random",
        description="the strategy that places the experts, or the path of a plan.npz",
        examples=["ep_balanced"],
    )
    allocation: Literal["base", "home", "allo", "gradient", "linear_program"] = Field(
        default="allo",
        description="who computes which requests: round-robin, the homes of experts, Algorithm 1, a gradient descent "
        "through the model, or the assignment LP, rounded",
        examples=["gradient"],
    )
    prediction: Literal["none", "heatmap", "perfect"] = Field(
        default="heatmap",
        description="what says which remote experts are copied into local HBM: nothing, the cross-token heat map, or "
        "the next step itself",
        examples=["none"],
    )
    top: Count = Field(default=32, description="the number of experts that each row of the heat map predicts")
    eviction: Literal["least_popular", "least_recent", "keep"] = Field(
        default="least_popular", description="which copy goes when a die is full", examples=["least_recent"]
    )
    unlimited: bool = Field(default=False, description="whether copies take no room", examples=[True])
    block: Count = Field(default=50, description="the number of requests that are allocated at once", examples=[50])
    split: Count | None = Field(
        default=None,
        description="the number of dies that round-robin divides every expert over, or null for blocks of requests",
        examples=[3],
    )
    llc_prefetch: bool = Field(
        default=False,
        description="whether dies read into their LLC, while HBM is idle, what the layer before lets expect",
        examples=[True],
    )
    bound: bool = Field(
        default=False, description="whether the assignment bound of every layer is found too", examples=[True]
    )
    spare: Annotated[int, Field(ge=0)] = Field(
        default=4, description="the number of candidate dies beyond one for each block of an expert", examples=[4]
    )
    popular_copies: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="the number of experts of a layer, the most popular so far, that every die has a copy of from the "
        "start, as far as they fit",
        examples=[2],
    )
    slices: Count = Field(default=2, description="the number of slices that an expert is read in", examples=[2])
    request_bytes: NonNegative = Field(
        default=16, description="the size of command and address of a remote request in B", examples=[16]
    )
    llc_hit_ns: NonNegative = Field(default=100, description="what a hit in the LLC takes in ns", examples=[100])
    llc_miss_ns: NonNegative = Field(default=110, description="what a miss in the LLC adds in ns", examples=[110])
    llc_write_ns: NonNegative = Field(default=30, description="what a write into the LLC takes in ns", examples=[30])
    host_link_GB_per_s: Positive | None = Field(  # noqa: N815
        default=None,
        description="the bandwidth of PCIe to a host that allocates in GB/s, or null where the wafer does",
        examples=[64],
    )
    host_fixed_us: NonNegative = Field(
        default=0, description="what the way to the host and back takes for each layer in us", examples=[15]
    )


class ExpertStreamingConfig(PlannedSystem):
    """Experts that stream through dies in micro-slices (expert_streaming_fse_dp). It takes no plan."""

    uses_plan: ClassVar[bool] = False

    name: Literal["expert_streaming"] = Field(description="the name of the system", examples=["expert_streaming"])
    plan: Literal["ep_balanced"] = Field(
        default="ep_balanced", description="no plan is used, since all dies load all experts; leave the key out"
    )
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
    ahead: bool = Field(
        default=True,
        description="whether micro-slices of the next experts are loaded as soon as there is room (rule 4), or not "
        "before those of the experts before are computed",
        examples=[False],
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
    spare_requests: NonNegative = Field(
        default=1.0,
        description="requests that take the places of those that wait, as a part of the batch; 0 leaves places empty",
        examples=[0],
    )
    arrive_together: bool = Field(
        default=False, description="whether all requests begin in one iteration, and so may wait in the same ones"
    )
    prefetch: Literal["none", "moving_average", "static", "perfect", "cross_layer"] = Field(
        default="none",
        description="what the order is forecast from in which experts are loaded before the gate decides, while "
        "attention leaves DDR idle",
        examples=["cross_layer"],
    )


SystemConfig = Annotated[
    StaticConfig | HDMoEConfig | MoentwineConfig | CAMoEConfig | WaferGPUConfig | ExpertStreamingConfig,
    Field(discriminator="name"),
]
