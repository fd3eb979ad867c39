"""Copies of remote experts in local HBM, and of local ones in the LLC, by what heat maps predict (wafer study, IV-D).

`CrossToken` is the global command processor's heat map: it sees the choices of every step and says which experts follow
which. The method `WaferPolicy` allocates the tasks of a layer, copies what a die reads from afar and is predicted to
need again, and keeps all layers' copies within one capacity for each die. `LLCPrefetch` is what Insight 2 says of the
faster level, which the paper leaves open (V-G).
"""

from dataclasses import replace
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine import AbstractLayer, AbstractMethod, Fetches, FetchLayer, LayerTime
from jaxmoe.hardware import Machine
from jaxmoe.methods.wafer_gpu.task_allocation import Allocation, AllocationTask
from jaxmoe.placement.placement import PlanError
from jaxmoe.traces import Batch

Prediction = Literal["none", "heatmap", "perfect"]
Eviction = Literal["least_popular", "least_recent", "keep"]


class Guidance(eqx.Module):
    """Expert counts and heat-map predictions that are known when the layers of a step are launched.

    Leaves are [layer, ...], of many steps [layer, step, ...]. `counts` are the requests of every expert. `following`
    are the `n` experts that most often come after each, -1 for none, and `popularity` is how often each was chosen so
    far. `next_counts` are the counts of the next step, for perfect foresight.
    """

    counts: Int[Array, "layer *step expert"]
    next_counts: Int[Array, "layer *step expert"]
    following: Int[Array, "layer *step expert n"]
    popularity: Float[Array, "layer *step expert"]
    forecast: Float[Array, "layer *step expert"] | None = None  # requests of the layer after, for the LLC


class CrossToken(eqx.Module):
    """The heat map of experts chosen by one token and by the next of the same request, updated as it goes (Fig. 10b).

    `start` holds the pairs seen before, such as in the prefill (Insight 1), or zeros.
    """

    start: Float[Array, "layer expert expert"]
    top: int = eqx.field(static=True, default=8)

    def init(self) -> Float[Array, "layer expert expert"]:
        return self.start

    def step(
        self,
        pairs: Float[Array, "layer expert expert"],
        last: Int[Array, "layer token k"],
        now: Int[Array, "layer token k"],
    ) -> tuple[Float[Array, "layer expert expert"], tuple[Int[Array, "layer expert n"], Float[Array, "layer expert"]]]:
        """The map with the pairs from `last` to `now`; after it the `top` of each row, -1 for what never followed, and
        each expert's popularity."""

        def layer(pairs: Array, last: Array, now: Array) -> Array:
            experts = pairs.shape[0]
            before, after = (jax.nn.one_hot(each, experts, dtype=pairs.dtype).sum(axis=-2) for each in (last, now))
            return pairs + before.T @ after

        pairs = jax.vmap(layer)(pairs, last, now)
        times, following = jax.lax.top_k(pairs, self.top)
        return pairs, (jnp.where(times > 0, following, -1), pairs.sum(axis=1))


@eqx.filter_jit
def guide(
    heatmap: CrossToken,
    experts: Int[Array, "layer step token k"],
    across: Float[Array, "pair expert expert2"] | None = None,
) -> Guidance:
    """Counts and predictions of each step, from the choices of the same requests in all steps; -1 is no choice.

    Predictions of the first step come from the map's `start` alone. The last step counts as its own next step.
    `across` counts the pairs of experts that a token chose in a layer and in the next, as seen before; forecasts are
    made of it.
    """
    in_turn = jnp.moveaxis(experts, 1, 0)
    num_experts = heatmap.start.shape[-1]

    def count(chosen: Int[Array, "token k"]) -> Int[Array, " expert"]:
        place = jnp.where(chosen < 0, num_experts, chosen).ravel()
        return jnp.zeros(num_experts, jnp.int32).at[place].add(1, mode="drop")

    counts = jax.lax.map(jax.vmap(count), in_turn)

    def step(pairs: Array, given: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        return heatmap.step(pairs, *given)

    before = jnp.concatenate([jnp.full_like(in_turn[:1], -1), in_turn[:-1]])
    _, (following, popularity) = jax.lax.scan(step, heatmap.init(), (before, in_turn))
    forecast = None
    if across is not None:
        rows = across / jnp.maximum(across.sum(axis=-1, keepdims=True), 1)
        forecast = jnp.einsum("sle,lef->slf", counts[:, :-1].astype(rows.dtype), rows)
        forecast = jnp.concatenate([forecast, jnp.zeros_like(counts[:, -1:], rows.dtype)], axis=1)
    known = Guidance(counts, jnp.concatenate([counts[1:], counts[-1:]]), following, popularity, forecast)
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), known)


class CachedCopies(eqx.Module):
    """Copies that dies hold beside their home experts; `used` is the step of the last read, `time` the last step, and
    `most` how many a die has held at most after a step."""

    held: Bool[Array, "layer expert die"]
    used: Int[Array, "layer expert die"]
    time: Int[Array, ""]
    most: Int[Array, " die"]


class LLCPrefetch(eqx.Module):
    """Experts of the next layer that a die reads from its own HBM into its LLC during this one (Insight 2).

    It reads in the time that the layer leaves its channel idle, so no layer waits for it: whole slices of the home
    experts that are expected to have most requests, as many as the LLC holds. `across` is what `guide` forecasts by.
    """

    layer: FetchLayer
    across: Float[Array, "pair expert expert2"] | None = None

    def __call__(
        self, fetches: Fetches, forecast: Float[Array, " expert"], home: Int[Array, " expert"]
    ) -> Float[Array, "expert die"]:
        """The part of each expert that a die's LLC has after a layer; its home is that of the next layer."""
        machine, costs, time = self.layer.machine, self.layer.costs, self.layer.time(fetches)
        llc, hbm = machine.memory[0], machine.memory[-1]
        idle = jnp.maximum(time.total - time.busy["fetch"][hbm.name], 0) * hbm.bandwidth / jnp.maximum(hbm.sharers, 1)
        held = jnp.inf if llc.capacity is None else (llc.capacity / jnp.maximum(llc.sharers, 1))[llc.channel]
        slices = jnp.floor(jnp.minimum(idle[hbm.channel], held) * costs.slices / costs.expert_bytes)
        own = home[:, None] == jnp.arange(machine.num_nodes)
        worth = jnp.where(own & (forecast[:, None] > 0), forecast[:, None], -1.0)
        rank = jnp.argsort(jnp.argsort(-worth, axis=0, stable=True), axis=0, stable=True)
        read = jnp.clip(slices - rank * costs.slices, 0, costs.slices) / costs.slices
        return jnp.where(worth > 0, read, 0)


class WaferPolicy(AbstractMethod):
    """Allocates requests to dies, and copies remote experts. `home` and `start`, the first copies, are the placement.

    Steps are batches, or the `Guidance` that the `heatmap` gives of them, worked out once for several policies.
    `capacity` is how many copies a die holds in all layers together; infinite is no limit. A full die makes room by
    `eviction`: the copy of the least popular expert goes, for a more popular one; or the least recently read; or with
    `keep` none. The paper does not say.
    """

    precision = "float64"  # in which Algorithm 1's costs are exact
    differentiable = False
    home: Int[Array, "layer expert"]
    capacity: Float[Array, " die"]
    allocation: Allocation
    start: Bool[Array, "layer expert die"] | None = None
    llc: LLCPrefetch | None = None
    heatmap: CrossToken | None = None
    prediction: Prediction = eqx.field(static=True, default="heatmap")
    eviction: Eviction = eqx.field(static=True, default="least_popular")

    @property
    def dies(self) -> int:
        return self.capacity.shape[0]

    def prepare(self, layer: AbstractLayer, steps: Batch | Guidance) -> tuple["WaferPolicy", Guidance]:
        if isinstance(steps, Guidance):
            return self, steps
        if self.heatmap is None:
            raise ValueError("the policy has no heat map, so it takes no batches; give it the Guidance of one")
        known = guide(self.heatmap, jnp.asarray(steps.experts), None if self.llc is None else self.llc.across)
        return replace(self, heatmap=None), known

    def init(self, machine: Machine) -> CachedCopies:
        """Returns the copies that exist before the first step."""
        shape = (*self.home.shape, self.dies)
        held = jnp.zeros(shape, bool) if self.start is None else self.start
        return CachedCopies(
            held, jnp.zeros(shape, jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros(self.dies, jnp.int32)
        )

    def step(
        self, machine: Machine, state: CachedCopies, tokens: Guidance, last: LayerTime
    ) -> tuple[CachedCopies, Fetches]:
        """Copies after one step, and the fetches of all its layers, one after the other."""
        time, popularity = state.time + 1, tokens.popularity

        def layer(
            carry: tuple[CachedCopies, Array | None], given: tuple[Array, Array, Array, Guidance]
        ) -> tuple[tuple[CachedCopies, Array | None], Fetches]:
            copies, hits = carry
            row, home, after, known = given
            local = copies.held[row] | (home[:, None] == jnp.arange(self.dies))
            task = AllocationTask(known.counts, home, local, hits)
            requests = self.allocation(task)
            computed = requests > 0
            copies = replace(copies, used=copies.used.at[row].set(jnp.where(computed, time, copies.used[row])))
            copied = jnp.zeros_like(local)
            if self.prediction != "none":
                wanted = computed & ~local & self._predicted(computed, task, known)
                copies, copied = self._admit(copies, row, wanted, popularity)
            dtype = self.capacity.dtype
            fetches = Fetches(requests.astype(dtype), home, local.astype(dtype), copied.astype(dtype), hits)
            if self.llc is not None and known.forecast is not None:
                hits = self.llc(fetches, known.forecast, after).astype(dtype)
            return (copies, hits), fetches

        none = None if self.llc is None else jnp.zeros((self.home.shape[1], self.dies), self.capacity.dtype)
        after = jnp.concatenate([self.home[1:], self.home[:1]])
        begin, rows = (replace(state, time=time), none), jnp.arange(len(self.home))
        (copies, _), fetches = jax.lax.scan(layer, begin, (rows, self.home, after, tokens))
        most = jnp.maximum(copies.most, copies.held.sum(axis=(0, 1), dtype=jnp.int32))
        return replace(copies, most=most), fetches

    def _predicted(
        self, computed: Bool[Array, "expert die"], task: AllocationTask, known: Guidance
    ) -> Bool[Array, "expert die"]:
        """Marks experts that each die is predicted to compute in the next step.

        They are the most frequent successors of all experts that it computes now; with `perfect` prediction, the
        experts that the next step's allocation gives it.
        """
        if self.prediction == "perfect":
            return self.allocation(task._replace(counts=known.next_counts, hits=None)) > 0
        experts = len(computed)
        after = jnp.where(known.following < 0, experts, known.following)
        follows = jnp.zeros((experts, experts), jnp.float32).at[jnp.arange(experts)[:, None], after].set(1, mode="drop")
        return follows.T @ computed.astype(jnp.float32) > 0

    def _admit(
        self,
        copies: CachedCopies,
        row: Int[Array, ""],
        wanted: Bool[Array, "expert die"],
        popularity: Float[Array, "layer expert"],
    ) -> tuple[CachedCopies, Bool[Array, "expert die"]]:
        """Admits wanted copies, the most popular first, while there is room or a less valuable copy to evict."""
        experts = len(wanted)
        index = jnp.arange(experts)
        worth = copies.used if self.eviction == "least_recent" else popularity[..., None]
        worth = jnp.broadcast_to(worth, copies.held.shape).astype(popularity.dtype)
        value = jnp.full(experts, copies.time, worth.dtype) if self.eviction == "least_recent" else popularity[row]

        def die(held: Array, worth: Array, wanted: Array, capacity: Array) -> tuple[Array, Array]:
            free = jnp.clip(capacity - held.sum(), 0, experts).astype(jnp.int32)
            order = jnp.lexsort((index, -popularity[row], ~wanted))
            least, victims = jax.lax.top_k(-jnp.where(held, worth, jnp.inf).ravel(), experts)
            better = value[order] > -least[jnp.maximum(index - free, 0)]
            admitted = wanted[order] & ((index < free) | (better & (self.eviction != "keep")))
            dropped = (admitted & (index >= free)).sum()
            flat = held.ravel().at[victims].min(index >= dropped)
            copied = jnp.zeros_like(wanted).at[order].set(admitted)
            return flat.reshape(held.shape).at[row].max(copied), copied

        held, copied = jax.vmap(die, (2, 2, 1, 0), (2, 1))(copies.held, worth, wanted, self.capacity)
        return replace(copies, held=held), copied


def copies_that_fit(
    capacity: Float[np.ndarray, " die"], home: Int[np.ndarray, "layer expert"], expert_bytes: float, layers: int
) -> Float[np.ndarray, " die"]:
    """How many copies a die has room for beside its home experts. `capacity` in B is of a model of so many `layers`;
    those given stand for all of them, and have their part of it.

    Raises `PlanError` for a die whose home experts do not fit.
    """
    part = len(home) / layers
    at_home = np.stack([(home == die).sum() for die in range(len(capacity))])
    room = capacity * part / expert_bytes - at_home
    for die in np.flatnonzero(room < 0)[:1]:
        raise PlanError(
            f"die {die} is home to {at_home[die] / part:.0f} experts of {expert_bytes / 1e6:.1f} MB, but has "
            f"{capacity[die] / 1e9:g} GB; spread the experts evenly or use dies with more memory"
        )
    return np.floor(room)
