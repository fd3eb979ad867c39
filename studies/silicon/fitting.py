"""Constants of backends fitted to measured systems: those of all backends together, from which each may differ."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from times import RowTimes

from jaxmoe.serving.closed_loop import OVERHEADS, Loop, Overheads, wait

# Settings; README.md says what was in sight when they were chosen.
PULL = 1.0  # towards the constants of all backends, in rows of weight 1 for a factor of e
NEAR = 0.05  # relative errors below which the loss is quadratic
FIRST_TOKEN = 0.5  # weight of its error beside that of time per token
STARTS = ((-7.9, 0.3, -3.6), (-6.5, 0.0, -4.6), (-9.0, 0.6, -3.0))  # logarithms


def fit_overheads(times: Sequence[RowTimes]) -> dict[str, Overheads]:
    """Constants of every backend by the rows that are covered; one without rows has those of all together."""
    times = [each for each in times if np.isfinite(each.loop.step) and np.isfinite(each.row.per_token)]
    common = _fitted(times, None)
    backends = {each.row.columns["backend"] for each in times}
    own = {name: _fitted([each for each in times if each.row.columns["backend"] == name], common) for name in backends}
    return {name: Overheads(*map(float, _constants(own.get(name, common)))) for name in OVERHEADS}


def _fitted(times: Sequence[RowTimes], common: np.ndarray | None) -> np.ndarray:
    """Logarithms of the constants that agree best with the rows; a row counts less the more its pair has."""
    loop = Loop(*(np.array(column) for column in zip(*(each.loop for each in times), strict=True)))
    measured = np.array([(each.row.first_token, each.row.per_token) for each in times])
    count = Counter(each.row.pair for each in times)
    weight = np.array([count[each.row.pair] ** -0.5 for each in times])

    @jax.jit
    @jax.value_and_grad
    def loss(logs: jax.Array) -> jax.Array:
        served = wait(loop, _constants(logs))
        error = jnp.log(jnp.stack([served.first_token, served.per_token], axis=-1) / measured)
        smooth = jnp.sqrt(error**2 + NEAR**2) @ jnp.array([FIRST_TOKEN, 1.0])
        pull = 0.0 if common is None else PULL * ((logs - common) ** 2).sum()
        return (weight @ smooth + pull) / weight.sum()

    starts = STARTS if common is None else (common, *STARTS)
    found: list[Any] = [minimize(_in_doubles(loss), start, jac=True, method="L-BFGS-B") for start in starts]
    return min(found, key=lambda each: each.fun).x


def _in_doubles(loss: Callable[[Any], tuple[jax.Array, jax.Array]]) -> Callable[[Any], tuple[float, np.ndarray]]:
    """Value and gradient as SciPy takes them."""
    return lambda logs: (float((told := loss(jnp.asarray(logs)))[0]), np.asarray(told[1], float))


def _constants(logs: Any) -> Overheads:
    return Overheads(*jnp.exp(jnp.asarray(logs)))
