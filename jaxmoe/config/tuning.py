"""Section `tuning` of a scenario: settings of the gradient tuner. Annealed values fall from `start` to `stop`."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from jaxmoe.config.base import Count, Fraction, Name, NonNegative, Positive, Section, Seed, check_known
from jaxmoe.errors import RuleError
from jaxmoe.tune.settings import DEFAULT_EXCHANGES, HYBRIDS, TunerSettings

DEFAULT = TunerSettings()


def _first(ends: tuple[float, float]) -> Any:
    return Field(default=ends[0], description="the value at the first step", examples=[ends[0]])


def _last(ends: tuple[float, float]) -> Any:
    return Field(default=ends[1], description="the value at the last step", examples=[ends[1]])


class Annealing(Section):
    """A value that falls by equal ratios while the descent proceeds: here the temperature of the transport plan."""

    start: Positive = _first(DEFAULT.sinkhorn_temperature)
    stop: Positive = _last(DEFAULT.sinkhorn_temperature)

    @model_validator(mode="after")
    def _falls(self) -> "Annealing":
        if self.stop > self.start:
            raise RuleError(("stop",), self.stop, f"at most start, {self.start:g}", "Lower stop or raise start")
        return self


class WidthAnnealing(Annealing):
    """Annealing of the width of the soft host indicator: falls by equal ratios while the descent proceeds."""

    start: Positive = _first(DEFAULT.support_width)
    stop: Positive = _last(DEFAULT.support_width)


class MaxAnnealing(Annealing):
    """Annealing of the temperature of the smooth maximum; low from the start, to stay close to the hard maximum."""

    start: Positive = _first(DEFAULT.max_temperature)
    stop: Positive = _last(DEFAULT.max_temperature)


def _known_or_hybrids(name: str) -> str:
    return name if name == HYBRIDS else check_known(name)


class TuningConfig(Section):
    """Gradient descent over relaxed placements, then rounding, then local improvement with the exact model."""

    restarts: Count = Field(
        default=DEFAULT.restarts, description="the number of descents from different starts", examples=[4]
    )
    steps: Count = Field(default=DEFAULT.steps, description="the number of steps of one descent", examples=[300])
    batches_per_step: Count = Field(
        default=DEFAULT.batches_per_step, description="the number of batches that one step sees", examples=[4]
    )
    learning_rate: Positive = Field(
        default=DEFAULT.learning_rate,
        description="the learning rate, relative to the temperature of the moment",
        examples=[0.05],
    )
    exchanges: Annotated[tuple[Annotated[str, AfterValidator(_known_or_hybrids)], ...], Field(strict=False)] = Field(
        default=DEFAULT_EXCHANGES,
        description="the exchanges that a plan may have beside costs.exchange as a list of names, with rings for the "
        "complete hybrids of every cut of the machine; the default trees are those that the network can have",
        examples=[["least_loaded", "rings"]],
    )
    p95_weight: NonNegative = Field(
        default=0.0, description="the weight of the 95th percentile over batches beside their mean", examples=[0.5]
    )
    topics: Annotated[tuple[Name, ...], Field(strict=False)] = Field(
        default=(),
        description="the trace files of several topics that a plan is tuned over at once, in place of workload.trace, "
        "as a list; their plans are evaluated on each as well",
        examples=[["traces/coding.npz", "traces/math.npz"]],
    )
    worst_weight: Fraction = Field(
        default=0.0, description="the weight of the worst topic beside the mean over topics", examples=[1]
    )
    sinkhorn_temperature: Annealing = Field(
        default=Annealing(),
        description="the temperature of the transport plan as {start: .., stop: ..}",
    )
    support_width: WidthAnnealing = Field(
        default=WidthAnnealing(),
        description="the width of the soft host indicator as {start: .., stop: ..}",
    )
    max_temperature: MaxAnnealing = Field(
        default=MaxAnnealing(),
        description="the temperature of the smooth maximum as {start: .., stop: ..}",
    )
    budget_spread: float = Field(
        default=DEFAULT.budget_spread,
        ge=0,
        lt=1,
        description="how far the work of a node may be from the mean, as a fraction of it",
        examples=[0.1],
    )
    refine_steps: int = Field(
        default=DEFAULT.refine_steps,
        ge=0,
        description="the number of moves of local improvement; 0 leaves it out",
        examples=[3000],
    )
    refine_chains: Count = Field(
        default=DEFAULT.refine_chains, description="the number of searches of local improvement", examples=[4]
    )
    refine_batches: Count = Field(
        default=DEFAULT.refine_batches, description="the number of batches that a move is evaluated on", examples=[32]
    )
    seed: Seed = Field(default=DEFAULT.seed, description="the seed of starts, batches and moves", examples=[0])
    time_limit_s: Positive | None = Field(
        default=DEFAULT.time_limit_s,
        description="the seconds after which the best plan so far is taken, or null for no limit",
        examples=[600],
    )

    @model_validator(mode="after")
    def _topics_make_sense(self) -> "TuningConfig":
        if len(set(self.topics)) < len(self.topics):
            raise RuleError(("topics",), list(self.topics), "every file once", "Remove what is there twice")
        if self.worst_weight > 0 and len(self.topics) < 2:
            told = "0 where tuning.topics has no two files"
            raise RuleError(("worst_weight",), self.worst_weight, told, "Name the topics, or remove worst_weight")
        return self
