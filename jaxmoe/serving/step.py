"""One forward pass of a whole model as it is deployed: stages of the engine, by kernels that were measured.

Prompts that are read (prefill) and sequences that get more tokens (decode) may share a step, as backends chunk prompts.
Weights are read once for both; each has an attention kernel of its own. Layers that are alike are one block of stages.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine import AbstractSchedule, Launch, LayerTime, Serial, Stage, TwoBatches, price_alike
from jaxmoe.engine.stage import Priced, Stages, chained
from jaxmoe.engine.times import EXPERTS
from jaxmoe.hardware.gpu.deepep_files import ExchangeFile
from jaxmoe.hardware.gpu.latent import LatentSizes
from jaxmoe.hardware.gpu.terms import Numbers
from jaxmoe.hardware.machine import Machine
from jaxmoe.models import GroupedQueryAttention, LatentAttention, MoEModel
from jaxmoe.relax import HardMax
from jaxmoe.serving.deployment import Deployment, check_deployment, is_one
from jaxmoe.serving.exchanges import HIDDEN_BYTES, StepExchange, exchange_of
from jaxmoe.serving.gating import ExpertLoadTable
from jaxmoe.serving.kernels import Given, Kernels

# Norms, rotary positions, quantisation and routing of a layer, which no table has: assumed, not fitted.
SMALL_KERNELS = 8
SMALL_SECONDS = 2e-6  # each, in a CUDA graph
SCHEDULES: Mapping[str, AbstractSchedule] = {
    "serial": Serial(),
    "two_batches": TwoBatches(),
    "shared_beside_dispatch": Serial(),  # of stages that have the same one before them
}
THERE, BACK, SHARED, ROUTED = "exchange there", "exchange back", "shared", "experts"
# What ends the names of stages of dense layers, and of passes of the layer that drafts tokens.
DENSE, DRAFT, FURTHER = " of dense layers", " of the draft", " of further drafts"
EXCHANGES = ("sum", THERE, BACK)
PARTS = (
    *("projections", "decode attention", "prefill attention", "exchange"),
    *("router", ROUTED, SHARED, "dense", "small", "head", "draft"),
)
Seconds = Float[Array, "..."]
Demands = dict[str, Launch]  # of one layer, by the stage, in their order


class StepLoad(NamedTuple):
    """Tokens and sequences of a step on each data-parallel rank, of any common shape.

    `decoding` sequences of `context` tokens get one token each; `prefilled` tokens of new prompts of `prompt` tokens
    are read. With speculative tokens, a decoding sequence has `queries` tokens of its own in a step.
    """

    decoding: Given
    context: Given
    prefilled: Given = 0.0
    prompt: Given = 1.0
    queries: Given = 1.0

    @property
    def tokens(self) -> Numbers:
        """Tokens that pass the layers."""
        return self.decoding * self.queries + self.prefilled

    @property
    def answered(self) -> Numbers:
        """Tokens that pass the head."""
        return self.decoding * self.queries + self.prefilled / self.prompt

    def part(self, count: int) -> "StepLoad":
        """One of so many equal micro-batches."""
        return self._replace(decoding=self.decoding / count, prefilled=self.prefilled / count)


class AbstractStep(abc.ABC):
    """A step of a whole model in a deployment, by the tokens and sequences that it has."""

    model: MoEModel
    deployment: Deployment

    @abc.abstractmethod
    def time(self, batch: StepLoad) -> LayerTime:
        """Time of a step from its stages; a leaf has the shape of the batch, then its own."""

    @property
    @abc.abstractmethod
    def notes(self) -> list[str]:
        """What stands in for what is not known, for people."""

    def seconds(self, batch: StepLoad) -> Seconds:
        """Seconds of a step."""
        return self.time(batch).total

    def parts(self, batch: StepLoad) -> dict[str, Seconds]:
        """Seconds of each part of a step, all layers together. What runs beside something else counts in full."""
        time = self.time(batch)
        return {name: time.stages[name] for name in time.order}


@dataclass(frozen=True, eq=False)
class ModelStep(AbstractStep):
    """A model in a deployment on GPUs whose kernels are known; `deepep` are its exchanges where it names them.

    Raises `DeploymentError` for one that cannot be, and `KernelFileError` for exchanges that are not known.
    """

    model: MoEModel
    deployment: Deployment
    kernels: Kernels
    gating: ExpertLoadTable
    deepep: ExchangeFile | None = None

    def __post_init__(self) -> None:
        check_deployment(self.model, self.deployment, self.kernels.sheet.domain)
        _ = self.exchange

    @property
    def exchange(self) -> StepExchange:
        """How tokens get to their experts and back."""
        return exchange_of(self.model, self.deployment, self.kernels, self.gating, self.deepep)

    @property
    def free(self) -> Kernels:
        """The kernels on the processors that no exchange has to itself."""
        return self.kernels.without(self.deployment.set_aside)

    @property
    def schedule(self) -> AbstractSchedule:
        """How its stages follow each other."""
        return SCHEDULES[self.deployment.overlap]

    @property
    def notes(self) -> list[str]:
        return sorted(self.kernels.notes)

    def parts(self, batch: StepLoad) -> dict[str, Seconds]:
        """Seconds of each of `PARTS`; latent attention has its projections inside, and a draft all of its layer."""
        found: dict[str, Seconds] = {"exchange": jnp.zeros(())}
        for name, seconds in self.time(batch).stages.items():
            part = "draft" if name.endswith((DRAFT, FURTHER)) else name.removesuffix(DENSE)
            part = "exchange" if part in EXCHANGES else part
            found[part] = found.get(part, 0.0) + seconds
        return {part: found[part] for part in PARTS if part in found}

    def time(self, batch: StepLoad) -> LayerTime:
        batch = StepLoad(*(jnp.asarray(number, jnp.float32) for number in batch))
        stages = self.lower(batch.part(self.schedule.micro_batches))
        return _priced(self.kernels.machine, self.schedule, stages, jnp.broadcast_shapes(*map(jnp.shape, batch)))

    def lower(self, batch: StepLoad) -> Stages:
        """Stages of a step, or of a micro-batch."""
        model, attention = self.model, self._attention(batch)
        stages: list[Stage | Priced] = []
        if model.num_dense_layers:
            stages += _block({**attention, **self._dense(batch)}, "dense", model.num_dense_layers, DENSE)
        if model.moe_layer_ids:
            stages += self._ordered(_block({**attention, **self._routed(batch)}, EXPERTS, len(model.moe_layer_ids)))
        stages += _block({"head": Launch(self._head(batch.answered))}, "head", 1)
        return (*(_where_any(stage, batch.tokens) for stage in stages), *self._drafts(batch))

    def _drafts(self, batch: StepLoad) -> Stages:
        """Passes of the layer that drafts tokens, each with the head for one token a sequence.

        The first reads all tokens of the step, for their keys and values; each further one reads what it drafted last.
        """
        many, last = self.deployment.drafted, batch._replace(prefilled=0.0, queries=1.0)
        first = self._draft(batch, DRAFT, 1) if many else ()
        return (*first, *(self._draft(last, FURTHER, many - 1) if many > 1 else ()))

    def _draft(self, batch: StepLoad, suffix: str, passes: int) -> Stages:
        layer = self._routed(batch) if self.model.moe_layer_ids else self._dense(batch)
        head = Launch(self._head(batch._replace(queries=1.0).answered))
        block = _block({**self._attention(batch), **layer, "head": head}, suffix.strip(), passes, suffix)
        return tuple(_where_any(stage, batch.tokens) for stage in self._ordered(block, suffix))

    def _ordered(self, stages: Stages, suffix: str = "") -> Stages:
        """Stages of a layer with routed experts, in the order of the deployment's overlap."""
        beside = self.deployment.overlap == "shared_beside_dispatch"
        return _beside(stages, SHARED + suffix, THERE + suffix) if beside else stages

    # Stages of one layer.

    def _attention(self, batch: StepLoad) -> Demands:
        match self.model.attention:
            case LatentAttention() as attention:
                found = self._latent(batch, attention)
            case GroupedQueryAttention() as attention:
                found = self._grouped(batch, attention)
            case _:
                raise AssertionError("checked when it was made")
        named = {name: Launch(seconds) for name, seconds in found.items()}
        return _given({**named, "small": Launch(self._small(batch.tokens)), "sum": self.exchange.added(batch.tokens)})

    def _routed(self, batch: StepLoad) -> Demands:
        tokens, model = batch.tokens, self.model
        router = self._product(tokens, model.num_experts, model.hidden_size, "bfloat16")
        shared = model.shared_experts
        return _given(
            {
                "router": Launch(router),
                THERE: self.exchange.there(tokens),
                SHARED: None if shared is None else Launch(self._ffn(tokens, shared.count * shared.size)),
                ROUTED: Launch(self._experts(tokens)),
                BACK: self.exchange.back(tokens),
            }
        )

    def _dense(self, batch: StepLoad) -> Demands:
        tokens, dense = batch.tokens, Launch(self._ffn(batch.tokens, self.model.dense_size or 0))
        if self.deployment.exchange != "collectives":  # each GPU has its tokens and all weights
            return {"dense": dense}
        return _given({THERE: self.exchange.there(tokens), "dense": dense, BACK: self.exchange.back(tokens)})

    def _grouped(self, batch: StepLoad, attention: GroupedQueryAttention) -> dict[str, Seconds]:
        cut, tokens = self.deployment.tensor, batch.tokens
        heads, kv_heads = attention.heads / cut, jnp.maximum(attention.kv_heads / cut, 1.0)
        size, hidden, precision = attention.head_size, self.model.hidden_size, self.deployment.products
        products = self._product(tokens, (heads + 2 * kv_heads) * size, hidden, precision)
        products += self._product(tokens, hidden, heads * size, precision)
        prompts, scale = _prompts(batch)
        decode, prefill = jnp.zeros(()), jnp.zeros(())
        for window, layers in attention.windows(self.model.num_layers):
            part = layers / self.model.num_layers
            shape = (kv_heads, size, window, self.deployment.cache)
            sequences = jnp.maximum(batch.decoding, 1.0)
            # Queries of a sequence share its keys, as heads do.
            decode += part * self.free.decode(sequences, batch.context, heads * batch.queries, *shape)
            prefill += part * scale * self.free.prefill(prompts, batch.prompt, heads, *shape)
        return {"projections": products} | _apart(batch, decode, prefill)

    def _latent(self, batch: StepLoad, attention: LatentAttention) -> dict[str, Seconds]:
        heads = attention.heads / self.deployment.tensor
        sizes = LatentSizes(
            self.model.hidden_size,
            attention.q_rank or 0,
            attention.kv_rank,
            attention.nope_size,
            attention.rope_size,
            attention.value_size,
        )
        how = (sizes, self.deployment.products, self.deployment.cache)
        prompts, scale = _prompts(batch)
        context = batch.context if attention.attends is None else jnp.minimum(batch.context, attention.attends)
        decode = self.free.latent_decode(jnp.maximum(batch.decoding, 1.0), context, heads, *how, batch.queries)
        prefill = scale * self.free.latent_prefill(prompts, batch.prompt, heads, *how)
        return _apart(batch, decode, prefill)

    def _experts(self, tokens: Numbers) -> Seconds:
        model, deployment = self.model, self.deployment
        loads = self.gating(tokens * deployment.data)
        inner = model.expert_size / deployment.expert_tensor
        slots = (model.num_experts + deployment.redundant) / deployment.expert_ranks
        sizes = (model.hidden_size, inner, slots, model.top_k)
        how = (deployment.experts, not is_one(deployment.expert_ranks), deployment.exchange)
        return self.free.experts(loads, *sizes, *how, quick=is_one(deployment.data))

    def _ffn(self, tokens: Numbers, size: int) -> Seconds:
        own, hidden, precision = size / self.deployment.tensor, self.model.hidden_size, self.deployment.products
        return self._product(tokens, 2 * own, hidden, precision) + self._product(tokens, hidden, own, precision)

    def _small(self, tokens: Numbers) -> Seconds:
        bytes_ = 2 * tokens * self.model.hidden_size * HIDDEN_BYTES
        return SMALL_KERNELS * (SMALL_SECONDS + bytes_ / self.free.sheet.bandwidth)

    def _head(self, tokens: Numbers) -> Seconds:
        vocabulary = (self.model.vocabulary_size or 0) / self.deployment.tensor
        return self._product(tokens, jnp.maximum(vocabulary, 1.0), self.model.hidden_size, "bfloat16")

    def _product(self, rows: Numbers, columns: Given, inner: Given, precision: str) -> Seconds:
        return self.free.product(jnp.maximum(rows, 1.0), columns, inner, precision)


def _given(demands: dict[str, Launch | None]) -> Demands:
    return {name: demand for name, demand in demands.items() if demand is not None}


def _block(demands: Demands, block: str, layers: int, suffix: str = "") -> Stages:
    """Stages of so many layers, one after another."""
    return chained(Stage(name + suffix, each, block=block, repeat=layers) for name, each in demands.items())


def _beside(stages: Stages, moved: str, other: str) -> Stages:
    """The stage `moved`, which follows the `other`, beside it; what followed waits for both."""
    start = next(stage.before for stage in stages if stage.name == other)

    def before(stage: Stage | Priced) -> tuple[str, ...]:
        if stage.name == moved:
            return start
        return (other, moved) if moved in stage.before else stage.before

    return tuple(replace(stage, before=before(stage)) for stage in stages)


def _where_any(stage: Stage | Priced, tokens: Numbers) -> Stage:
    """The stage, of no time where a step has no tokens."""
    assert isinstance(stage, Stage)
    assert isinstance(stage.demand, Launch)
    demand = replace(stage.demand, seconds=jnp.where(tokens > 0, stage.demand.seconds, 0.0))
    return replace(stage, demand=demand)


@eqx.filter_jit
def _priced(machine: Machine, schedule: AbstractSchedule, stages: Stages, shape: tuple[int, ...]) -> LayerTime:
    """Times of steps of a common shape."""
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, shape).ravel(), stages)
    times = jax.vmap(lambda row: price_alike(machine, schedule, row, HardMax()))(rows)
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), times)


def _apart(batch: StepLoad, decode: Seconds, prefill: Seconds) -> dict[str, Seconds]:
    """Attention of both kinds, none where a step has no sequences of its kind."""
    decode, prefill = jnp.where(batch.decoding > 0, decode, 0.0), jnp.where(batch.prefilled > 0, prefill, 0.0)
    return {"decode attention": decode, "prefill attention": prefill}


def _prompts(batch: StepLoad) -> tuple[Seconds, Seconds]:
    """Whole prompts of a step, and the part of one that is read where a step reads less."""
    whole = batch.prefilled / batch.prompt
    return jnp.maximum(whole, 1.0), jnp.minimum(whole, 1.0)
