"""Allocations of a layer's tasks by optimisation: a linear programme, its bound, and gradient descent.

`AssignmentProgram` relaxes Algorithm 1's task (wafer-scale study, IV-D5): requests may be split at will, and a die that
computes a part of an expert reads only that part. So its value bounds every allocation, and its solution, rounded, is
one. `GradientAllocation` descends on the model's own time, from homes and not from any plan. Both end with whole
requests, and are allocations as `methods.wafer_gpu.task_allocation` has them.
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import Array, Float, Int, Key

from jaxmoe.engine import Fetches, FetchLayer
from jaxmoe.methods.wafer_gpu.task_allocation import AllocationTask
from jaxmoe.relax import SmoothMax, SoftSupport, geometric


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
        # How long an expert keeps every link of a way, [source * dies + destination, link].
        hops, each = machine.topology.hops(), np.float32(costs.expert_bytes) / np.asarray(machine.topology.link_rate)
        link, pair = np.asarray(hops.link), np.asarray(hops.pair)
        self.ways = scipy.sparse.csr_array((each[link].astype(float), (pair, link)), (self.dies**2, self.links))
        self.ways.sort_indices()

    def solve(self, task: AllocationTask) -> tuple[Float[np.ndarray, "expert die"], float]:
        """The parts of every expert's requests that dies compute, and seconds that no allocation can beat.

        The largest of the times of dies, HBM channels and links, and the latency of a local read. Copies that are
        written cost nothing here. Raises `ValueError` where the solver fails.
        """
        counts, home, local = (np.asarray(each) for each in task[:3])
        share = np.zeros((len(counts), self.dies))
        used = np.flatnonzero(counts)
        if not len(used):
            return share, 0.0
        experts, columns = len(used), np.arange(len(used) * self.dies)
        expert, die = np.divmod(columns, self.dies)
        source = np.where(local[used][expert, die] > 0, die, home[used][expert])
        channel = self.channel[source]
        ways = self.ways[source * self.dies + die].tocoo()
        busy = scipy.sparse.coo_array(
            (
                np.concatenate([counts[used][expert] * self.request[die], self.read[channel], ways.data]),
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


# Numbers of `descend`: widths of support and temperatures of maxima fall geometrically over the steps.
STEPS, LEARNING_RATE = 400, 0.1
WIDTHS, TEMPERATURES = (0.5, 0.05), (0.2, 0.01)
HOME = 3.0  # logit of a die that has the expert, at first


@eqx.filter_jit
def descend(layer: FetchLayer, task: AllocationTask, key: Key[Array, ""]) -> Float[Array, "expert die"]:
    """Relaxed requests [expert, die] by Adam on the layer's time, from homes and a little noise alone."""
    optimiser, local = optax.adam(LEARNING_RATE), task.local
    logits = HOME * local + 0.1 * jax.random.normal(key, local.shape, local.dtype)

    def requests(logits: Array) -> Array:
        return jax.nn.softmax(logits, axis=1) * task.counts[:, None]

    def loss(logits: Array, width: Array, temperature: Array) -> Array:
        asked = Fetches(requests(logits), task.home, local, jnp.zeros_like(local))
        time = layer.time(asked, reduction=SmoothMax(temperature), support=SoftSupport(width))
        return jnp.log(time.total)

    def step(state: tuple[Array, Any], annealed: tuple[Array, ...]) -> tuple[tuple[Array, Any], None]:
        logits, moments = state
        change, moments = optimiser.update(jax.grad(loss)(logits, *annealed), moments)
        return (optax.apply_updates(logits, change), moments), None

    progress = np.linspace(0, 1, STEPS)
    annealed = tuple(jnp.asarray(geometric(*ends, progress), local.dtype) for ends in (WIDTHS, TEMPERATURES))
    (logits, _), _ = jax.lax.scan(step, (logits, optimiser.init(logits)), annealed)
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


def best_whole(
    layer: FetchLayer, relaxed: Float[Array, "expert die"], task: AllocationTask
) -> Int[Array, "expert die"]:
    """The fastest allocation of whole requests among those of `whole` and homes."""
    plans = jax.vmap(lambda least: whole(relaxed, task.counts, least))(jnp.asarray(LEAST, relaxed.dtype))
    plans = jnp.concatenate([plans, task.at_home[None].astype(plans.dtype)])
    return plans[jnp.argmin(jax.vmap(lambda plan: allocation_seconds(layer, plan, task))(plans))]


def allocation_seconds(layer: FetchLayer, plan: Int[Array, "expert die"], task: AllocationTask) -> Float[Array, ""]:
    """Exact seconds of an allocation that copies nothing."""
    local = task.local.astype(layer.machine.die.flops.dtype)
    return layer.time(Fetches(plan.astype(local.dtype), task.home, local, jnp.zeros_like(local))).total


class GradientAllocation(eqx.Module):
    """The best allocation of whole requests from gradient descent, or homes. One `key` serves all layers and steps.

    Where dies read in turn the descent has them read in a stream, and the exact time of whole requests decides.
    """

    layer: FetchLayer
    key: Key[Array, ""]

    def __call__(self, task: AllocationTask) -> Int[Array, "expert die"]:
        task = AllocationTask(task.counts, task.home, task.local.astype(self.layer.machine.die.flops.dtype))
        return best_whole(self.layer, descend(replace(self.layer, outstanding=None), task, self.key), task)


class LinearAllocation(eqx.Module):
    """The solution of the assignment programme, rounded to whole requests, or homes where these are better.

    It is solved outside of compiled code.
    """

    layer: FetchLayer
    program: AssignmentProgram = eqx.field(static=True)

    def __call__(self, task: AllocationTask) -> Int[Array, "expert die"]:
        shape = jax.ShapeDtypeStruct(task.local.shape, self.layer.machine.die.flops.dtype)

        def solved(*given: Any) -> np.ndarray:
            return self.program.solve(AllocationTask(*given))[0].astype(shape.dtype)

        share = jax.pure_callback(solved, shape, *task[:3], vmap_method="sequential")
        return best_whole(self.layer, share * task.counts[:, None], task)
