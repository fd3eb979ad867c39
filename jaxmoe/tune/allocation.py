"""The best allocation of a layer's tasks: a bound by linear programming, and allocations found by gradient descent.

`allocation_bound` relaxes Algorithm 1's task (wafer-scale study, IV-D5): requests may be split at will, and a die that
computes a part of an expert reads only that part. So it bounds every allocation. `descend` goes down the model's own
price, from homes and not from any plan, and ends with a plan of whole requests.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import Array, Float, Int, Key

from jaxmoe.hardware import Machine
from jaxmoe.latency import FetchCosts, Fetches, fetched_layer_time
from jaxmoe.network.loads import link_loads
from jaxmoe.relax import SmoothMax, SoftSupport, geometric


class Task(NamedTuple):
    """A layer to allocate: requests of every expert, its home, and which dies have it in their own HBM."""

    counts: Int[np.ndarray, " expert"]
    home: Int[np.ndarray, " expert"]
    local: Float[np.ndarray, "expert die"]


def allocation_bound(machine: Machine, costs: FetchCosts, task: Task) -> float:
    """Seconds that no allocation of the layer can beat, by the assignment LP (HiGHS).

    The largest of the times of dies, HBM channels and links, and the latency of a local read. Copies that are written
    cost nothing here. Raises `ValueError` where the solver fails.
    """
    used = np.flatnonzero(task.counts)
    experts, dies = len(used), machine.num_nodes
    expert, die = np.divmod(np.arange(experts * dies), dies)
    source = np.where(task.local[used][expert, die] > 0, die, task.home[used][expert])
    size = float(costs.expert_bytes)
    compute = task.counts[used][expert] * float(costs.flops_per_request) / np.asarray(machine.die.flops, float)[die]
    hbm = machine.memory[-1]
    channel = np.asarray(hbm.channel)[source]
    read = size / np.asarray(hbm.bandwidth, float)[channel]
    ways = _seconds_of_pairs(machine, size)[source * dies + die].tocoo()
    columns = np.arange(len(expert))
    links, channels = machine.topology.num_links, len(hbm.bandwidth)
    busy = scipy.sparse.coo_array(
        (
            np.concatenate([compute, read, ways.data]),
            (
                np.concatenate([die, dies + channel, dies + channels + ways.col]),
                np.concatenate([columns, columns, ways.row]),
            ),
        ),
        shape=(dies + channels + links, len(expert)),
    )
    scale = 1e6  # the solver's tolerances are of numbers about 1
    last = scipy.sparse.coo_array(-np.ones((busy.shape[0], 1)))
    sums = scipy.sparse.coo_array((np.ones(len(expert)), (expert, columns)), shape=(experts, len(expert) + 1))
    found = scipy.optimize.linprog(
        np.append(np.zeros(len(expert)), 1.0),
        A_ub=scipy.sparse.hstack([busy * scale, last]),
        b_ub=np.zeros(busy.shape[0]),
        A_eq=sums,
        b_eq=np.ones(experts),
        bounds=(0, None),
        method="highs",
    )
    if found.status != 0:
        raise ValueError(f"the bound of the allocation was not found: {found.message}")
    return float(found.fun) / scale + float(costs.miss + hbm.latency.min())


def _seconds_of_pairs(machine: Machine, size: float) -> scipy.sparse.csr_array:
    """How long an expert keeps every link, for every pair of dies [source * dies + destination, link]."""
    pairs = machine.num_nodes**2
    one = jnp.eye(pairs).reshape(pairs, machine.num_nodes, machine.num_nodes)
    loads = jax.lax.map(lambda traffic: link_loads(machine.topology, traffic), one)
    rate = machine.topology.link_bandwidth * machine.topology.efficiency
    return scipy.sparse.csr_array(np.asarray(loads * (size / rate), float))


class Descent(NamedTuple):
    """Settings of `descend`: widths of support and temperatures of maxima fall geometrically over the steps."""

    steps: int = 400
    rate: float = 0.1
    width: tuple[float, float] = (0.5, 0.05)
    temperature: tuple[float, float] = (0.2, 0.01)
    home: float = 3.0  # logit of a die that has the expert, at first


@eqx.filter_jit
def descend(
    machine: Machine,
    costs: FetchCosts,
    counts: Int[Array, " expert"],
    home: Int[Array, " expert"],
    local: Float[Array, "expert die"],
    key: Key[Array, ""],
    settings: Descent,
) -> Float[Array, "expert die"]:
    """Relaxed requests [expert, die] by Adam on the layer's time, from homes and a little noise alone."""
    optimiser = optax.adam(settings.rate)
    logits = settings.home * local + 0.1 * jax.random.normal(key, local.shape, local.dtype)

    def requests(logits: Array) -> Array:
        return jax.nn.softmax(logits, axis=1) * counts[:, None]

    def loss(logits: Array, width: Array, temperature: Array) -> Array:
        asked = Fetches(requests(logits), home, local, jnp.zeros_like(local))
        return jnp.log(fetched_layer_time(machine, asked, costs, SmoothMax(temperature), SoftSupport(width)).total)

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
    relaxed: Float[np.ndarray, "expert die"], counts: Int[np.ndarray, " expert"], least: float
) -> Int[np.ndarray, "expert die"]:
    """Whole requests: dies with less than the part `least` of an expert give it to the others, the largest its rest."""
    part = relaxed / np.maximum(counts, 1)[:, None]
    index = np.arange(len(part))
    kept = np.where((part >= least) | (part == part.max(axis=1, keepdims=True)), part, 0)
    share = kept / np.maximum(kept.sum(axis=1, keepdims=True), 1e-30)
    plan = np.floor(share * counts[:, None]).astype(int)
    plan[index, part.argmax(axis=1)] += counts - plan.sum(axis=1)
    return plan


LEAST = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.51)  # parts that a die may have at least, all tried


def tuned_allocation(
    machine: Machine, costs: FetchCosts, task: Task, seed: int = 0, settings: Descent | None = None
) -> tuple[Int[np.ndarray, "expert die"], float]:
    """The best whole allocation that a descent ends with, and its exact seconds."""
    counts, home = jnp.asarray(task.counts), jnp.asarray(task.home)
    local = jnp.asarray(task.local, machine.die.flops.dtype)
    key = jax.random.key(seed)
    relaxed = descend(machine, costs, counts, home, local, key, Descent() if settings is None else settings)
    plans = [whole(np.asarray(relaxed, float), task.counts, least) for least in LEAST]
    seconds = [allocation_seconds(machine, costs, plan, task) for plan in plans]
    best = int(np.argmin(seconds))
    return plans[best], seconds[best]


def allocation_seconds(machine: Machine, costs: FetchCosts, plan: Int[np.ndarray, "expert die"], task: Task) -> float:
    """Exact seconds of an allocation that copies nothing."""
    amounts = (jnp.asarray(each, machine.die.flops.dtype) for each in (plan, task.local))
    return float(_seconds(machine, costs, jnp.asarray(task.home), *amounts))


@eqx.filter_jit
def _seconds(machine: Machine, costs: FetchCosts, home: Array, plan: Array, local: Array) -> Float[Array, ""]:
    return fetched_layer_time(machine, Fetches(plan, home, local, jnp.zeros_like(local)), costs).total
