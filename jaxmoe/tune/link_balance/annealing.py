"""Simulated annealing of the mapping: many chains that swap two clusters, scored by the exact model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxmoe.relax import geometric
from jaxmoe.tune.link_balance.mapping import Best, Budget, Mapping, Question, scorer

CHAINS = 4
SEGMENT = 25  # swaps of a compiled call; the time limit is checked in between
COLDNESS = (1e2, 3e3)  # 1 / temperature, first and last, relative to a layer's time


def annealing(question: Question, seed: int, budget: Budget) -> Mapping:
    """Search with swaps. A trial is an order that is scored; all chains start from the identity."""
    nodes = question.share.shape[1]
    best, trials, key = Best.identity(scorer(question), nodes), 0, jr.key(seed)
    state = _start(best.order, best.seconds)
    while (spent := budget.spent(trials)) < 1:
        coldness = jnp.asarray(geometric(*COLDNESS, spent), jnp.float32)
        state = _anneal(question, state, coldness, jr.fold_in(key, trials))
        trials += CHAINS * SEGMENT
        best.see(trials, np.asarray(state.best), np.asarray(state.best_seconds, float))
    return best.mapping()


class _Chains(eqx.Module):
    """Where every chain is, and the best it has seen."""

    order: Int[Array, "*chain node"]
    seconds: Float[Array, "*chain"]
    best: Int[Array, "*chain node"]
    best_seconds: Float[Array, "*chain"]


def _start(order: Int[np.ndarray, " node"], seconds: float) -> _Chains:
    orders, times = jnp.tile(jnp.asarray(order), (CHAINS, 1)), jnp.full(CHAINS, seconds, jnp.float32)
    return _Chains(orders, times, orders, times)


@eqx.filter_jit
def _anneal(question: Question, chains: _Chains, coldness: Float[Array, ""], key: Key[Array, ""]) -> _Chains:
    """One segment of swaps on every chain."""
    nodes = chains.order.shape[1]

    def swap(chain: _Chains, pair: Int[Array, "2"], luck: Float[Array, ""]) -> _Chains:
        order = chain.order.at[pair].set(chain.order[pair[::-1]])
        seconds = question.cost(question.share[:, order])
        taken = jnp.log(luck) < (chain.seconds - seconds) / seconds * coldness
        better = seconds < chain.best_seconds
        return _Chains(
            order=jnp.where(taken, order, chain.order),
            seconds=jnp.where(taken, seconds, chain.seconds),
            best=jnp.where(better, order, chain.best),
            best_seconds=jnp.where(better, seconds, chain.best_seconds),
        )

    # All luck at once, outside the loop: see `local_search.improve`.
    first, second, taken = jr.split(key, 3)
    one = jr.randint(first, (SEGMENT, CHAINS), 0, nodes)
    other = (one + jr.randint(second, (SEGMENT, CHAINS), 1, nodes)) % nodes
    luck = jr.uniform(taken, (SEGMENT, CHAINS), minval=1e-12)
    pairs = jnp.stack([one, other], axis=-1)
    chains, _ = jax.lax.scan(lambda state, given: (jax.vmap(swap)(state, *given), None), chains, (pairs, luck))
    return chains
