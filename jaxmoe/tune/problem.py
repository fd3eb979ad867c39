"""Problems that tuners solve: machine, tokens, exchanges, and copies of experts."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from jaxmoe.engine import AbstractServing, Layer, serving_of
from jaxmoe.engine.times import NODE
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.placement import PlanError
from jaxmoe.placement.copies import Copies
from jaxmoe.placement.exchange import ExchangeError, Rings
from jaxmoe.placement.regions import Regions, by_least_work, region_copies
from jaxmoe.placement.strategies import complete_hybrids
from jaxmoe.traces import Batch, GatingTrace, TraceError, expert_counts, load_counts, sample_batches, topic_batches
from jaxmoe.tune.objective import Objective
from jaxmoe.tune.results import Plan
from jaxmoe.tune.settings import DEFAULT_EXCHANGES, HYBRIDS, WITHOUT_MESH

ALIKE = 1e-4  # nodes whose rates differ by a smaller part are alike
SLOWEST = 1e-6  # part of the fastest node's work that any node has
BRIM = 1 + 1e-5  # shares are float32: a node filled to the brim may seem overfull by so much


@dataclass(frozen=True)
class PlacementProblem:
    """Place the experts of every layer of `trace` on the machine of `model`, and choose the exchange.

    Time of a layer is the mean over batches of `batch_tokens` tokens drawn from the trace, mixed with the
    95th percentile by `p95_weight`. Every batch mixes the trace's sequences anew, so that a plan does not hang on those
    that were recorded. A node's memory is divided evenly among the layers. Where `batches` are given,
    leaves [layer, batch, ...], these alone count, in place of the drawn ones.

    With `topics` batches are drawn from each of these in turn, in place of `trace`, and the mean over topics is mixed
    with the worst of them by `worst_weight`. Given batches come from as many topics in turn.

    With `regions` the machine is cut into so many along each side (or, as a single number, into successive nodes), each
    with a copy of every expert. Copies are then what is placed, on any nodes: they count as experts of their own. They
    serve the tokens that live in their region, and batches name them; or, `served_by` least work, each token as a whole
    goes to the region whose hosts have done least so far, and batches name experts. `jaxmoe.tune.regions` chooses.

    `exchanges` are the names that may be chosen beside the model's own, `rings` for all complete hybrids. Where only a
    mesh has the split trees of the default ones, other networks get `least_loaded_tree` and `random_host_tree`.
    """

    model: Layer
    trace: GatingTrace
    batch_tokens: int
    consecutive: bool = False
    p95_weight: float = 0.0
    topics: tuple[GatingTrace, ...] = ()
    worst_weight: float = 0.0
    logits: bool = False  # whether drawn batches have those of the router, for a gate that is biased
    batches: Batch | None = None
    exchanges: tuple[str, ...] = DEFAULT_EXCHANGES
    own_exchange: str | None = None  # the name of the model's own, where that is a ring
    regions: tuple[int, ...] = ()
    served_by: Literal["home", "least_work"] = "home"

    def __post_init__(self) -> None:
        check_topics(self.trace, self.topics)
        object.__setattr__(self, "exchanges", suited(self.exchanges, self.model.machine.topology))
        if self.regions and self.model.mode != "sharded":
            raise PlanError(
                f"regions are {self.regions} of a {self.model.mode} plan; tune a sharded one, or without copies"
            )
        room, needed = self.room.sum(), self.num_experts
        if room < needed * (1 - 1e-6):  # capacities are float32
            raise PlanError(
                f"the experts of a layer need {needed} times an expert's memory, all nodes together have room for "
                f"{room:.4g}; raise the memory capacity, use more nodes or fewer layers"
                + (", or have fewer copies" if self.regions else "")
            )
        check_exchanges(self.exchanges, self.model.machine.topology, needed)

    @property
    def num_nodes(self) -> int:
        return self.model.machine.num_nodes

    @cached_property
    def copies(self) -> Copies | None:
        """Copies as regions have them by default, with the rule by which they serve; `None` without regions."""
        if not self.regions:
            return None
        copies = region_copies(Regions(self.regions, "tp"), self.expert_frequency, self.model.machine.topology)
        return copies if self.served_by == "home" else by_least_work(copies)

    @cached_property
    def serving(self) -> AbstractServing | None:
        """The rule of any layer that decides at run time; `None` where batches name what is placed."""
        if self.copies is None or self.served_by == "home":
            return None
        return jax.tree.map(lambda leaf: leaf[0], serving_of(self.copies))

    @property
    def num_experts(self) -> int:
        """What is placed: experts, or copies of experts."""
        return self.trace.num_experts * math.prod(self.regions)

    def placed(self, share: Plan) -> np.ndarray | Copies:
        """A plan of this problem as a placement has it: its shares, or with regions its copies."""
        if self.copies is None:
            return share
        return replace(self.copies, share=np.asarray(share, np.float32))

    def served(self, batches: Batch) -> Batch:
        """Batches whose choices name experts, with copies in their place if these serve by home."""
        copies = self.copies
        if copies is None or self.serving is not None:
            return batches
        experts, draw = np.asarray(batches.experts), np.asarray(batches.draw)
        source = np.asarray(batches.sources(self.num_nodes))
        layers = [copies.served(row, experts[row], source[row], draw[row]) for row in range(len(experts))]
        return replace(batches, experts=jnp.asarray(np.stack(layers), jnp.int32))

    @cached_property
    def room(self) -> np.ndarray:
        """Experts of one layer that fit each node, float [node]; infinite without a memory limit.

        A replicated placement holds whole experts alone.
        """
        capacity = self.model.machine.capacity
        if capacity is None:
            return np.full(self.num_nodes, np.inf)
        room = np.asarray(capacity, float) / float(self.model.costs.expert_bytes) / len(self.trace.layer_ids)
        return room if self.model.mode == "sharded" else np.floor(room * (1 + 1e-6))

    @cached_property
    def pace(self) -> Float[np.ndarray, " node"]:
        """The part of all work that each node has if all are to be done at once; sums to 1.

        By compute and memory, as of a plan that shares every expert evenly by all nodes.
        """
        choices, nodes, model = self.batch_tokens * self.trace.top_k, self.num_nodes, self.model
        touched = float(np.minimum(choices * self.expert_frequency, 1).sum(axis=1).mean())
        each = jnp.ones(nodes)
        work = model.costs.work(each * (choices / nodes), each * (touched / nodes), each * self.batch_tokens)
        seconds = np.asarray(work.busy(model.machine)[NODE], np.float64)
        rate = seconds.min() / seconds  # a node that cannot compute takes for ever
        if rate.min() >= 1 - ALIKE:
            return np.full(nodes, 1 / nodes)
        pace = np.maximum(rate, SLOWEST)
        return pace / pace.sum()

    @property
    def uneven(self) -> bool:
        """Whether nodes are not alike in their pace."""
        return bool(np.ptp(self.pace) > 0)

    @property
    def aim(self) -> Objective:
        """Objective over the times of batches, with this problem's weights of the 95th percentile and worst topic."""
        return Objective(jnp.asarray(self.p95_weight), jnp.asarray(self.worst_weight), max(len(self.topics), 1))

    @cached_property
    def frequency(self) -> np.ndarray:
        """How much of a layer's work each expert, or copy, is, float [layer, expert]; rows sum to 1.

        Topics count alike. Experts that the trace never chose count as chosen a tenth of a time: they need a place too.
        """
        if self.copies is None:
            return self.expert_frequency
        of_copy = np.take_along_axis(self.expert_frequency, self.copies.copy_of, axis=1)
        return of_copy * self.copies.serving.mean_parts(self.copies.copy_of)

    @cached_property
    def expert_frequency(self) -> np.ndarray:
        """The same of experts, all their copies together, float [layer, expert]."""
        if self.batches is not None:
            return _parts(expert_counts(self.batches, self.trace.num_experts).sum(axis=1))
        traces = self.topics or (self.trace,)
        return np.mean([_parts(load_counts(each).counts[0]) for each in traces], axis=0)

    @cached_property
    def named(self) -> dict[str, AbstractExchange]:
        """The exchanges that may be chosen by name; the model's own comes first, if it is complete.

        No plan may profit from traffic that is left out.
        """
        topology, own = self.model.machine.topology, self.model.exchange
        made = {self.own_exchange or own.name: own} if own.complete else {}
        for name in self.exchanges:
            if name != HYBRIDS and name not in made:
                made[name] = build_exchange(name, topology)
        return made

    @cached_property
    def gathers(self) -> dict[str, AbstractExchange]:
        """Exchanges of `named` that suit any plan."""
        own = self.model.exchange
        any_plan = {name: each for name, each in self.named.items() if each is own or not each.groups}
        return any_plan or {"lowest_host": build_exchange("lowest_host", self.model.machine.topology)}

    @cached_property
    def hybrids(self) -> dict[str, Rings]:
        """Complete hybrids that may be chosen, by the name of their exchange."""
        named = {rings.name: rings for rings in complete_hybrids(self.model.machine.topology, self.num_experts)}
        return named if HYBRIDS in self.exchanges else {name: named[name] for name in self.exchanges if name in named}

    def under(self, exchange: AbstractExchange) -> "PlacementProblem":
        """Returns this problem with `exchange` as the model's own."""
        return replace(self, model=replace(self.model, exchange=exchange), own_exchange=None)

    def draw(self, batches: int, seed: int) -> Batch:
        """Draws so many batches, leaves [layer, batch, ...]; given `batches` are repeated in order."""
        return self.served(self._drawn(batches, seed))

    def _drawn(self, batches: int, seed: int) -> Batch:
        if self.batches is not None:
            order = np.arange(batches) % self.batches.weight.shape[1]
            if self.batches.experts.ndim == self.batches.weight.ndim:  # merged ones share their rows
                return replace(self.batches, weight=self.batches.weight[:, order])
            return jax.tree.map(lambda leaf: leaf[:, order], self.batches)
        if self.topics:
            return topic_batches(self.topics, self.batch_tokens, batches, seed, self.consecutive, self.logits, True)
        return sample_batches(
            self.trace, self.batch_tokens, batches, seed, self.consecutive, logits=self.logits, resampled=True
        )

    def merged(self, batches: Batch, exchange: AbstractExchange | None = None) -> Batch:
        """The batches with equal tokens merged, where placement and exchange treat equal tokens alike."""
        return self.model.merged(batches, self.num_experts, exchange) if self.serving is None else batches


def _parts(count: Shaped[np.ndarray, "layer expert"]) -> Float[np.ndarray, "layer expert"]:
    """Counts of experts as parts of all."""
    smoothed = np.maximum(count, 0.1)
    return smoothed / smoothed.sum(axis=1, keepdims=True)


def check_topics(trace: GatingTrace, topics: tuple[GatingTrace, ...]) -> None:
    """Raise `TraceError` for topics that are of another model than the trace."""
    for number, topic in enumerate(topics):
        for what in ("num_experts", "top_k"):
            ours, theirs = getattr(trace, what), getattr(topic, what)
            if ours != theirs:
                raise TraceError(f"topic {number} has {what} {theirs}, but the trace {ours}; use topics of one model")
        if topic.layer_ids.tolist() != trace.layer_ids.tolist():
            raise TraceError(
                f"topic {number} has the layers {topic.layer_ids.tolist()}, but the trace {trace.layer_ids.tolist()}; "
                "select the same layers of all"
            )


def check_exchanges(exchanges: tuple[str, ...], topology: AbstractTopology, experts: int) -> None:
    """Raise `ExchangeError` for one that is not known, does not suit the network, or that tuning may not choose."""
    for name in exchanges:
        if name == HYBRIDS:
            continue
        exchange, hybrids = (
            build_exchange(name, topology),
            {rings.name for rings in complete_hybrids(topology, experts)},
        )
        if exchange.groups > 1 and name not in hybrids:
            raise ExchangeError(
                f"tuning chooses among complete hybrids, and {name} is none with {topology.num_nodes} nodes and "
                f"{experts} experts; use {HYBRIDS} for all, or some of {', '.join(sorted(hybrids)) or 'none'}"
            )
        if not exchange.complete:
            raise ExchangeError(f"{name} leaves traffic out, from which no plan may profit; tune with another exchange")


def suited(exchanges: tuple[str, ...], topology: AbstractTopology) -> tuple[str, ...]:
    """The default exchanges as the network can have them; any others as they are."""
    if exchanges != DEFAULT_EXCHANGES or topology.crossed() is not None:
        return exchanges
    return tuple(dict.fromkeys(WITHOUT_MESH.get(name, name) for name in exchanges))
