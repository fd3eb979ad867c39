"""Gradient descent of many machines at once: augmented Lagrangian, Adam inside a box, an annealed smooth maximum.

A constraint c <= 0 with a multiplier m and a penalty p adds (max(0, m + p c)^2 - m^2) / 2p to what is minimised, and m
becomes max(0, m + p c) every few steps (Hestenes 1969, Powell 1969, Rockafellar 1973). Equalities go without the max.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from scipy.optimize import least_squares
from scipy.stats import qmc

from jaxmoe.compiling import UNFUSED
from jaxmoe.relax import SmoothMax, geometric
from jaxmoe.tune.descent import SEGMENT
from jaxmoe.tune.machine.designs import Arguments, by_design
from jaxmoe.tune.machine.problem import AbstractMachineProblem, MachineSearchError, Progress

LEARNING_RATE = (0.1, 0.001)  # of a variable's range, first and last
MAX_TEMPERATURE = (0.1, 0.002)  # of the smooth maximum, relative, first and last
PENALTY = 4.0  # of an excess squared, relative, on the logarithm of the objective
FOLLOWED = 0.1  # excess that multipliers follow at most
EVERY = 5  # steps after which multipliers follow
MET = 1e-3  # excess up to which a constraint counts as met

# Of a bias of many entries most slopes are noise, which Adam would make as large as the others.
GATE = optax.chain(optax.normalize_by_update_norm(), optax.trace(decay=0.9))
# Multipliers change the slopes: of numbers, Adam remembers few. A plan sees other batches at every step.
OPTIMISERS = optax.multi_transform(
    {
        "position": optax.scale_by_adam(b1=0.5, b2=0.8),
        "plan": optax.scale_by_adam(),
        "layout": optax.scale_by_adam(),
        "gate": GATE,
    },
    lambda at: {name: name for name in at},
)


class Moment(NamedTuple):
    """Annealed values: scalars for one step, or arrays [step]."""

    rate: Float[Array, "..."]
    max_temperature: Float[Array, "..."]
    follows: Float[Array, "..."]  # 1 where multipliers follow


class Walk(NamedTuple):
    """State of a descent; leaves have leading axes [design, start]."""

    at: Any  # a mapping with `position`, and whatever else descends
    optimiser: optax.OptState
    multipliers: Float[Array, "*lead constraint"]


def feasible_starts(problem: AbstractMachineProblem, count: int) -> Float[np.ndarray, "start variable"]:
    """`count` machines spread over the bounds, each moved to a near one that meets the constraints.

    Raises `MachineSearchError` where none meets them; it says which constraint is broken and how far.
    """
    power = int(np.ceil(np.log2(max(count, 1))))
    spread = qmc.Sobol(len(problem.keys), rng=problem.seed).random_base2(power)[:count]
    if not problem.constraints:
        return spread
    moved = np.stack([to_feasible(problem, start) for start in spread])
    broken = violation(problem, problem.excess_and_slope(moved)[0])
    if broken.max(axis=1).min() > MET:
        raise _infeasible(problem, moved[broken.max(axis=1).argmin()])
    fine = moved[broken.max(axis=1) <= MET]
    return fine[np.arange(count) % len(fine)]


def to_feasible(problem: AbstractMachineProblem, position: np.ndarray) -> np.ndarray:
    """A near position with the least sum of squared excesses of broken constraints."""
    if not problem.constraints:
        return position

    def broken(at: np.ndarray) -> np.ndarray:
        excess = problem.excess_and_slope(at[None])[0][0]
        return np.where(problem.equal, excess, np.maximum(excess, 0))

    def slope(at: np.ndarray) -> np.ndarray:
        excess, slope = (each[0] for each in problem.excess_and_slope(at[None]))
        return slope * (problem.equal | (excess > 0))[:, None]

    inside = np.clip(position, 1e-6, 1 - 1e-6)  # the solver starts inside its bounds
    found = least_squares(broken, inside, slope, bounds=(0, 1), xtol=1e-10, ftol=1e-12, gtol=1e-12).x
    return position if np.abs(broken(position)).max() <= np.abs(broken(found)).max() else found


def violation(problem: AbstractMachineProblem, excess: Float[np.ndarray, "*lead constraint"]) -> np.ndarray:
    """By how much each constraint is broken, relative, at least 0."""
    return np.where(problem.equal, np.abs(excess), np.maximum(excess, 0))


def _infeasible(problem: AbstractMachineProblem, position: np.ndarray) -> MachineSearchError:
    """The error that names the constraints that are broken at the position nearest to meeting all of them."""
    numbers = {key: float(value) for key, value in problem.numbers(jnp.asarray(position)).items()}
    broken = violation(problem, problem.excess_and_slope(position[None])[0])[0]
    told = []
    for constraint, excess in zip(problem.constraints, broken, strict=True):
        if excess > MET:
            left, right = problem.sides(constraint, numbers)
            told.append(f"{constraint.text!r} at best {float(left):.5g} against {float(right):.5g}")
    where = ", ".join(f"{key} {numbers[key]:.4g}" for key in problem.keys)
    return MachineSearchError(
        f"{problem.label}: no machine inside the bounds meets all constraints: {'; '.join(told)} (nearest at "
        f"{where}); relax a constraint or widen the bounds"
    )


def augmented(
    excess: Float[Array, " constraint"], multipliers: Float[Array, " constraint"], equal: np.ndarray
) -> Float[Array, ""]:
    """Terms of the augmented Lagrangian, which constraints add to the objective."""
    pushed = multipliers + PENALTY * excess
    kept = jnp.where(equal, pushed, jnp.maximum(pushed, 0))
    return ((kept**2 - multipliers**2) / (2 * PENALTY)).sum()


def followed(
    excess: Float[Array, " constraint"], multipliers: Float[Array, " constraint"], equal: np.ndarray
) -> Float[Array, " constraint"]:
    """The multipliers after the next update.

    Early steps break constraints by much: what that added, it would take long to take away again.
    """
    pushed = multipliers + PENALTY * jnp.clip(excess, -FOLLOWED, FOLLOWED)
    return jnp.where(equal, pushed, jnp.maximum(pushed, 0))


def begun(at: Any, constraints: int, lead: tuple[int, ...]) -> Walk:
    """A descent at its first step, under so many constraints, from parameters whose leaves have the leading axes
    `lead`."""
    init = OPTIMISERS.init
    for _ in lead:
        init = jax.vmap(init)
    return Walk(at, init(at), jnp.zeros((*lead, constraints)))


def moved(
    problem: AbstractMachineProblem,
    walk: Walk,
    now: Moment,
    objective: Callable[[Any], tuple[Float[Array, ""], Float[Array, " further"]]],
    rates: Any,
) -> tuple[Walk, Float[Array, ""]]:
    """One step of one start, and the objective there. `rates` multiply the learning rate, leaf by leaf.

    The objective also returns the excess of constraints beyond those on the machine's numbers, none an equality.
    """

    def lagrangian(at: Any) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, " constraint"]]]:
        value, further = objective(at)
        excess = jnp.concatenate([problem.excess(at["position"]), further])
        return value + augmented(excess, walk.multipliers, _equal(problem, excess)), (value, excess)

    (_, (value, excess)), slope = jax.value_and_grad(lagrangian, has_aux=True)(walk.at)
    direction, optimiser = OPTIMISERS.update(slope, walk.optimiser)
    at = jax.tree.map(lambda leaf, rate, step: leaf - now.rate * rate * step, walk.at, rates, direction)
    at |= {"position": jnp.clip(at["position"], 0, 1)}
    multipliers = jnp.where(
        now.follows > 0, followed(excess, walk.multipliers, _equal(problem, excess)), walk.multipliers
    )
    return Walk(at, optimiser, multipliers), value


def _equal(problem: AbstractMachineProblem, excess: Float[Array, " constraint"]) -> np.ndarray:
    """Which of the machine's and further constraints are equalities."""
    return np.pad(problem.equal, (0, len(excess) - len(problem.equal)))


def schedule(first: int, steps: int) -> Moment:
    """Annealed values of the segment that begins at step `first` of `steps`."""
    step = first + np.arange(SEGMENT)
    progress = np.minimum(step / max(steps - 1, 1), 1)
    ends = (LEARNING_RATE, MAX_TEMPERATURE)
    rate, temperature = (jnp.asarray(geometric(*each, progress), jnp.float32) for each in ends)
    return Moment(rate, temperature, jnp.asarray(step % EVERY == EVERY - 1, jnp.float32))


class Descended(NamedTuple):
    """Where descents ended, by group [design, start, variable], and the relaxed objective of every step and start."""

    positions: list[Float[np.ndarray, "design start variable"]]
    history: Float[np.ndarray, "step start"]
    steps: int  # of every start


def descend(problem: AbstractMachineProblem, starts: Sequence[np.ndarray], report: Progress) -> Descended:
    """Descend from all starts, by group [design, start, variable], in one function for groups that are alike."""
    groups, steps = problem.groups, -(-problem.steps // SEGMENT) * SEGMENT
    segment = jax.jit(partial(_segment, problem), static_argnums=0, compiler_options=UNFUSED)
    history = []
    walks = [
        begun({"position": jnp.asarray(each, jnp.float32)}, len(problem.constraints), each.shape[:2]) for each in starts
    ]
    for first in range(0, steps, SEGMENT):
        report("descend", first, steps)
        now = schedule(first, steps)
        run = [segment(each.static, walk, each.arguments, now) for each, walk in zip(groups, walks, strict=True)]
        walks = [walk for walk, _ in run]
        history.append(np.concatenate([np.asarray(each, float).reshape(SEGMENT, -1) for _, each in run], axis=1))
    report("descend", steps, steps)
    return Descended([np.asarray(walk.at["position"], float) for walk in walks], np.concatenate(history), steps)


def _segment(
    problem: AbstractMachineProblem, static: Any, walk: Walk, arguments: Arguments, moments: Moment
) -> tuple[Walk, Float[Array, "step design start"]]:
    def step(walk: Walk, now: Moment) -> tuple[Walk, Float[Array, "design start"]]:
        def one(walk: Walk, arguments: Arguments) -> tuple[Walk, Float[Array, ""]]:
            def objective(at: Any) -> tuple[Float[Array, ""], Float[Array, " further"]]:
                value = problem.objective(static, arguments, at["position"], SmoothMax(now.max_temperature))
                return value, jnp.zeros(0)

            return moved(problem, walk, now, objective, {"position": 1.0})

        over_starts = jax.vmap(one, in_axes=(0, None))
        return jax.vmap(over_starts, in_axes=(0, by_design(arguments)))(walk, arguments)

    return jax.lax.scan(step, walk, moments)
