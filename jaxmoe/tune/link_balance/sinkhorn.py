"""The mapping by gradient descent: a doubly stochastic matrix in the place of the permutation.

Permutation = Sinkhorn(logits / temperature) with every margin 1. Shares times it are the plan of the relaxed model;
as the temperature falls the matrix nears a permutation, to which it is rounded by linear assignment.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float
from scipy.optimize import linear_sum_assignment

from jaxmoe.relax import SmoothMax, geometric, sinkhorn
from jaxmoe.tune.link_balance.mapping import Best, Budget, Mapping, Question, scorer
from jaxmoe.tune.relaxation import soft_hosts

RESTARTS = 4
SEGMENT = 10  # steps of a compiled call; the time limit is checked in between
LEARNING_RATE = 0.1
NOISE = 0.5  # of the first logits
ENDS = {"temperature": (1.0, 0.05), "width": (0.3, 0.03), "max_temperature": (0.1, 0.02)}


def descent(question: Question, seed: int, budget: Budget) -> Mapping:
    """Search by descent from several random starts. A trial is a step of all of them."""
    nodes = question.share.shape[1]
    score = scorer(question, RESTARTS)
    best, steps = Best.identity(score, nodes), 0
    scale = jnp.asarray(best.seconds, jnp.float32)
    logits = NOISE * jr.normal(jr.key(seed), (RESTARTS, nodes, nodes))
    state = logits, jax.vmap(optax.scale_by_adam().init)(logits)
    while (spent := budget.spent(steps)) < 1:
        now = {name: jnp.asarray(geometric(*ends, spent), jnp.float32) for name, ends in ENDS.items()}
        state, permutations = _descend(question, state, now, scale)
        steps += SEGMENT
        orders = np.stack([linear_sum_assignment(p.T, maximize=True)[1] for p in np.asarray(permutations)])
        best.see(steps, orders, score(orders))
    return best.mapping()


def _permutation(logits: Float[Array, "cluster node"], temperature: Float[Array, ""]) -> Float[Array, "cluster node"]:
    ones = jnp.ones(logits.shape[0], logits.dtype)
    return sinkhorn(logits / temperature, ones, ones)


@eqx.filter_jit
def _descend(question: Question, state, now: dict[str, Float[Array, ""]], scale: Float[Array, ""]):
    """One segment of descent on every restart. Returns the state and the permutations [restart, cluster, node]."""
    nodes = question.share.shape[1]
    support = soft_hosts(question.frequency, nodes, now["width"])
    reduction = SmoothMax(now["max_temperature"])

    def relaxed(logits: Float[Array, "cluster node"]) -> Float[Array, ""]:
        share = question.share @ _permutation(logits, now["temperature"])
        return question.cost(share, reduction, support) / scale

    def step(state, _):
        logits, optimiser = state
        direction, optimiser = jax.vmap(optax.scale_by_adam().update)(jax.vmap(jax.grad(relaxed))(logits), optimiser)
        return (logits - LEARNING_RATE * direction, optimiser), None

    state, _ = jax.lax.scan(step, state, length=SEGMENT)
    return state, jax.vmap(lambda logits: _permutation(logits, now["temperature"]))(state[0])
