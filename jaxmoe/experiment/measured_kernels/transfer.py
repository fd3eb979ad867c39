"""Kernels of a GPU of which few rows are known: those of another GPU, at its own data sheet, moved by these rows.

A kernel keeps the tiles, shapes and residual of the other GPU's. What rows move is five factors: on its launch, its
bytes, its tiles, its waves, and on all that the residual adds. A penalty keeps them near 1, for few rows tell little.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxmoe.experiment.measured_kernels.calibration import KernelFit, check_unit, judged, pooled
from jaxmoe.experiment.measured_kernels.fit import OUTLIER
from jaxmoe.experiment.measured_kernels.kinds import Columns, Kind
from jaxmoe.experiment.measured_kernels.padded import seconds_of, terms_of
from jaxmoe.experiment.measured_kernels.prediction import nearest
from jaxmoe.experiment.measured_kernels.tables import PRECISIONS, MeasuredTable
from jaxmoe.experiment.stage_timer import Report
from jaxmoe.hardware.gpu.files import KernelFile
from jaxmoe.hardware.gpu.kernel import FittedKernel, Terms

ROWS = 20  # of each kind, backend and precision, dealt to its kernels
PENALTY = 0.05  # of a squared logarithm of a factor
STEPS, RATE = 400, 0.05


class Factors(eqx.Module):
    """Logarithms of factors on a kernel's numbers."""

    launch: Float[Array, ""]
    moved: Float[Array, ""]
    filled: Float[Array, ""]
    wave: Float[Array, ""]
    residual: Float[Array, ""]

    def of(self, kernel: FittedKernel) -> FittedKernel:
        """The kernel with its numbers times these."""
        shifts = {
            name: getattr(kernel.base, name) + getattr(self, name) for name in ("launch", "moved", "filled", "wave")
        }
        residual = kernel.residual
        if residual is not None:
            residual = replace(residual, bias=residual.bias + self.residual)
        return replace(kernel, base=replace(kernel.base, **shifts), residual=residual)


def transfer_tables(
    tables: Sequence[MeasuredTable], base: KernelFile, report: Report, rows: int = ROWS
) -> list[KernelFit]:
    """Every kernel of these tables, moved from the nearest of another GPU by few of its rows; the others judge it.

    `base` are that GPU's kernels at the data sheet of the one that was measured. In what comes back, `base` is the
    time by data sheet alone. Kinds that `base` has no kernel of are left out.
    """
    groups = [each for each in pooled(tables) if base.of_kind(each[0].name)]
    shared = Counter(_precision(kind, names) for kind, names, _ in groups)
    found = []
    for done, (kind, names, columns) in enumerate(groups):
        report("kernels", done, len(groups))
        found.append(_transferred(kind, names, columns, base, max(rows // shared[_precision(kind, names)], 1)))
    return found


def _precision(kind: Kind, names: Mapping[str, str]) -> tuple[str, ...]:
    return (kind.name, names.get("framework", ""), *(names[name] for name in PRECISIONS if name in names))


def _transferred(kind: Kind, names: Mapping[str, str], columns: Columns, base: KernelFile, rows: int) -> KernelFit:
    other = nearest(names, base.of_kind(kind.name)).fitted
    terms = terms_of(kind, columns, base.sheet, names)
    measured = np.asarray(columns[kind.latency], float) * kind.unit
    check_unit(kind, names, terms, measured)
    told = seconds_of(other, terms)
    known = spread_rows(told, rows)
    fitted = adapted(other, Terms(*(part[known] for part in terms)), measured[known])
    moved = seconds_of(fitted, terms)
    told[known], moved[known] = np.nan, np.nan
    return judged(kind, names, columns, terms, fitted, moved, told)


def spread_rows(told: Float[np.ndarray, " row"], count: int) -> Int[np.ndarray, " place"]:
    """Places of so many rows, evenly spaced in the order of their told times."""
    order = np.argsort(told, kind="stable")
    return order[np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))]


def adapted(kernel: FittedKernel, terms: Terms, seconds: Float[np.ndarray, " row"]) -> FittedKernel:
    """The kernel with the factors that few rows tell."""
    given = Terms(*(jnp.asarray(part, jnp.float32) for part in terms))
    return _descend(kernel, given, jnp.log(jnp.asarray(seconds, jnp.float32))).of(kernel)


@jax.jit
def _descend(kernel: FittedKernel, terms: Terms, log: Float[Array, " row"]) -> Factors:
    def loss(factors: Factors) -> Array:
        off = jnp.log(factors.of(kernel).seconds(terms)) - log
        far = sum(part**2 for part in jax.tree.leaves(factors))
        return optax.huber_loss(off, delta=OUTLIER).mean() / OUTLIER + PENALTY * far

    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))

    def step(state, _):
        factors, moments = state
        change, moments = optimiser.update(jax.grad(loss)(factors), moments)
        return (eqx.apply_updates(factors, change), moments), None

    start = Factors(*jnp.zeros((5,), jnp.float32))
    (factors, _), _ = jax.lax.scan(step, (start, optimiser.init(start)), None, STEPS)
    return factors
