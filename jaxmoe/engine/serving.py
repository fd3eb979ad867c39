"""Which copy of an expert serves a choice: the rules of `jaxmoe.placement.copies`, on batches of tokens.

Each names copies in place of experts, so that a batch of choices and a share of copies take the ways of all others.
Gradients see the chosen copy as given.
"""

import abc
from dataclasses import replace
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.placement.copies import ALIKE, NO_COPY, ByDraw, ByHome, Copies, LeastWork, Serving
from jaxmoe.relax import AbstractSupport, HardSupport
from jaxmoe.traces.batches import Batch


class AbstractServing(eqx.Module):
    """A rule of one layer; `vmap` adds leading axes. `of_expert` are the copies of every expert, as in `Copies`."""

    of_expert: eqx.AbstractVar[Int[Array, "*lead expert most"]]

    @property
    def knows(self) -> Literal["nothing", "batch"]:
        """Of what other tokens it has to know at run time: none, or those of this batch."""
        return "nothing"

    def choices_in_turn(self, tokens: int | Float[Array, ""]) -> int | Float[Array, ""]:
        """How many choices so many tokens take one after another, all of a token's as one; 0: none."""
        return 0

    def __call__(self, share: Float[Array, "copy node"], batch: Batch, support: AbstractSupport | None = None) -> Batch:
        """The batch with the copy that serves each choice in place of its expert."""
        if batch.chosen is not None:
            raise ValueError(
                "a gate with a derivative chooses experts, not copies; give it no temperature, or no copies"
            )
        copies = self.copies(share, batch, HardSupport() if support is None else support)
        return replace(batch, experts=jnp.where(batch.experts < 0, batch.experts, copies))

    @abc.abstractmethod
    def copies(
        self, share: Float[Array, "copy node"], batch: Batch, support: AbstractSupport
    ) -> Int[Array, "token top_k"]:
        """The copy that serves each choice; of no meaning for a missing one."""

    @abc.abstractmethod
    def rule(self) -> Serving:
        """The rule of one layer in the plan's own terms."""

    def described(self, share: Float[np.ndarray, "copy node"]) -> Copies:
        """The copies of one layer as a plan describes them, for those who serve by a rule without the model."""
        of_expert, copy_of = np.asarray(self.of_expert), np.zeros(len(share), int)
        expert, place = np.nonzero(of_expert != NO_COPY)
        copy_of[of_expert[expert, place]] = expert
        return Copies(copy_of[None], np.asarray(share)[None], self.rule())


class HomeServing(AbstractServing):
    """The copy that the table names for the node where a token lives."""

    of_expert: Int[Array, "*lead expert most"]
    table: Int[Array, "*lead expert node"]

    def copies(self, share, batch, support):
        return self.table[batch.experts, batch.sources(share.shape[1])[:, None]]

    def rule(self) -> ByHome:
        return ByHome(np.asarray(self.table)[None])


class DrawServing(AbstractServing):
    """The copy in whose slice of [0, 1) the recorded draw of a choice lies; `borders` are the upper ends of slices."""

    of_expert: Int[Array, "*lead expert most"]
    borders: Float[Array, "*lead expert most"]

    def copies(self, share, batch, support):
        place = (self.borders[batch.experts] <= batch.draw[..., None]).sum(axis=-1)
        return self.of_expert[batch.experts, place]

    def rule(self) -> ByDraw:
        of_expert, parts = np.asarray(self.of_expert), np.diff(np.asarray(self.borders, float), prepend=0)
        there = of_expert != NO_COPY
        found = np.zeros(int(of_expert.max()) + 1)
        found[of_expert[there]] = parts[there]
        return ByDraw(found[None])


class LeastWorkServing(AbstractServing):
    """Tokens in their order, and choices of each in theirs, by the work so far and the nodes that a token visits anew.

    Work counts choices by the parts of them that nodes compute. `together`, a token chooses once, for all its choices.
    Relaxed, the work of a node counts as far as it hosts.
    """

    of_expert: Int[Array, "*lead expert most"]
    work: Float[Array, "*lead"]
    visits: Float[Array, "*lead"]
    together: bool = eqx.field(static=True, default=False)

    @property
    def knows(self) -> Literal["nothing", "batch"]:
        return "batch"

    def choices_in_turn(self, tokens: int | Float[Array, ""]) -> int | Float[Array, ""]:
        return tokens

    def copies(self, share, batch, support):
        share, support = jax.lax.stop_gradient((share, support))
        present = support.presence(support.amount(share))
        weight = jnp.where(batch.experts < 0, 0, batch.weight[:, None])  # [token, top_k]
        return (self._by_token if self.together else self._by_choice)(share, present, batch.experts, weight)

    def _by_choice(
        self,
        share: Float[Array, "copy node"],
        present: Float[Array, "copy node"],
        experts: Int[Array, "token top_k"],
        weight: Float[Array, "token top_k"],
    ) -> Int[Array, "token top_k"]:
        tokens, top_k = experts.shape
        by_work = self.work * share.shape[1] / weight.sum()
        first = jnp.arange(tokens * top_k) % top_k == 0

        def serve(so_far: tuple[Array, Array], choice: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
            load, visited = so_far
            expert, weight, first = choice
            visited = jnp.where(first, 0, visited)
            able = self.of_expert[expert]
            part, hosts = share[able], present[able]
            highest = (hosts * load + weight * part).max(axis=1)
            cost = by_work * highest + self.visits * (hosts * (1 - visited)).sum(axis=1)
            at = _least(jnp.where(able == NO_COPY, jnp.inf, cost))
            return (load + weight * part[at], jnp.maximum(visited, hosts[at] * (weight > 0))), able[at]

        nothing = jnp.zeros(share.shape[1], share.dtype), jnp.zeros(share.shape[1], share.dtype)
        _, copies = jax.lax.scan(serve, nothing, (experts.ravel(), weight.ravel(), first))
        return copies.reshape(tokens, top_k)

    def _by_token(
        self,
        share: Float[Array, "copy node"],
        present: Float[Array, "copy node"],
        experts: Int[Array, "token top_k"],
        weight: Float[Array, "token top_k"],
    ) -> Int[Array, "token top_k"]:
        by_work = self.work * share.shape[1] / weight.sum()

        def serve(load: Float[Array, " node"], token: tuple[Array, Array]) -> tuple[Array, Array]:
            experts, weight = token
            able = self.of_expert[experts].T  # [place, choice]
            hosts = (present[able] * (weight > 0)[:, None]).max(axis=1)  # [place, node]
            added = jnp.einsum("k,pkn->pn", weight, share[able])
            cost = by_work * (hosts * load + added).max(axis=1) + self.visits * hosts.sum(axis=1)
            at = _least(cost)
            return load + added[at], able[at]

        return jax.lax.scan(serve, jnp.zeros(share.shape[1], share.dtype), (experts, weight))[1]

    def rule(self) -> LeastWork:
        return LeastWork(np.asarray(self.work, float)[None], np.asarray(self.visits, float)[None], self.together)


def _least(cost: Float[Array, " option"]) -> Int[Array, ""]:
    """The first option of the least cost; those that are equal but for rounding are equal."""
    return jnp.argmax(cost <= cost.min() * (1 + ALIKE))


def serving_of(copies: Copies) -> AbstractServing:
    """The rule of a plan's copies, leaves [layer, ...]."""
    of_expert = jnp.asarray(copies.of_expert, jnp.int32)
    match copies.serving:
        case ByHome(table):
            return HomeServing(of_expert, jnp.asarray(table, jnp.int32))
        case ByDraw():
            return DrawServing(of_expert, jnp.asarray(copies.borders))
        case LeastWork(work, visits, together):
            by_work, by_visits = (jnp.asarray(number, jnp.float32) for number in (work, visits))
            return LeastWorkServing(of_expert, by_work, by_visits, together)
