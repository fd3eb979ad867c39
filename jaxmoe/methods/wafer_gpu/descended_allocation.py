"""Allocations of a layer's tasks by optimisation: a linear programme, its bound, and gradient descent.

`AssignmentProgram` relaxes Algorithm 1's task (wafer-scale study, IV-D5): requests may be split at will, and a die that
computes a part of an expert reads only that part. So its value bounds every allocation, and its solution, rounded, is
one. `GradientAllocation` descends on the model's own time, from homes and not from any plan. Both end with whole
requests, and are called as `methods.wafer_gpu.task_allocation` says.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import Array, Float, Int, Key, Shaped

from jaxmoe.engine import Fetches, FetchLayer
from jaxmoe.hardware import AbstractTopology, Machine
from jaxmoe.network.loads import link_loads
from jaxmoe.relax import SmoothMax, SoftSupport, geometric


class AllocationTask(NamedTuple):
    """A layer to allocate: requests of every expert, its home, and which dies have it in their own HBM."""

    counts: Int[np.ndarray, " expert"]
    home: Int[np.ndarray, " expert"]
    local: Float[np.ndarray, "expert die"]


class AssignmentProgram:
    """The assignment LP of layers on one machine (HiGHS); compared by identity, so that `jit` may hold it."""

    def __init__(self, layer: FetchLayer) -> None:
        """Reads the numbers of a layer on a concrete machine, not a traced one."""
        machine, costs, hbm = layer.machine, layer.costs, layer.machine.memory[-1]
        self.channels, self.channel = len(hbm.bandwidth), np.asarray(hbm.channel)
        self.read = float(costs.expert_bytes) / np.asarray(hbm.bandwidth, float)  # s of an expert, by channel
        self.request = float(costs.flops_per_request) / np.asarray(machine.die.flops, float)
        self.first = float(costs.miss + hbm.latency.min())
        self.dies, self.links = machine.num_nodes, machine.topology.num_links
        self.ways = _seconds_of_pairs(machine, float(costs.expert_bytes))

    def solve(
        self,
        counts: Int[np.ndarray, " expert"],
        home: Int[np.ndarray, " expert"],
        local: Shaped[np.ndarray, "expert die"],
    ) -> tuple[Float[np.ndarray, "expert die"], float]:
        """The parts of every expert's requests that dies compute, and seconds that no allocation can beat.

        The largest of the times of dies, HBM channels and links, and the latency of a local read. Copies that are
        written cost nothing here. Raises `ValueError` where the solver fails.
        """
        share = np.zeros((len(counts), self.dies))
        used = np.flatnonzero(counts)
        if not len(used):
            return share, 0.0
        experts, columns = len(used), np.arange(len(used) * self.dies)
        expert, die = np.divmod(columns, self.dies)
        source = np.where(np.asarray(local)[used][expert, die] > 0, die, np.asarray(home)[used][expert])
        channel = self.channel[source]
        ways = self.ways[source * self.dies + die].tocoo()
        busy = scipy.sparse.coo_array(
            (
                np.concatenate([np.asarray(counts)[used][expert] * self.request[die], self.read[channel], ways.data]),
                (
                    np.concatenate([die, self.dies + channel, self.dies + self.channels + ways.col]),
                    np.concatenate([columns, columns, ways.row]),
                ),
            ),
            shape=(self.dies + self.channels + self.links, len(columns)),
        )
        scale = 1e6  # the solver's tolerances are of numbers about 1
        last = scipy.sparse.coo_array(-np.ones((busy.shape[0], 1)))
        sums = scipy.sparse.coo_array((np.ones(len(columns)), (expert, columns)), shape=(experts, len(columns) + 1))
        found = scipy.optimize.linprog(
            np.append(np.zeros(len(columns)), 1.0),
            A_ub=scipy.sparse.hstack([busy * scale, last]),
            b_ub=np.zeros(busy.shape[0]),
            A_eq=sums,
            b_eq=np.ones(experts),
            bounds=(0, None),
            method="highs",
        )
        if found.status != 0:
            raise ValueError(f"the bound of the allocation was not found: {found.message}")
        share[used] = found.x[:-1].reshape(experts, self.dies)
        return share, float(found.fun) / scale + self.first


def allocation_bound(layer: FetchLayer, task: AllocationTask) -> float:
    """Seconds that no allocation of the layer can beat."""
    return AssignmentProgram(layer).solve(task.counts, task.home, task.local)[1]


def _seconds_of_pairs(machine: Machine, size: float) -> scipy.sparse.csr_array:
    """How long an expert keeps every link, for every pair of dies [source * dies + destination, link]."""
    pairs = machine.num_nodes**2
    one = np.eye(pairs, dtype=np.float32).reshape(pairs, machine.num_nodes, machine.num_nodes)
    seconds = _seconds_of_links(machine.topology, jnp.asarray(one, jnp.float32), jnp.float32(size))
    return scipy.sparse.csr_array(np.asarray(seconds, float))


@eqx.filter_jit
def _seconds_of_links(
    topology: AbstractTopology, traffic: Float[Array, "case node node2"], size: Float[Array, ""]
) -> Float[Array, "case link"]:
    loads = jax.lax.map(lambda each: link_loads(topology, each), traffic)
    return loads * (size / topology.link_rate)


class AllocationDescentSettings(NamedTuple):
    """Settings of `descend`: widths of support and temperatures of maxima fall geometrically over the steps."""

    steps: int = 400
    rate: float = 0.1
    width: tuple[float, float] = (0.5, 0.05)
    temperature: tuple[float, float] = (0.2, 0.01)
    home: float = 3.0  # logit of a die that has the expert, at first


@eqx.filter_jit
def descend(
    layer: FetchLayer,
    counts: Int[Array, " expert"],
    home: Int[Array, " expert"],
    local: Float[Array, "expert die"],
    key: Key[Array, ""],
    settings: AllocationDescentSettings,
) -> Float[Array, "expert die"]:
    """Relaxed requests [expert, die] by Adam on the layer's time, from homes and a little noise alone."""
    optimiser = optax.adam(settings.rate)
    logits = settings.home * local + 0.1 * jax.random.normal(key, local.shape, local.dtype)

    def requests(logits: Array) -> Array:
        return jax.nn.softmax(logits, axis=1) * counts[:, None]

    def loss(logits: Array, width: Array, temperature: Array) -> Array:
        asked = Fetches(requests(logits), home, local, jnp.zeros_like(local))
        time = layer.time(asked, reduction=SmoothMax(temperature), support=SoftSupport(width))
        return jnp.log(time.total)

    def step(state: tuple[Array, Any], annealed: tuple[Array, Array]) -> tuple[tuple[Array, Any], None]:
        logits, moments = state
        change, moments = optimiser.update(jax.grad(loss)(logits, *annealed), moments)
        return (optax.apply_updates(logits, change), moments), None

    progress = np.linspace(0, 1, settings.steps)
    width, temperature = (
        jnp.asarray(geometric(*ends, progress), local.dtype) for ends in (settings.width, settings.temperature)
    )
    (logits, _), _ = jax.lax.scan(step, (logits, optimiser.init(logits)), (width, temperature))
    return requests(logits)


def whole(
    relaxed: Float[Array, "expert die"], counts: Int[Array, " expert"], least: Float[Array, ""] | float
) -> Int[Array, "expert die"]:
    """Whole requests: dies with less than the part `least` of an expert give it to the others, the largest its rest."""
    part = relaxed / jnp.maximum(counts, 1)[:, None]
    largest = part.max(axis=1, keepdims=True)
    kept = jnp.where((part >= least) | (part == largest), part, 0)
    share = kept / jnp.maximum(kept.sum(axis=1, keepdims=True), 1e-30)
    plan = jnp.floor(share * counts[:, None]).astype(counts.dtype)
    return plan.at[jnp.arange(len(part)), part.argmax(axis=1)].add(counts - plan.sum(axis=1, dtype=plan.dtype))


LEAST = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.51)  # parts that a die may have at least, all tried


def best_whole(layer: FetchLayer, relaxed: Float[Array, "expert die"], *task: Array) -> Int[Array, "expert die"]:
    """The fastest allocation of whole requests among those of `whole` and homes; `task` is counts, home and local."""
    counts, home, local = task
    plans = jax.vmap(lambda least: whole(relaxed, counts, least))(jnp.asarray(LEAST, relaxed.dtype))
    at_home = jnp.where(home[:, None] == jnp.arange(local.shape[1]), counts[:, None], 0)
    plans = jnp.concatenate([plans, at_home[None].astype(plans.dtype)])
    return plans[jnp.argmin(jax.vmap(lambda plan: _seconds(layer, home, plan, local))(plans))]


def _seconds(layer: FetchLayer, home: Array, plan: Array, local: Array) -> Float[Array, ""]:
    local = local.astype(layer.machine.die.flops.dtype)
    asked = Fetches(plan.astype(local.dtype), home, local, jnp.zeros_like(local))
    return layer.time(asked).total


class GradientAllocation(eqx.Module):
    """The best allocation of whole requests from gradient descent, or homes. One `key` serves all layers and steps."""

    layer: FetchLayer
    key: Key[Array, ""]
    settings: AllocationDescentSettings = AllocationDescentSettings()

    def __call__(
        self,
        counts: Int[Array, " expert"],
        home: Int[Array, " expert"],
        local: Shaped[Array, "expert die"],
        hits: Array | None = None,
    ) -> Int[Array, "expert die"]:
        amounts = local.astype(self.layer.machine.die.flops.dtype)
        relaxed = descend(self.layer, counts, home, amounts, self.key, self.settings)
        return best_whole(self.layer, relaxed, counts, home, amounts)


class LinearAllocation(eqx.Module):
    """The solution of the assignment programme, rounded to whole requests, or homes where these are better.

    It is solved outside of compiled code.
    """

    layer: FetchLayer
    program: AssignmentProgram = eqx.field(static=True)

    def __call__(
        self,
        counts: Int[Array, " expert"],
        home: Int[Array, " expert"],
        local: Shaped[Array, "expert die"],
        hits: Array | None = None,
    ) -> Int[Array, "expert die"]:
        amounts = local.astype(self.layer.machine.die.flops.dtype)
        shape = jax.ShapeDtypeStruct(amounts.shape, amounts.dtype)
        program = self.program

        def solved(*task: Any) -> np.ndarray:
            return program.solve(*(np.asarray(each) for each in task))[0].astype(shape.dtype)

        share = jax.pure_callback(solved, shape, counts, home, amounts, vmap_method="sequential")
        return best_whole(self.layer, share * counts[:, None], counts, home, amounts)


@eqx.filter_jit
def _allocated(allocation: GradientAllocation, *task: Array) -> tuple[Array, Array]:
    counts, home, local = task
    plan = allocation(counts, home, local)
    return plan, _seconds(allocation.layer, home, plan, local)


def tuned_allocation(
    layer: FetchLayer, task: AllocationTask, seed: int = 0, settings: AllocationDescentSettings | None = None
) -> tuple[Int[np.ndarray, "expert die"], float]:
    """Returns the allocation of whole requests that a gradient descent ends with, and its exact time, s."""
    allocation = GradientAllocation(
        layer, jax.random.key(seed), AllocationDescentSettings() if settings is None else settings
    )
    plan, seconds = _allocated(allocation, *jax.device_put(tuple(task)))
    return np.asarray(plan), float(seconds)


@eqx.filter_jit
def allocation_seconds(layer: FetchLayer, plan: Array, task: AllocationTask) -> Float[Array, ""]:
    """Exact seconds of an allocation that copies nothing."""
    return _seconds(layer, jnp.asarray(task.home), jnp.asarray(plan), jnp.asarray(task.local))
