"""What a deployment would gain from more of each number of its machine: elasticities of its output tokens a second.

They are forward derivatives through the whole step and its users' waits. What a system decides stays as it is wherever
it is a choice, such as the die of a slice, as a small change leaves it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.experiment.deployment import Deployed
from jaxmoe.hardware.gpu.sheet import Sheet
from jaxmoe.serving.closed_loop import serve
from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.kernels import Given
from jaxmoe.serving.machine_step import MachineStep
from jaxmoe.serving.step import AbstractStep, ModelStep

# Leaves of a machine and of a data sheet in users' words; others keep the path of their leaf.
WORDS = {
    ".topology.link_bandwidth": "bandwidth of links",
    ".topology.link_latency": "latency of links",
    ".topology.injection_bandwidth": "bandwidth of ports, out",
    ".topology.ejection_bandwidth": "bandwidth of ports, in",
    ".topology.endpoint_latency": "latency of ends",
    ".die.flops": "FLOP/s of dies",
    ".bandwidth": "bandwidth of memory",
    ".bf16": "FLOP/s in BF16",
    ".fp8": "FLOP/s in FP8",
    ".fp4": "FLOP/s in FP4",
    ".processors": "processors",
    ".link": "bandwidth of links",
    ".network": "bandwidth of the network between nodes",
}
SHEET = ".sheet"  # where the path of a number of a data sheet begins
ACCEPTANCE = "acceptance of drafts"
AS_BANDWIDTH = ".topology.efficiency"  # gives what the bandwidth of links gives


def worth(own: Deployed) -> dict[str, float]:
    """Per cent more output tokens/s of a device for 1 % more of each number, at the scenario's own users, by its name.

    Numbers of nodes, links or channels that may differ are raised together. Those that are 0 or endless are left out.
    Where tokens are drafted, the probability that they are right is one more number.
    Raises `UnsuitableSystemError` for a run that has no derivatives.
    """
    numbers, step_at = _numbers(own.step)
    names = _names(numbers)

    def log_tokens(factors: Float[Array, " number"]) -> Float[Array, ""]:
        step = step_at(_scaled(numbers, dict(zip(names, factors, strict=False))))
        users = own.users._replace(acceptance=own.users.acceptance * factors[-1])
        return jnp.log(serve(step, users, own.memory, own.backend, own.overheads).tokens_per_s_device(step))

    slopes = np.asarray(jax.jacfwd(log_tokens)(jnp.ones(len(names) + 1))).tolist()
    told = dict(zip((*names.values(), ACCEPTANCE), slopes, strict=True))
    return told if own.deployment.drafted else {name: told[name] for name in names.values()}


def _numbers(step: AbstractStep) -> tuple[Any, Callable[[Any], AbstractStep]]:
    """A pytree of a step's numbers, and the step at others."""
    match step:
        case MachineStep():
            return step.machine, step.at
        case ModelStep(kernels=kernels, deepep=deepep, deployment=Deployment(exchange=exchange)):
            network = deepep.links.network if deepep is not None and exchange.startswith("deepep") else None
            return Gpu(kernels.sheet, network), partial(_with_gpu, step)
        case _:
            raise AssertionError(f"{type(step).__name__} has no numbers of a machine")


class Gpu(NamedTuple):
    """Numbers of a GPU: its data sheet, and where DeepEP crosses it the rate of the network between nodes, B/s."""

    sheet: Sheet
    network: Given = None


def _with_gpu(step: ModelStep, gpu: Gpu) -> ModelStep:
    kernels, deepep = step.kernels, step.deepep
    if deepep is not None and gpu.network is not None:
        deepep = replace(deepep, links=deepep.links._replace(network=gpu.network))
    return replace(step, kernels=replace(kernels, file=replace(kernels.file, sheet=gpu.sheet)), deepep=deepep)


def _names(numbers: Any) -> dict[str, str]:
    """Words for the leaves that may be scaled, by their path."""
    levels = {f".memory[{at}]": level.name for at, level in enumerate(getattr(numbers, "memory", ()))}
    found = {}
    for path, leaf in _leaves(numbers):
        told = path.removeprefix(SHEET)
        values, (owner, _, field) = np.asarray(leaf), path.rpartition(".")
        if (
            path != AS_BANDWIDTH
            and np.issubdtype(values.dtype, np.inexact)
            and np.isfinite(values).all()
            and values.any()
        ):
            found[path] = WORDS.get(told, f"{field} of {levels[owner]}" if owner in levels else told.lstrip("."))
    return found


def _scaled(numbers: Any, factors: Mapping[str, Float[Array, ""]]) -> Any:
    """The numbers with some leaves times a factor, by their path."""
    leaves = [leaf * factors[path] if path in factors else leaf for path, leaf in _leaves(numbers)]
    return jax.tree.unflatten(jax.tree.structure(numbers), leaves)


def _leaves(numbers: Any) -> list[tuple[str, Any]]:
    """Leaves after their path."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(numbers)[0]]
