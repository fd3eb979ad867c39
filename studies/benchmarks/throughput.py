"""Plans evaluated per second: forward and with gradient, beside a NumPy loop over plans; see README.md.

Every plan is scored on one batch. Compilation is timed apart; runs are warmed up, block until ready, and the
best of several is taken, since other work on the machine can only slow a run down. NumPy is timed in between.
Parts of a forward evaluation are timed one by one, as functions of their own.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.engine import Layer, LayerCosts, expert_work
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.hardware import Die, Machine, Mesh
from jaxmoe.hardware.networks import num_links
from jaxmoe.network import Congestion, Visits, build_exchange, sharded_visits
from jaxmoe.relax import HardMax, HardSupport, SmoothMax, SoftSupport
from jaxmoe.traces import Batch, sample_batches, synthetic_trace

HERE = Path(__file__).resolve().parent
ROUNDS = 20
MOST_WITH_GRADIENT = 128  # plans at once: their derivative keeps all that is on the way
SECONDS = 2.0  # of one timing, at least


@dataclass(frozen=True)
class Size:
    """One problem size, and how many plans are evaluated at once."""

    shape: tuple[int, int]
    experts: int
    top_k: int
    tokens: int
    plans: int

    @property
    def nodes(self) -> int:
        return self.shape[0] * self.shape[1]


SIZES = (
    Size((4, 8), 64, 6, 128, 256),
    Size((4, 4), 8, 2, 128, 512),
    Size((8, 8), 128, 8, 128, 64),
    Size((16, 16), 256, 8, 128, 16),
)
MESHES = {f"{size.shape[0]}x{size.shape[1]}": size for size in SIZES}


def layer_model(size: Size) -> Layer:
    """HD-MoE's 5 TFLOP/s and 50 GB/s with DeepSeek-V2-Lite's experts."""
    links, hidden, width = num_links(size.shape), 2048, 1408
    mesh = Mesh(jnp.full(links, 50e9), jnp.zeros(links), shape=size.shape)
    costs = LayerCosts(
        combine_bytes=jnp.asarray(4.0 * hidden),
        dispatch_bytes=jnp.asarray(4.0 * hidden),
        expert_bytes=jnp.asarray(12.0 * hidden * width),
        flops_per_token_expert=jnp.asarray(2.0 * hidden * width),
        columns=jnp.asarray(float(width)),
        gemms=jnp.asarray(3.0),
    )
    return Layer(
        machine=Machine(mesh, Die(flops=jnp.full(size.nodes, 5e12))),
        costs=costs,
        time_model=Congestion(jnp.asarray(1024.0)),
        exchange=build_exchange("lowest_host", mesh),
        mode="sharded",
    )


def one_batch(size: Size) -> Batch:
    """A batch of a skewed synthetic trace."""
    trace = synthetic_trace(
        max(1024, size.tokens), [0], size.experts, size.top_k, skew=0.6, coactivation=0.3, reuse=0.2, seed=0
    )
    return jax.tree.map(lambda leaf: leaf[0, 0], sample_batches(trace, size.tokens, 1, seed=0))


def random_plans(size: Size, count: int) -> np.ndarray:
    """Plans with two hosts for every expert, float32 [plan, expert, node]."""
    rng = np.random.default_rng(0)
    hosts = rng.random((count, size.experts, size.nodes)).argsort(axis=-1)[..., :2]
    shares = np.zeros((count, size.experts, size.nodes), np.float32)
    np.put_along_axis(shares, hosts, np.float32(0.5), axis=-1)
    return shares


@eqx.filter_jit
def forward(model: Layer, shares: jax.Array, batch: Batch) -> jax.Array:
    """Exact total time of every plan, s."""
    return jax.vmap(lambda share: model(share, batch).total)(shares)


@eqx.filter_jit
def with_gradient(model: Layer, shares: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Relaxed total time of every plan and its gradient with respect to the shares."""
    soft = {"reduction": SmoothMax(jnp.asarray(0.05)), "support": SoftSupport(jnp.asarray(0.1))}
    return jax.vmap(jax.value_and_grad(lambda share: model(share, batch, **soft).total))(shares)


def parts_of(model: Layer, shares: jax.Array, batch: Batch) -> dict[str, tuple[Callable, tuple]]:
    """The steps of a forward evaluation, as functions of all plans and what they are given."""
    machine, costs = model.machine, model.costs
    visits = eqx.filter_jit(jax.vmap(lambda share: sharded_visits(share, batch, HardSupport())))
    visited = visits(shares)

    def network(each: Visits) -> jax.Array:
        ((flows,),) = model.exchange(machine.topology, each)
        sent = model.time_model.of_flows(machine.topology, flows, costs.combine_bytes)
        back = model.time_model.of_mirrored(machine.topology, flows, costs.dispatch_bytes)
        return sent.total(HardMax()) + back.total(HardMax())

    def compute(each: Visits) -> jax.Array:
        return expert_work(each, costs, HardSupport()).computing(machine).max()

    return {
        "visits": (visits, (shares,)),
        "network": (eqx.filter_jit(jax.vmap(network)), (visited,)),
        "compute": (eqx.filter_jit(jax.vmap(compute)), (visited,)),
    }


class NumpyModel:
    """The same exact time, one plan after the other: vectorised over tokens, with a dense path matrix."""

    def __init__(self, size: Size, model: Layer, batch: Batch) -> None:
        self.experts, slot = np.asarray(batch.experts), np.asarray(batch.gather_slot)
        self.gather_expert = np.take_along_axis(self.experts, slot[:, None], axis=1)[:, 0]
        self.counts = np.bincount(self.experts.ravel(), minlength=size.experts)
        link, pair = model.machine.topology.hops()
        self.paths = np.zeros((size.nodes**2, model.machine.topology.num_links), np.float32)
        self.paths[pair, link] = 1
        self.hops = self.paths.sum(axis=1)
        self.per_message, self.per_chunk = float(model.costs.combine_bytes) / 50e9, 1024 / 50e9
        self.per_token = float(model.costs.flops_per_token_expert) / 5e12

    def __call__(self, share: np.ndarray) -> float:
        """Total time of one plan, s."""
        hosts, nodes = share > 0, share.shape[1]
        visited = hosts[self.experts].any(axis=1)
        home = hosts.argmax(axis=1)[self.gather_expert]
        messages = np.zeros((nodes, nodes), np.float32)
        np.add.at(messages.T, home, visited)
        used = messages.ravel() * (self.hops > 0)
        links = (used @ self.paths).max() * self.per_message
        longest = max((self.hops[used > 0] - 1).max(initial=0), 0) * self.per_chunk
        return float((self.counts @ share).max() * self.per_token + 2 * (links + longest))


def rate(run: Callable[[], object], plans: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Plans per second of the best of several runs, or per second of all processors by their clock."""
    best = np.inf
    for _ in range(ROUNDS):
        begun, read, done = time.perf_counter(), clock(), 0
        while time.perf_counter() - begun < SECONDS / ROUNDS or not done:
            jax.block_until_ready(run())
            done += 1
        best = min(best, (clock() - read) / done)
    return plans / best


def compiled(function: Callable, *arguments: object) -> tuple[Callable[[], object], float]:
    """A warmed-up call, and the seconds it took to compile."""
    begun = time.perf_counter()
    ahead = function.lower(*arguments).compile()
    seconds = time.perf_counter() - begun
    jax.block_until_ready(ahead(*arguments))
    return lambda: ahead(*arguments), seconds


def measure(size: Size) -> dict[str, object]:
    """One row of the table."""
    model, batch, shares = layer_model(size), one_batch(size), random_plans(size, size.plans)
    numpy_model = NumpyModel(size, model, batch)
    arguments = (model, jnp.asarray(shares), batch)
    ahead, compile_s = compiled(forward, *arguments)
    fewer = min(size.plans, MOST_WITH_GRADIENT)
    gradient, gradient_compile_s = compiled(with_gradient, model, jnp.asarray(shares[:fewer]), batch)
    few = shares[:8]
    np.testing.assert_allclose(np.asarray(ahead())[:8], [numpy_model(share) for share in few], rtol=1e-4)
    parts = {name: compiled(function, *given)[0] for name, (function, given) in parts_of(model, *arguments[1:]).items()}
    numpy_rate = rate(lambda: [numpy_model(share) for share in few], len(few))
    forward_rate, gradient_rate = rate(ahead, size.plans), rate(gradient, fewer)
    forward_work, gradient_work = (
        1 / rate(*each, time.process_time) for each in ((ahead, size.plans), (gradient, fewer))
    )
    return {
        "mesh": f"{size.shape[0]}x{size.shape[1]}",
        "experts": size.experts,
        "top_k": size.top_k,
        "tokens": size.tokens,
        "plans_at_once": size.plans,
        "forward_per_s": round(forward_rate),
        "gradient_per_s": round(gradient_rate),
        "numpy_per_s": round(numpy_rate),
        "forward_over_numpy": f"{forward_rate / numpy_rate:.1f}",
        "forward_compile_s": f"{compile_s:.2f}",
        "gradient_compile_s": f"{gradient_compile_s:.2f}",
        "gradient_over_forward_work": f"{gradient_work / forward_work:.1f}",  # in processor time
        **{f"{name}_us": f"{1e6 / rate(run, size.plans):.2f}" for name, run in parts.items()},
    }


def machine() -> str:
    """What the table was measured on."""
    device = jax.devices()[0]
    return (
        f"{device.device_kind} ({device.platform}), {os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}"
    )


def row(mesh: str) -> list[dict[str, object]]:
    """The row of a mesh."""
    return [measure(MESHES[mesh]) | {"machine": machine()}]


if __name__ == "__main__":
    device = jax.devices()[0].platform
    name = "throughput" if device == "cpu" else f"throughput_{device}"
    table = Table(name, row, [(mesh,) for mesh in MESHES], ("mesh",), timed=True)
    make_tables(HERE, [table], study_options(__doc__).parse_args())
