"""A scenario as a user describes it: a model, its workload, the machine, and how they are costed and evaluated."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from jaxmoe.config.base import Count, ExchangeName, Fraction, Name, NonNegative, Positive, Section, Seed
from jaxmoe.config.composition import DIVIDING, check_network, check_together
from jaxmoe.config.deployment import DeploymentConfig
from jaxmoe.config.model import ModelConfig
from jaxmoe.config.networks import HardwareConfig, MeshConfig, WafersConfig
from jaxmoe.config.serving import ServingConfig
from jaxmoe.config.systems import SystemConfig
from jaxmoe.config.tuning import TuningConfig
from jaxmoe.errors import RuleError
from jaxmoe.hardware.cuts import square_cut
from jaxmoe.registry import STRATEGIES

LOGITS = "the scale of the logits that tokens get, 1 for the log-odds they were drawn with, or null for none"


class FileTrace(Section):
    """Recorded gating. A relative path starts at the YAML file that holds it, with `--set` at the working folder."""

    kind: Literal["file"] = Field(description="the kind of trace", examples=["file"])
    path: Name = Field(description="the path of a trace file", examples=["traces/coding.npz"])


class SyntheticTrace(Section):
    """Made-up gating."""

    kind: Literal["synthetic"] = Field(default="synthetic", description="the kind of trace", examples=["synthetic"])
    tokens: Count = Field(default=8192, description="the number of tokens", examples=[8192])
    skew: NonNegative = Field(
        default=0.5, description="the Zipf exponent of expert popularity, 0 for even", examples=[0.5]
    )
    coactivation: Fraction = Field(
        default=0.2, description="how strongly a token's experts go together, 0 to 1", examples=[0.2]
    )
    reuse: Fraction = Field(
        default=0.2, description="the chance that a token repeats a choice of the one before, 0 to 1", examples=[0.2]
    )
    seed: Seed = Field(default=0, description="the seed of the trace", examples=[0])


class ProcessTrace(Section):
    """Gating drawn from a process fitted by `jaxmoe trace fit`. Its path is relative as that of a recorded trace."""

    kind: Literal["process"] = Field(description="the kind of trace", examples=["process"])
    path: Name = Field(description="the path of a process.npz", examples=["fitted/process.npz"])
    tokens: Count = Field(default=8192, description="the number of tokens", examples=[8192])
    seed: Seed = Field(default=0, description="the seed of the trace", examples=[0])
    logits: Positive | None = Field(default=None, description=LOGITS, examples=[1.5])


class PresetTrace(Section):
    """Gating drawn from a preset, a process with the published figures of a model."""

    kind: Literal["preset"] = Field(description="the kind of trace", examples=["preset"])
    preset: Name = Field(description="the name of a preset of jaxmoe trace synth", examples=["deepseek-v3"])
    tokens: Count = Field(default=8192, description="the number of tokens", examples=[8192])
    seed: Seed = Field(default=0, description="the seed of the trace", examples=[0])
    logits: Positive | None = Field(default=None, description=LOGITS, examples=[1.5])


class WorkloadConfig(Section):
    """The tokens that a layer sees at once, and where their gating comes from."""

    name: Name = Field(default="unnamed", description="a name for tables", examples=["mt_bench_128"])
    trace: Annotated[FileTrace | SyntheticTrace | ProcessTrace | PresetTrace, Field(discriminator="kind")] = Field(
        default=SyntheticTrace(),
        description="the trace as a mapping: {kind: file, path: ..}, {kind: synthetic, ..}, "
        "{kind: process, path: ..} or {kind: preset, preset: ..}",
    )
    batch_tokens: Count = Field(default=128, description="the number of tokens in a batch", examples=[128])
    context_tokens: Count = Field(
        default=1024, description="the number of tokens before it that attention reads for a token", examples=[1024]
    )
    sampling: Literal["random", "consecutive"] = Field(
        default="random", description="how the tokens of a batch are picked from the trace", examples=["random"]
    )
    drop_repeats: bool = Field(
        default=False,
        description="whether tokens marked as re-runs of an earlier context are left out",
        examples=[True],
    )

    @model_validator(mode="after")
    def _batch_fits(self) -> "WorkloadConfig":
        if not isinstance(self.trace, FileTrace) and self.batch_tokens > self.trace.tokens:
            most = f"at most trace.tokens, {self.trace.tokens}"
            raise RuleError(("batch_tokens",), self.batch_tokens, most, "Lower batch_tokens or raise trace.tokens")
        return self


class DecidingConfig(Section):
    """Costs of exchanges and serving rules that have to know the batch, before dispatch."""

    ns_per_choice: NonNegative = Field(
        default=0.0, description="the nanoseconds that one choice takes, of tokens that choose in turn", examples=[20]
    )
    B_per_token: NonNegative = Field(
        default=0.0, description="the bytes that tell every other node what one token chose", examples=[16]
    )


class CostsConfig(Section):
    """Data widths, FLOP convention and exchange, which give the FLOPs and bytes of a token."""

    ffn_flops: Literal["2hi", "6hi"] = Field(
        default="6hi",
        description="the FLOPs per token and expert, 6hi for a gated FFN or 2hi as hd_moe counts them",
        examples=["6hi"],
    )
    bytes_per_element: Positive | None = Field(
        default=None,
        description="the bytes of one activation on a link, and of one element of a key or value, or null for those of "
        "model.bytes",
        examples=[2],
    )
    dispatch_bytes_per_element: Positive | None = Field(
        default=None,
        description="the bytes of one activation in dispatch, or null for bytes_per_element",
        examples=[1],
    )
    combine_bytes_per_element: Positive | None = Field(
        default=None,
        description="the bytes of one activation in combine, or null for bytes_per_element",
        examples=[2],
    )
    metadata_bytes_per_choice: NonNegative = Field(
        default=0.0,
        description="the bytes that dispatch carries beside the vector for every expert that the token chose, such as "
        "its number and gate probability",
        examples=[8],
    )
    weight_bytes_per_element: Positive | None = Field(
        default=None,
        description="the bytes of one weight in memory, of experts and all else, or null for those of model.bytes",
        examples=[2],
    )
    exchange: ExchangeName = Field(
        default="lowest_host",
        description="the name of the exchange that brings hidden vectors to their experts and back",
        examples=["least_loaded_tree"],
    )
    deciding: DecidingConfig | None = Field(
        default=None,
        description="the costs of rules that have to know the batch as a mapping, or null for none",
        examples=[{"ns_per_choice": 20, "B_per_token": 16}],
    )

    @model_validator(mode="before")
    @classmethod
    def _names_the_exchange(cls, value: object) -> object:
        if isinstance(value, dict) and "gather" in value:
            rule = value["gather"]
            raise RuleError(("gather",), rule, "the key exchange in place of gather", f"Write exchange: {rule}")
        return value


class StrategiesConfig(Section):
    """The strategies to compare with."""

    hybrid_regions: Count = Field(
        default=2,
        description="the number of equal groups of nodes that hybrid TP-EP divides the machine into: rectangles of a "
        "mesh, else successive nodes",
        examples=[2],
    )


class EvaluationConfig(Section):
    """The batches on which every plan is evaluated, the iterations of systems, and the layers that stand for all."""

    batches: Count = Field(default=64, description="the number of batches that a plan is evaluated on", examples=[64])
    iterations: Count = Field(
        default=100, description="the number of iterations that jaxmoe simulate runs a system over", examples=[100]
    )
    seed: Seed = Field(default=1, description="the seed that draws these batches", examples=[1])
    layers: Annotated[tuple[int, ...], Field(min_length=1, strict=False)] | None = Field(
        default=None,
        description="the layers that a run has unless --layers names others, as numbered in the model, or null for all",
        examples=[[0, 8, 16]],
    )


class ValidationConfig(Section):
    """The replay in the event simulator."""

    batches: Count = Field(
        default=2, description="the number of evaluation batches, or iterations of a system, to replay", examples=[2]
    )


def _schedule(name: str) -> str:
    from jaxmoe.engine.schedule import SCHEDULES, ScheduleError, schedule_of  # with JAX, only where one is named

    try:
        schedule_of(name)
    except ScheduleError:
        known = f"one of {', '.join(SCHEDULES)}, with a number for m"
        raise RuleError((), name, known, "Write one of them, for example pipelined(2)") from None
    return name


def _micro_batches(schedule: str) -> int:
    if schedule == "serial":
        return 1
    from jaxmoe.engine.schedule import schedule_of

    return schedule_of(schedule).micro_batches


class Scenario(Section):
    """Everything that one run needs."""

    name: Name = Field(default="unnamed", description="a name for tables", examples=["quickstart"])
    hardware: HardwareConfig = Field(
        description="the name of a file in hardware/, the path of a YAML file, or its content as a mapping"
    )
    model: ModelConfig = Field(
        description="the name of a file in models/, the path of a YAML file or of a Hugging Face config.json, or the "
        "content of such a YAML file as a mapping"
    )
    workload: WorkloadConfig = Field(
        description="the name of a file in workloads/, the path of a YAML file, or its content as a mapping; beside a "
        "deployment it may be left out"
    )
    costs: CostsConfig = Field(default=CostsConfig(), description="the costs of a token as a mapping")
    schedule: Annotated[str, AfterValidator(_schedule)] = Field(
        default="serial",
        description="how the stages of a layer follow each other: serial, overlap, pipelined(m) or idle_links",
        examples=["pipelined(2)"],
    )
    strategies: StrategiesConfig = Field(
        default=StrategiesConfig(), description="the strategies to compare as a mapping"
    )
    evaluation: EvaluationConfig = Field(
        default=EvaluationConfig(), description="the batches to evaluate on, as a mapping"
    )
    validation: ValidationConfig = Field(
        default=ValidationConfig(), description="the replay of the winner as a mapping"
    )
    system: SystemConfig = Field(
        default=SystemConfig.known["static"](name="static"),
        description="the system that runs the plan as a mapping: {name: static} or {name: hd_moe, ..}, or that of "
        f"{', '.join([*SystemConfig.known][2:-1])} or {[*SystemConfig.known][-1]}",
    )
    tuning: TuningConfig = Field(default=TuningConfig(), description="the settings of the tuner as a mapping")
    deployment: DeploymentConfig | None = Field(
        default=None,
        description="how the whole model is served on GPUs, as a mapping, or null for its layers alone",
        examples=[{"backend": "sglang", "tensor": 8}],
    )
    serving: ServingConfig | None = Field(
        default=None,
        description="the requests that jaxmoe serve runs through engines of the deployment, as a mapping, or null for "
        "none",
        examples=[{"arrivals": {"kind": "random", "rate_per_s": 4}}],
    )
    seed: Seed = Field(default=0, description="the default seed", examples=[0])

    @model_validator(mode="before")
    @classmethod
    def _deployments_have_their_own_gating(cls, value: object) -> object:
        """A deployment may be without a workload: kernels of GPUs see loads of experts, by `gating_spread`."""
        if isinstance(value, dict) and value.get("deployment") is not None and "workload" not in value:
            return value | {"workload": {}}
        return value

    @model_validator(mode="after")
    def _has_dies(self) -> "Scenario":
        if self.hardware.die is None:
            remedy = "Write for example die: {compute_TFLOPs_per_s: 5}; jaxmoe network alone needs none"
            raise RuleError(("hardware", "die"), None, "the compute and memory of a node as a mapping", remedy)
        return self

    @model_validator(mode="after")
    def _regions_divide_the_machine(self) -> "Scenario":
        hardware, regions = self.hardware, self.strategies.hybrid_regions
        if not divides(hardware, regions):
            legal = ", ".join(str(n) for n in range(1, hardware.num_nodes + 1) if divides(hardware, n))
            expected = f"a number of equal groups of the {hardware.num_nodes} nodes"
            if isinstance(hardware, MeshConfig | WafersConfig):
                expected = "a number of equal rectangles that cut the {}x{} mesh".format(*hardware.mesh_shape)
            raise RuleError(("strategies", "hybrid_regions"), regions, expected, f"Write one of {legal}")
        return self

    @model_validator(mode="after")
    def _micro_batches_have_tokens(self) -> "Scenario":
        tokens = self.workload.batch_tokens
        if _micro_batches(self.schedule) > tokens:
            most = f"at most as many micro-batches as workload.batch_tokens, {tokens}"
            raise RuleError(("schedule",), self.schedule, most, "Lower the number or raise workload.batch_tokens")
        return self

    @model_validator(mode="after")
    def _parts_go_together(self) -> "Scenario":
        check_network(self.system, self.hardware)
        plan = self.system.plan
        parts = plan in DIVIDING or (plan.startswith("regions_") and plan in STRATEGIES)
        whole = plan.startswith("hybrid") and self.strategies.hybrid_regions == self.hardware.num_nodes
        check_together(self.system, self.schedule, _micro_batches(self.schedule), parts and not whole)
        return self

    @model_validator(mode="after")
    def _has_the_layers(self) -> "Scenario":
        known, layers = self.model.moe_layer_ids.ids, self.evaluation.layers
        if layers is not None and not {*layers} <= {*known}:
            expected = f"layers with experts of {self.model.name}, {known[0]} to {known[-1]}"
            raise RuleError(("evaluation", "layers"), [*layers], expected, "Write some of these, or null for all")
        return self

    @model_validator(mode="after")
    def _replays_what_is_evaluated(self) -> "Scenario":
        replayed, evaluated = self.validation.batches, self.evaluation.batches
        if replayed > evaluated:
            most = f"at most evaluation.batches, {evaluated}"
            raise RuleError(("validation", "batches"), replayed, most, "Lower it or raise evaluation.batches")
        return self


def divides(hardware: HardwareConfig, count: int) -> bool:
    """Whether there are `count` equal groups: rectangles of a mesh, else successive nodes."""
    if not isinstance(hardware, MeshConfig | WafersConfig):
        return hardware.num_nodes % count == 0
    try:
        square_cut(hardware.mesh_shape, count)
    except ValueError:
        return False
    return True
