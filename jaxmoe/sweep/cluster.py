"""Chunks evaluated on the hosts of a Ray cluster.

Ray assigns chunks to hosts and evaluates those of a lost host again. This process alone writes files, so that no row is
written twice.
"""

import logging
import os
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax

from jaxmoe.experiment.parametric import ParametricRun
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.extras import install_command
from jaxmoe.sweep.compile_groups import Group, Refused
from jaxmoe.sweep.evaluation import Evaluated, Measured, SweepEvaluator, most_points
from jaxmoe.sweep.point import Point
from jaxmoe.sweep.points import SweepError

CONNECT_S = 5.0
AHEAD = 2  # chunks handed out for each worker: one to evaluate, one to follow
WAIT_S = 1.0  # between two looks for Ctrl-C

Answer = tuple[list[tuple[slice, Measured]], int, int, str]
"""Parts of a chunk and their metrics, compilations, those of them that were too large, and the node."""


def check_address(address: str) -> None:
    """Raise `SweepError` where `ray` is missing, or nothing listens at the address: Ray would try for minutes."""
    if find_spec("ray") is None:
        raise SweepError(f"--ray needs ray; install it with: {install_command('ray', 'ray')}")
    if address in ("local", "auto"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise SweepError(f"--ray is {address!r}; expected local, auto for the cluster of this machine, or HOST:PORT")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from None


def _join(address: str) -> None:
    import ray

    try:
        # JAX warns of the processes that Ray starts; they run another programme at once.
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> SweepError:
    told = (str(error).splitlines() or [type(error).__name__])[0]
    return SweepError(
        f"--ray {address}: no cluster answers there ({told}); start one with `ray start --head`, or use --ray local"
    )


class Cluster:
    """Evaluates groups of points as `SweepEvaluator` does, on all hosts of a Ray cluster.

    Every worker has devices of its own: a GPU, or a core.

    `compiles` counts the compilations of all workers, `chunks` the chunks by the node that evaluated them.
    `memory_bytes` limits what a chunk takes on its worker; 0 is a part of the memory of its host, over its cores.
    Raises `SweepError` where there is no cluster at the address.
    """

    def __init__(self, address: str, memory_bytes: float, searched: tuple[str, ...], check: Callable[[], None]) -> None:
        import ray

        self.memory_bytes, self.searched = memory_bytes, searched
        self._check, self._own = check, not ray.is_initialized()
        self.compiles = self.too_large = 0
        self.chunks: Counter[str] = Counter()
        if self._own:
            _join(address)
        there = ray.cluster_resources()
        self.devices = int(there.get("GPU", 0)) or int(there.get("CPU", 1))
        gpus = 1 if there.get("GPU") else 0
        self._evaluate = ray.remote(num_cpus=1, num_gpus=gpus)(_evaluate).remote

    def evaluated(self, groups: Iterable[Group | Refused]) -> Iterator[Evaluated]:
        """All points of these groups, in the order in which they are ready. Raises `SweepError` where Ray gives up."""
        import ray

        handed: dict[Any, tuple[Group, slice]] = {}
        run, shared = None, None
        precision = jax.config.values["jax_default_matmul_precision"]  # of float32 products, set by the command
        for group in groups:
            if isinstance(group, Refused):
                yield group, slice(None), None
                continue
            if run is not group.run:
                run, shared = group.run, ray.put(group.run)
            for part in _parts(len(group.points), most_points(self.searched)):
                while len(handed) >= AHEAD * self.devices:
                    yield from self._ready(handed)
                chunk = group.points[part], group.strategy
                # In a list, a reference is handed on as it is: only a worker that lacks the run fetches it.
                task = self._evaluate([shared], chunk, self.memory_bytes, self.searched, precision)
                handed[task] = group, part
        while handed:
            yield from self._ready(handed)

    def close(self) -> None:
        """Shut down the cluster if this process started it; leave any other running."""
        import ray

        if self._own:
            ray.shutdown()

    def _ready(self, handed: dict[Any, tuple[Group, slice]]) -> Iterator[Evaluated]:
        """Chunks handed out that are ready, after some time."""
        import ray

        self._check()
        for task in ray.wait([*handed], timeout=WAIT_S)[0]:
            group, part = handed.pop(task)
            try:
                parts, compiles, too_large, node = ray.get(task)
            except ray.exceptions.RayError as error:
                told = str(error).strip().splitlines()[-1]
                raise SweepError(f"--ray: a chunk could not be evaluated: {told}; run again to go on") from error
            self.compiles += compiles
            self.too_large += too_large
            self.chunks[node] += 1
            for inner, measured in parts:
                yield group, slice(part.start + inner.start, part.start + inner.stop), measured


def _parts(points: int, most: int) -> Iterator[slice]:
    """Even parts of so many points."""
    count = -(-points // most)
    size = -(-points // count)
    return (slice(start, min(start + size, points)) for start in range(0, points, size))


# In a worker.

_run: tuple[str, ParametricRun] | None = None  # the last, by the name of its reference


@cache
def _engine(memory_bytes: float, searched: tuple[str, ...]) -> SweepEvaluator:
    engine = SweepEvaluator(memory_bytes, searched)
    if not memory_bytes and jax.default_backend() == "cpu":
        engine.memory_bytes /= os.cpu_count() or 1  # as many workers share it
    return engine


def _evaluate(
    shared: list[Any],
    chunk: tuple[list[Point], Strategy],
    memory_bytes: float,
    searched: tuple[str, ...],
    precision: str | None,
) -> Answer:
    import ray

    global _run
    (reference,) = shared
    if _run is None or _run[0] != reference.hex():
        _run = reference.hex(), ray.get(reference)
    engine = _engine(memory_bytes, searched)
    before = engine.compiles, engine.too_large
    with jax.default_matmul_precision(precision):
        points, strategy = chunk
        parts = [*engine.chunks(Group(points, _run[1], strategy))]
    node = ray.get_runtime_context().get_node_id()
    return parts, engine.compiles - before[0], engine.too_large - before[1], node
