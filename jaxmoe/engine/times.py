"""The time of a layer: stages, what was busy, energy and total. One type for the model and the event simulator."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

STAGES = ("dispatch", "compute", "combine")  # stages of every layer whose tokens go to experts, in order
NODE = "node"  # a node's work as a whole: the longest of its compute and its memory levels
COMPUTE = "compute"
LATENCY = "latency"
NOT_MEMORY = {"link", "port", "pair", COMPUTE, LATENCY}  # kinds of resources; all others are names of memory levels
ATTENTION, EXPERTS, MOVEMENTS, HIDDEN = "attention", "experts", "movements", "hidden"  # blocks of stages


class Limit(NamedTuple):
    """The bottleneck of a stage: the resource that is busy longest, by kind and number, and its busy seconds.

    `kind` is `link`, `port`, `pair`, `compute`, the name of a memory level, or `latency` (with `number` -1).
    """

    kind: str
    number: int
    seconds: float


class LayerTime(eqx.Module):
    """Seconds. `vmap` adds leading axes to everything, such as layers and batches; arrays are of JAX or NumPy.

    `busy[stage][kind]` is how long every resource of a kind is busy in a stage: `link`, `port` and `pair` for the
    network, `compute` and each memory level by its name for nodes, and `node` for the longest of these. `delay[stage]`
    is latency on top of the busiest resource. `energy` is of what the machine states: `compute`, levels of memory,
    kinds of link, `idle`. `servers` are those of stages that a schedule lets overlap with other servers' stages.
    Made by `jaxmoe.engine.price` and `measured_time` alone.
    """

    stages: dict[str, Any]  # [*lead]
    busy: dict[str, dict[str, Any]]  # [*lead, resource]
    total: Any  # [*lead]
    energy: dict[str, Any] = eqx.field(default_factory=dict)  # J by resource, [*lead]
    delay: dict[str, Any] = eqx.field(default_factory=dict)  # [*lead]
    blocks: tuple[tuple[str, tuple[str, ...]], ...] = eqx.field(static=True, default=())
    servers: tuple[tuple[str, str], ...] = eqx.field(static=True, default=())

    @property
    def order(self) -> tuple[str, ...]:
        """Names of all stages in their order, movements last."""
        return tuple(name for _, names in self.blocks for name in names)

    @property
    def total_energy(self) -> Any:
        """J of all resources, [*lead]. Raises `ValueError` where the machine states no energy."""
        if not self.energy:
            raise ValueError("the machine states no energy; give it an Energy")
        return sum(self.energy.values())

    @property
    def dispatch(self) -> Any:
        return self.stages["dispatch"]

    @property
    def compute(self) -> Any:
        return self.stages["compute"]

    @property
    def combine(self) -> Any:
        return self.stages["combine"]

    @property
    def communication(self) -> Any:
        return self.dispatch + self.combine

    @property
    def node_time(self) -> Any:
        """Busy seconds of every node in the stages of experts."""
        names = dict(self.blocks)[EXPERTS]
        return sum(self.busy[name][NODE] for name in names if NODE in self.busy.get(name, {}))

    @property
    def dispatch_link_time(self) -> Any:
        return self.busy["dispatch"]["link"]

    @property
    def combine_link_time(self) -> Any:
        return self.busy["combine"]["link"]

    @property
    def link_time(self) -> Any:
        """Busy seconds of every link in dispatch and combine together."""
        return self.dispatch_link_time + self.combine_link_time

    @property
    def mean(self) -> Any:
        """Mean total over batches, the last leading axis."""
        return self.total.mean(axis=-1)

    @property
    def p95(self) -> Any:
        """95th percentile of the total over batches, the last leading axis."""
        return (np if isinstance(self.total, np.ndarray) else jnp).quantile(self.total, 0.95, axis=-1)

    def first_batches(self, count: int) -> "LayerTime":
        """Times [layer, batch] of the first batches; busy times that are means over batches stay as they are."""
        return self._map_times(lambda leaf: leaf[..., :count])

    def _map_times(self, change: Callable[[Any], Any]) -> "LayerTime":
        """Times with a change made to every leaf but the busy seconds, which as means have no axis of batches."""
        return eqx.tree_at(lambda t: t.busy, jax.tree.map(change, self.without_busy()), self.busy)

    @staticmethod
    def joined(parts: Sequence["LayerTime"]) -> "LayerTime":
        """Times [layer, batch] of equal parts of the batches as those of all; busy times are means over batches."""
        first, busy = parts[0], jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *(part.busy for part in parts))
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *(part.without_busy() for part in parts))
        return first if len(parts) == 1 else eqx.tree_at(lambda t: t.busy, joined, busy)

    def layer(self, row: int) -> "LayerTime":
        """Times of one layer, the first leading axis."""
        return jax.tree.map(lambda leaf: leaf[row], self)

    def mean_busy(self) -> "LayerTime":
        """Times whose busy seconds are means over the first leading axis, the batches of a layer."""
        return eqx.tree_at(lambda t: t.busy, self, jax.tree.map(lambda leaf: leaf.mean(axis=0), self.busy))

    def by_layer(self) -> "LayerTime":
        """Times of steps [step, layer] as those of batches are, [layer, batch]; busy seconds are means over steps."""
        return self.mean_busy()._map_times(lambda leaf: leaf.swapaxes(0, 1))

    def without_busy(self) -> "LayerTime":
        """Times without what keeps resources busy, which is large over many steps."""
        return eqx.tree_at(lambda t: t.busy, self, {})

    def as_numpy(self) -> "LayerTime":
        """All leaves as float64 NumPy arrays."""
        return jax.tree.map(lambda leaf: np.asarray(leaf, float), self)

    @property
    def longest_stage(self) -> str:
        """The stage that takes longest, as a mean over all leading axes; of equal ones the first.

        Movements that are hidden take no time. Where servers overlap, the stages of the one that is done first do not
        count: in each block they run beside those of the other.
        """
        named = [name for block, names in self.blocks if block != HIDDEN for name in self._waited_for(names)]
        return max(named or self.order or self.stages, key=self._mean_seconds)

    def _mean_seconds(self, stage: str) -> float:
        return float(np.mean(self.stages[stage]))

    def _waited_for(self, block: tuple[str, ...]) -> list[str]:
        """Stages of a block but for those that run beside longer ones of another server."""
        server, sums = dict(self.servers), dict[str, float]()
        for name in block:
            if name in server:
                sums[server[name]] = sums.get(server[name], 0.0) + self._mean_seconds(name)
        slowest = max(sums, key=lambda each: sums[each], default=None)
        return [name for name in block if server.get(name, slowest) == slowest]

    def limit(self, stage: str | None = None) -> Limit:
        """The resource that limits a stage, by default the longest stage, as a mean over all leading axes.

        Outside `jit`. Latency limits where it is more than the busiest resource.
        """
        stage = self.longest_stage if stage is None else stage
        found = Limit(LATENCY, -1, float(np.mean(self.delay.get(stage, 0.0))))
        for kind, seconds in self.busy.get(stage, {}).items():
            flat = np.asarray(seconds, float)
            if (kind == NODE and len(self.busy[stage]) > 1) or not flat.size:
                continue
            each = flat.reshape(-1, flat.shape[-1]).mean(axis=0)
            if each.max() >= found.seconds:
                found = Limit(kind, int(each.argmax()), float(each.max()))
        return found


def measured_time(
    stages: dict[str, Any],
    busy: dict[str, dict[str, Any]],
    total: Any | None = None,
    energy: dict[str, Any] | None = None,
) -> LayerTime:
    """The time of a layer as the event simulator measured it; the total is the sum of its stages unless given."""
    whole = sum(stages.values()) if total is None else total
    return LayerTime(stages, busy, whole, energy or {}, {}, ((EXPERTS, tuple(stages)),))
