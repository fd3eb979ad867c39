"""The all-to-all of a MoE layer in its three stages, each priced by a time model of its own (camoe 3.2, Eq. 9)."""

import csv
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.errors import InputError
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network.flows import StageTime
from jaxmoe.network.time_models import AbstractTimeModel, AlphaBeta
from jaxmoe.relax import AbstractReduction, HardMax

STAGES = ("metadata", "dispatch", "combine")  # the phases of an all-to-all that are profiled apart


class AllToAll(eqx.Module):
    """Metadata from every node to every other, then vectors to their experts, then results back.

    With `AlphaBeta` for every stage this is Eq. 9 of camoe, each stage as long as its slowest pair; any other time
    model prices the same traffic. Combine is the transpose of dispatch (Eq. 11). A pair that sends nothing costs
    nothing, where Eq. 9 has its alpha.
    """

    models: dict[str, AbstractTimeModel]  # by stage
    metadata_bytes: Float[Array, ""]  # B from every node to every other: counts of tokens for each expert
    dispatch_bytes: Float[Array, ""]  # B of one copy with its routing probability
    combine_bytes: Float[Array, ""]  # B of one result

    def traffic(self, copies: Float[Array, "node node2"]) -> dict[str, Float[Array, "node node2"]]:
        """Bytes [source, destination] of every stage, for copies of vectors [source, node of the expert]."""
        return {
            "metadata": jnp.full_like(copies, 1) * self.metadata_bytes * (1 - jnp.eye(len(copies), dtype=copies.dtype)),
            "dispatch": copies * self.dispatch_bytes,
            "combine": copies.T * self.combine_bytes,
        }

    def stages(self, topology: AbstractTopology, copies: Float[Array, "node node2"]) -> dict[str, StageTime]:
        """How long every stage keeps the network, for copies of vectors [source, node of the expert]."""
        traffic = self.traffic(copies)
        return {name: self.models[name](topology, traffic[name]) for name in STAGES}

    def seconds(
        self,
        topology: AbstractTopology,
        copies: Float[Array, "node node2"],
        reduction: AbstractReduction | None = None,
    ) -> dict[str, Float[Array, ""]]:
        """Seconds of every stage. Exact without a `reduction`."""
        reduction = HardMax() if reduction is None else reduction
        return {name: stage.total(reduction) for name, stage in self.stages(topology, copies).items()}

    def total(
        self,
        topology: AbstractTopology,
        copies: Float[Array, "node node2"],
        reduction: AbstractReduction | None = None,
    ) -> Float[Array, ""]:
        """Seconds of all stages, one after the other."""
        return jnp.stack([*self.seconds(topology, copies, reduction).values()]).sum()


def same_models(model: AbstractTimeModel) -> dict[str, AbstractTimeModel]:
    """One time model for all stages."""
    return dict.fromkeys(STAGES, model)


# Measured models: the profile of a network, and its table.


class ProfileError(InputError):
    """Timings from which alpha and beta cannot be had, with the reason and the remedy."""


@dataclass(frozen=True)
class Profile:
    """alpha in s and beta in s/B of every phase and pair [source, destination], with standard errors; 0 on diagonals.

    `samples` is how many timings each was fitted to. A negative alpha is no latency: it says where the line of large
    messages meets the axis, as of a token bucket, delay - burst / rate. It predicts, and must not be added up.
    """

    alpha: Float[np.ndarray, "phase node node2"]
    beta: Float[np.ndarray, "phase node node2"]
    alpha_error: Float[np.ndarray, "phase node node2"]
    beta_error: Float[np.ndarray, "phase node node2"]
    samples: Int[np.ndarray, "phase node node2"]

    @property
    def num_nodes(self) -> int:
        return self.alpha.shape[1]

    def model(self, phase: str) -> AlphaBeta:
        """The time model of one phase."""
        row = STAGES.index(phase)
        return AlphaBeta(jnp.asarray(self.alpha[row], jnp.float32), jnp.asarray(self.beta[row], jnp.float32))

    def warnings(self) -> list[str]:
        """One line where alphas are negative by more than their errors."""
        negative = self.alpha < -2 * self.alpha_error
        if not negative.any():
            return []
        phase, source, destination = np.argwhere(negative)[0]
        alpha = 1e3 * self.alpha[phase, source, destination]
        return [
            f"alpha of {int(negative.sum())} pairs is negative, first {STAGES[phase]} {source} -> {destination} with "
            f"{alpha:.4g} ms: a line through messages above a burst that passes at once (a token bucket) meets 0 bytes "
            "below 0. It predicts messages of the sizes measured; do not add it up as a latency"
        ]


FITTED = ("phase", "source", "destination", "alpha_s", "alpha_error_s", "beta_s_per_B", "beta_error_s_per_B", "samples")
"""Columns of a table of a profile."""


def read_profile(path: Path) -> Profile:
    """The profile in a CSV with the columns `FITTED`. Raises `ProfileError` naming the file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [[row[name] for name in FITTED] for row in csv.DictReader(file)]
        at = np.array([(STAGES.index(row[0]), int(row[1]), int(row[2])) for row in rows])
        values = np.array([[float(value) for value in row[3:]] for row in rows])
        nodes = int(at[:, 1:].max()) + 1
        complete = len(np.unique(at, axis=0)) == len(at) == len(STAGES) * nodes * (nodes - 1) and at.min() >= 0
    except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
        told = f"cannot be read ({error!r})"
        raise ProfileError(f"{path}: {told}; give profile.csv of jaxmoe network profile") from None
    if not complete or not np.isfinite(values).all():
        raise ProfileError(f"{path}: lacks a pair, a phase or a number; write it anew with jaxmoe network profile")
    tables = np.zeros((values.shape[1], len(STAGES), nodes, nodes))
    tables[:, at[:, 0], at[:, 1], at[:, 2]] = values.T
    alpha, alpha_error, beta, beta_error, samples = tables
    return Profile(alpha, beta, alpha_error, beta_error, samples.astype(int))
