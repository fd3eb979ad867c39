"""Slots for copies of experts, tuned through the model of a layer, with the cost of moving weights in the objective.

Beyond moentwine, whose Algorithm 1 looks at loads alone and copies one expert at a time. Three steps, relaxed first:

1. *Budgets*: what part of all choices every node should compute, if choices could go anywhere. By gradient descent
   through the model, so a node behind busy links, or one that is slow, gets less.
2. *Copies*: experts get further copies one after the other, the one whose copies have the most to do first; experts
   that have copies now keep them within a slack.
3. *Places*: copies that fit in their node's budget and slack stay where they are. The others are dealt, the heaviest
   first, each to the nearest node whose budget it fits. What fits a heavier copy fits a lighter one too, so no choice
   among such nodes costs a later copy its place.

Several slacks and numbers of copies are tried, Algorithm 1 and what is resident as well. The exact time of a layer and
the price of what has to move choose one of them.
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.engine.counts import CountModel
from jaxmoe.hardware import Machine
from jaxmoe.methods.moentwine.balancing import AbstractRule
from jaxmoe.methods.moentwine.migration import FAR, Slots
from jaxmoe.methods.moentwine.shadow_slots import (
    Distances,
    ExpertLoads,
    Native,
    Shadow,
    fill_shadow_slots,
    kept_in_place,
)
from jaxmoe.placement.slots import EMPTY, node_loads
from jaxmoe.relax import AbstractReduction, HardMax, SmoothMax, least_at

Objective = Literal["time", "loads"]
SLACKS = (0.02, 0.05, 0.1, 0.2)  # above a node's budget, and by which an expert keeps the copies that it has
FILLED = (0.0, 0.25, 0.5, 0.75, 1.0)  # parts of the shadow slots that hold a copy
WARMEST, COLDEST = 0.2, 0.01  # temperatures of the smooth maximum, from the first step to the last
LEARNING_RATE = 0.05
UNEVEN = 5.0  # busiest link over the mean of all while experts move, as measured for Algorithm 1 and EPLB

HIDDEN = 0.1  # the price of a hop that costs inference nothing, over one that it waits for: copies serve the later


def hop_price(machine: Machine, expert_bytes: Float[Array, ""]) -> Float[Array, ""]:
    """Seconds that inference waits for an expert that moves one hop: moves share all links, unevenly."""
    return UNEVEN * expert_bytes / machine.topology.link_bandwidth.sum()


class GradientSlots(AbstractRule):
    """The objective is the seconds of a layer over `horizon` iterations, plus `hop_seconds` for every hop of an expert.

    By `loads` it is instead of the layer the products of the busiest node alone, as other balancers have it. The first
    `native` slots keep what they hold.
    """

    model: CountModel
    distance: Distances
    horizon: Float[Array, ""]
    hop_seconds: Float[Array, ""]
    native: int = eqx.field(static=True)
    objective: Objective = eqx.field(static=True, default="time")
    steps: int = eqx.field(static=True, default=60)

    def __call__(self, expected: Float[Array, "layer expert"], resident: Slots) -> Slots:
        budget = self.budgets(expected.sum(axis=1).mean())
        return jax.vmap(lambda *given: self._layer(budget, *given))(expected, resident)

    def budgets(self, choices: Float[Array, ""]) -> Float[Array, " node"]:
        """The part of `choices` that every node should compute, sum 1."""
        nodes = self.distance.shape[0]
        if self.objective == "loads":
            return jnp.full(nodes, 1 / nodes)
        optimiser = optax.adam(LEARNING_RATE)

        def step(state, temperature: Float[Array, ""]):
            weights, memory = state

            def cost(weights: Float[Array, " node"]) -> Float[Array, ""]:
                # Relative to the cost, so that steps do not depend on units.
                return jnp.log(self.relaxed(jax.nn.softmax(weights) * choices, SmoothMax(temperature)))

            change, memory = optimiser.update(jax.grad(cost)(weights), memory)
            return (optax.apply_updates(weights, change), memory), None

        start = jnp.zeros(nodes)
        temperatures = jnp.geomspace(WARMEST, COLDEST, self.steps)
        (weights, _), _ = jax.lax.scan(step, (start, optimiser.init(start)), temperatures)
        ends = jax.nn.softmax(jnp.stack([start, weights]))  # equal parts, and the tuned ones
        exact = jax.vmap(lambda parts: self.relaxed(parts * choices, HardMax()))(ends)
        return ends[jnp.argmin(exact)]

    def relaxed(self, rows: Float[Array, " node"], reduction: AbstractReduction) -> Float[Array, ""]:
        """Seconds of a layer whose nodes compute so many choices, each with one expert more than its own to read."""
        return self.model.of_nodes(rows, jnp.full_like(rows, self.native + 1.0), reduction).total

    def _layer(self, budget: Float[Array, " node"], loads: ExpertLoads, resident: Shadow) -> Shadow:
        fixed, shadow = resident[:, : self.native], resident[:, self.native :]
        if shadow.shape[1] == 0:
            return resident
        greedy = fill_shadow_slots(loads, fixed, shadow, self.distance, "nearest")
        dealt = self._candidates(budget * loads.sum(), loads, fixed, shadow)
        plans = jnp.concatenate([shadow[None], greedy[None], dealt])
        hops = self._hops(resident, loads.shape[0])
        costs = jax.vmap(lambda plan: self._cost(plan, loads, fixed, hops))(plans)
        return jnp.concatenate([fixed, kept_in_place(plans[jnp.argmin(costs)], shadow)], axis=1)

    def _candidates(
        self, budget: Float[Array, " node"], loads: ExpertLoads, fixed: Native, shadow: Shadow
    ) -> Int[Array, "plan node slot"]:
        marks = jnp.asarray([round(part * shadow.size) for part in FILLED])

        def of_slack(slack: Float[Array, ""]) -> Int[Array, "part node slot"]:
            copies = copies_by_load(loads, shadow, slack, marks)
            limit = budget * (1 + slack)
            # One after the other: a batch of loops runs as long as its longest, and few copies take few turns.
            return jax.lax.map(lambda each: deal_copies(each, limit, loads, fixed, shadow, self.distance), copies)

        return jax.lax.map(of_slack, jnp.asarray(SLACKS)).reshape(-1, *shadow.shape)

    def _cost(
        self, shadow: Shadow, loads: ExpertLoads, fixed: Native, hops: Float[Array, "expert node"]
    ) -> Float[Array, ""]:
        """The objective of shadow slots that hold these, exactly."""
        slots = jnp.concatenate([fixed, shadow], axis=1)
        if self.objective == "time":
            seconds = self.model(slots, loads, HardMax()).total
        else:
            busiest = node_loads(slots, loads) * self.model.costs.flops_per_token_expert
            seconds = (busiest / self.model.machine.die.flops).max()
        moved = jnp.where(shadow == EMPTY, 0, hops[shadow, jnp.arange(len(shadow))[:, None]])
        return self.horizon * seconds + self.hop_seconds * moved.sum()

    def _hops(self, resident: Int[Array, "node place"], experts: int) -> Float[Array, "expert node"]:
        """Hops of every expert to every node that may get it."""
        far = jnp.full((experts + 1, len(resident)), FAR, self.distance.dtype)
        return far.at[resident].min(self.distance[:, None])[:experts]  # EMPTY goes to the last


def copies_by_load(
    loads: ExpertLoads, shadow: Shadow, slack: Float[Array, ""], further: Int[Array, " number"]
) -> Int[Array, "number expert"]:
    """Copies of every expert with so many `further` ones, ascending, each to the expert whose copies have most to do.

    An expert with fewer copies than `shadow` has of it counts for as much more as the slack. No expert gets more copies
    than there are nodes.
    """
    experts, nodes = loads.shape[0], shadow.shape[0]
    numbers = jnp.arange(experts)
    had = 1 + jnp.zeros(experts + 1, jnp.int32).at[shadow].add(1)[:experts]  # EMPTY goes to the last

    def copy(_: Int[Array, ""], copies: Int[Array, " expert"]) -> Int[Array, " expert"]:
        each = loads / copies * jnp.where(copies < had, 1 + slack, 1)
        most = least_at(jnp.where(copies < nodes, -each, 1))
        return copies + ((numbers == most) & (copies < nodes))

    def until(copies: Int[Array, " expert"], more: Int[Array, ""]) -> tuple[Array, Array]:
        copies = jax.lax.fori_loop(0, more, copy, copies)
        return copies, copies

    return jax.lax.scan(until, jnp.ones(experts, jnp.int32), jnp.diff(further, prepend=0))[1]


def deal_copies(
    copies: Int[Array, " expert"],
    limit: Float[Array, " node"],
    loads: ExpertLoads,
    fixed: Native,
    resident: Shadow,
    distance: Distances,
) -> Shadow:
    """Shadow slots with all copies beyond the native one, on nodes that keep within `limit` choices where that can be.

    What is resident stays where it is wanted and fits. Of nodes that a copy fits, the one nearest to its native node
    gets it, of those as near the one left with least room. Where it fits nowhere it takes the slot of the lightest copy
    whose node it fits, and that one moves on; or else it goes to the node that then has the least over its limit. A
    node gets no second copy; a copy that has no node left is left out.
    """
    (nodes, slots), experts = resident.shape, loads.shape[0]
    each = loads / copies
    home = jnp.zeros(experts + 1, jnp.int32).at[fixed].set(jnp.arange(nodes)[:, None])  # EMPTY goes to the last
    filled, heat, wanted = _staying(copies, limit, each, fixed, resident)
    order = jnp.argsort(-each)
    queue = jnp.repeat(order, wanted[order], total_repeat_length=nodes * slots)
    weight = jnp.where(filled == EMPTY, jnp.inf, each[filled])
    start = _Dealing(jnp.asarray(0), jnp.asarray(EMPTY), heat, filled, weight)
    nodes_in_order, places = jnp.arange(nodes), jnp.arange(slots)

    def place(at: _Dealing) -> _Dealing:
        expert = jnp.where(at.evicted == EMPTY, queue[at.turn], at.evicted)
        own = each[expert]
        near, after = distance[home[expert]], (at.heat + own) / limit
        new = ~((fixed == expert).any(axis=1) | (at.filled == expert).any(axis=1))  # no second copy
        free = new & (at.filled == EMPTY).any(axis=1)
        key = jnp.where(free, jnp.where(after <= 1, near - 0.5 * after, FAR + after), jnp.inf)
        # What fits nowhere may take the slot of a lighter copy, which then looks for another one.
        swapped = (at.heat + own)[:, None] - at.weight <= limit[:, None]
        lighter = jnp.where((at.weight < own) & swapped & new[:, None], at.weight, jnp.inf)
        evicts = (key.min() >= FAR) & jnp.isfinite(lighter.min())
        node = least_at(jnp.where(evicts, lighter.min(axis=1), key))
        slot = jnp.where(evicts, jnp.argmin(lighter[node]), jnp.argmax(at.filled[node] == EMPTY))
        gets = evicts | jnp.isfinite(key[node])
        change = jnp.where(gets, own, 0) - jnp.where(evicts, at.weight[node, slot], 0)
        here = gets & (nodes_in_order == node)[:, None] & (places == slot)
        return _Dealing(
            at.turn + (at.evicted == EMPTY),
            jnp.where(evicts, at.filled[node, slot], EMPTY),
            jnp.where(nodes_in_order == node, at.heat + change, at.heat),
            jnp.where(here, expert, at.filled),
            jnp.where(here, own, at.weight),
        )

    def going_on(at: _Dealing) -> Bool[Array, ""]:
        return (at.turn < wanted.sum()) | (at.evicted != EMPTY)

    return jax.lax.while_loop(going_on, place, start).filled


def _staying(
    copies: Int[Array, " expert"], limit: Float[Array, " node"], each: ExpertLoads, fixed: Native, resident: Shadow
) -> tuple[Shadow, Float[Array, " node"], Int[Array, " expert"]]:
    """Shadow slots with what stays where it is, the choices of every node then, and copies that are still wanted."""
    (nodes, slots), experts = resident.shape, len(each)
    heat, wanted = jnp.where(fixed == EMPTY, 0, each[fixed]).sum(axis=1), copies - 1
    filled = jnp.full_like(resident, EMPTY)
    for slot in range(slots):
        expert = resident[:, slot]
        turn = ((expert[:, None] == expert) & jnp.tri(nodes, dtype=bool)).sum(axis=1)  # of those that have it
        stays = (expert != EMPTY) & (turn <= wanted[expert]) & (heat + each[expert] <= limit)
        filled = filled.at[:, slot].set(jnp.where(stays, expert, EMPTY))
        heat = heat + jnp.where(stays, each[expert], 0)
        wanted = wanted - jnp.zeros(experts + 1, jnp.int32).at[filled[:, slot]].add(1)[:experts]
    return filled, heat, wanted


class _Dealing(NamedTuple):
    """State of the loop that deals copies to slots."""

    turn: Int[Array, ""]  # in the queue
    evicted: Int[Array, ""]  # the expert that lost its slot, and comes before the queue
    heat: Float[Array, " node"]
    filled: Shadow
    weight: Float[Array, "node slot"]  # choices of each copy, infinitely many where there is none
