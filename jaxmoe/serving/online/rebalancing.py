"""Experts that are placed anew while engines serve: when, from which loads, and what the moves take.

Requests have topics, so the loads of experts drift. Time is cut into windows; steps of a window have the loads of the
requests that come in it, of all engines alike, on the slots of the time. Every so often a rule, any of moentwine's
balancers or EPLB, places experts by the loads of the interval before. Weights then move between GPUs, and each engine's
next step waits for the GPU that sends or receives the most.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.methods.moentwine.balancing import AbstractRule
from jaxmoe.methods.moentwine.migration import moves_between
from jaxmoe.placement.slots import EMPTY
from jaxmoe.serving.online.changes import Change
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.step_table import StepTable
from jaxmoe.serving.online.topics import Shares, TopicShares, loads, tokens_of, windows_of

Slots = Int[np.ndarray, "layer slot"]  # an expert each, or EMPTY; of one device after another
_moves = jax.jit(moves_between)


def imbalance(shares: Shares, held: Slots, devices: int) -> float:
    """Choices of the most loaded device over those of a mean one, a mean over layers."""
    copies = (held[:, :, None] == np.arange(shares.shape[1])).sum(axis=1)
    of_slot = np.take_along_axis(shares / np.maximum(copies, 1), np.maximum(held, 0), axis=1) * (held != EMPTY)
    return float((of_slot.reshape(len(held), devices, -1).sum(axis=2).max(axis=1) * devices).mean())


def experts_moved(before: Slots, after: Slots, devices: int) -> tuple[float, float]:
    """Experts that come to a device which did not have them, and the most that one device sends or receives."""
    slots = [np.asarray(each).reshape(len(each), devices, -1) for each in (before, after)]
    traffic = np.asarray(_moves(*slots, 1.0 - np.eye(devices), None).traffic)
    return float(traffic.sum()), float(max(traffic.sum(axis=0).max(), traffic.sum(axis=1).max()))


class Move(NamedTuple):
    """Experts that move at a time, in every engine, and the imbalance of the window to come without and with it."""

    at_s: float
    experts: float  # that come to a device, over all layers
    moved_bytes: float
    pause_s: float
    imbalance_before: float
    imbalance_after: float


class Planned(NamedTuple):
    """Steps over time of all engines, the moves among them, and the mean imbalance of windows."""

    changes: list[Change]
    moves: list[Move]
    imbalance: float


@dataclass(frozen=True, eq=False)
class Rebalancing:
    """Topics of requests, the slots that serve them, and what places these anew `every_s`, infinite for never.

    `table` gives steps by shares of experts, slots, and the number of the window.
    """

    shares: TopicShares
    start: Slots
    devices: int
    window_s: float
    table: Callable[[Shares, Slots, int], StepTable]
    rule: AbstractRule
    every_s: float = np.inf  # a multiple of window_s
    expert_bytes: float = 0.0  # of a layer's expert, on all devices that share it; `scale` layers for each of `shares`
    bytes_per_s: float = np.inf  # of what one device sends, and of what it receives
    scale: float = 1.0

    @property
    def identity(self) -> bytes:
        """Bytes that differ where what requests find may differ, beside what the requests and steps are."""
        numbers = (self.devices, self.window_s, repr(self.rule), self.every_s, self.bytes_per_s)
        arrays = (self.shares, self.start, *jax.tree.leaves(self.rule))  # of which a rule's text has the shapes alone
        found = b"".join(np.asarray(each).tobytes() for each in arrays)
        return found + repr((*numbers, self.expert_bytes, self.scale)).encode()

    def planned(self, requests: Requests, engines: int) -> Planned:
        """What requests find: a table for each window in which any come, and a pause where experts move before it."""
        window, row = np.unique(windows_of(requests, self.window_s), return_inverse=True)
        tokens = tokens_of(requests, row, len(self.shares), len(window))
        judged, held = [loads(each, self.shares) for each in tokens], self._slots(window, tokens)
        changes: list[Change] = []
        moves: list[Move] = []
        for at, own, (before, now) in zip(window.tolist(), judged, pairwise([self.start, *held]), strict=True):
            table, pause = self.table(own, now, at), 0.0
            if now is not before:
                moves.append(self._move(at, before, now, own))
                pause = moves[-1].pause_s
            changes += [Change(at * self.window_s, table, pause, each) for each in range(engines)]
        even = [imbalance(*each, self.devices) for each in zip(judged, held, strict=True)]
        return Planned(changes, moves, float(np.mean(even)))

    def _slots(self, window: Int[np.ndarray, " W"], tokens: Float[np.ndarray, "W topic"]) -> list[Slots]:
        """Slots of each window, from the requests of the last interval that was over, if any came in it."""
        found: list[Slots] = []
        held = self.start
        every = round(min(self.every_s / self.window_s, float(window[-1]) + 1))
        interval = window // every
        for at, now in enumerate(interval):
            seen = tokens[interval == now - 1].sum(axis=0)
            if at and now > interval[at - 1] and seen.any():
                held = self.placed(loads(seen, self.shares), held)
            found.append(held)
        return found

    def placed(self, seen: Shares, held: Slots) -> Slots:
        """Slots for loads that were seen, after those that are held."""
        slots = held.reshape(len(held), self.devices, -1)
        return np.asarray(_chosen(self.rule, jnp.asarray(seen), jnp.asarray(slots))).reshape(held.shape)

    def _move(self, at: int, before: Slots, after: Slots, judged: Shares) -> Move:
        moved, busiest = (self.scale * each for each in experts_moved(before, after, self.devices))
        return Move(
            at * self.window_s,
            moved,
            moved * self.expert_bytes,
            busiest * self.expert_bytes / self.bytes_per_s,
            imbalance(judged, before, self.devices),
            imbalance(judged, after, self.devices),
        )


@jax.jit
def _chosen(rule: AbstractRule, seen: jax.Array, slots: jax.Array) -> jax.Array:
    return rule(seen, slots)
