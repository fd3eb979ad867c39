"""Should I rebalance? Placements and policies compared on later loads, end to end, with the memory that copies take.

Slots are made for the first half of the windows of a trace, and judged on the second: as the experts are numbered,
placed anew without more memory, with further slots, once or again and again. Copies take memory from the context of
requests, so where memory is tight fewer tokens fit in a step. Actions are compared by seconds of a token, end to end.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.config import Scenario, build_layer_model, build_model
from jaxmoe.config.build import build_even_parts
from jaxmoe.engine import EvenParts, Layer
from jaxmoe.engine.copies import ReplicaModel, replica_model
from jaxmoe.experiment.confidence import SampledGain
from jaxmoe.experiment.rebalancing import (
    Policy,
    moving_seconds,
    rebalanced,
)
from jaxmoe.experiment.replica_plans import token_seconds
from jaxmoe.experiment.slot_plans import balance
from jaxmoe.experiment.whole_model import Step, step_report
from jaxmoe.placement.placement import PlanError
from jaxmoe.placement.replica_choice import ReplicaChoice
from jaxmoe.placement.slots import loads_of_slots, new_copies
from jaxmoe.tune.replica_placement import ReplicaProblem, tuned_slots
from jaxmoe.units import GIGA

WORTH = 0.01  # a gain below this part is not worth an action
ERRORS = 1.0  # standard errors of a gain that counts
WINDOWS = 4  # at least, each of a step where the gain is to be sure
EXTRA = (1, 2)  # further slots of a rank
EVERY = (1, 4)  # windows between two placements

Slots = Int[np.ndarray, "layer slot"]
Windows = Float[np.ndarray, "window layer expert"]
Past = Float[np.ndarray, "past layer expert"]


@dataclass(frozen=True)
class Action:
    """A placement policy: `extra` slots on every rank for copies, beyond those that the experts need.

    `placed`: slots are placed for known loads. `every`: windows between two placements; `None` for a single one.
    """

    extra: int
    placed: bool
    every: int | None = None

    @property
    def name(self) -> str:
        if not self.placed:
            return "leave as it is"
        slots = "the slots there are" if not self.extra else f"{self.extra} more slot{'s' * (self.extra > 1)} a rank"
        if self.every is None:
            return f"place {slots}, once"
        return f"place {slots}, again every {'window' if self.every == 1 else f'{self.every} windows'}"


@dataclass(frozen=True)
class ActionOutcome:
    """Times, traffic and memory of one action on later loads, which its placement was not made for.

    `seconds`: of a step in each window, end to end, with the time of moving experts. `tokens`: of all ranks together,
    as many as fit in a step.
    """

    action: Action
    tokens: int
    seconds: Float[np.ndarray, " window"]
    layer_seconds: float  # mean of a layer with experts
    moving: float  # s of moving in a window
    bytes_moved: float  # in a window
    balance: dict[str, float]  # means over layers and windows, as `plan place` tells them
    rank_bytes: float  # of experts in memory
    history: Int[np.ndarray, "window layer slot"]  # slots in every window

    @property
    def slots(self) -> Slots:
        """Slots of the last window, [layer, slot]."""
        return self.history[-1]

    def step(self, ranks: int) -> Step:
        """The mean step, with the time of moving experts."""
        return Step(float(self.seconds.mean()), self.tokens, ranks)

    @property
    def per_token(self) -> Float[np.ndarray, " window"]:
        return self.seconds / max(self.tokens, 1)


@dataclass(frozen=True)
class Case:
    """A model that is served on a machine: `tokens` in a step, `steps` in a window of a trace."""

    scenario: Scenario
    tokens: int
    steps: int
    choice: ReplicaChoice = "nearest"
    moves: int = 8000  # of local search for each placement
    seed: int = 0

    def layer(self) -> Layer:
        return build_layer_model(self.scenario, "sharded")

    def beside(self) -> EvenParts | None:
        """Attention, dense FFNs and shared experts, passed by every token; `None` if the model states no attention."""
        return build_even_parts(self.scenario) if build_model(self.scenario.model).attention is not None else None


def actions_of(experts: int, ranks: int) -> list[Action]:
    """All actions to compare, the simplest first."""
    found = [Action(0, False), Action(0, True)]
    for extra in EXTRA:
        found += [Action(extra, True)] if -(-experts // ranks) + extra <= experts else []
    deepest = found[-1].extra
    return found + [Action(extra, True, every) for extra in sorted({0, deepest}) for every in EVERY]


def outcomes(case: Case, known: Past, later: Windows) -> list[ActionOutcome]:
    """Evaluate every action on the `later` windows, placed for the `known` ones before them.

    Actions whose weights leave no room for a token are left out. Raises `PlanError` where none fits.
    """
    layer, beside = case.layer(), case.beside()
    model = replica_model(layer, case.choice)
    found = [
        _outcome(case, model, beside, action, known, later)
        for action in actions_of(known.shape[2], layer.machine.num_nodes)
    ]
    fitting = [each for each in found if each is not None]
    if not fitting:
        raise PlanError(_too_little(layer, beside, *known.shape[1:]))
    return fitting


def _too_little(layer: Layer, beside: EvenParts | None, layers: int, experts: int) -> str:
    """Why no action leaves room for a token: the memory that a rank needs, and what it has."""
    needed = -(-experts // layer.machine.num_nodes) * layers * float(layer.costs.expert_bytes) + _others(layer, beside)
    room = float(np.min(np.asarray(layer.machine.capacity)))
    return (
        f"the model needs {needed / GIGA:.4g} GB of a rank for its weights, and --machine has {room / GIGA:.4g} GB, "
        "which leaves none for a token; use more or larger ranks, or weights of fewer bytes (--weight-bytes)"
    )


def _others(layer: Layer, beside: EvenParts | None) -> float:
    """Weights of a rank beside the experts, B."""
    parts = () if beside is None else (beside.attention, beside.dense, beside.shared)
    return sum(float(part.weight_bytes) for part in parts) / layer.machine.num_nodes


def _outcome(
    case: Case, model: ReplicaModel, beside: EvenParts | None, action: Action, known: Past, later: Windows
) -> ActionOutcome | None:
    layers, experts = known.shape[1:]
    ranks = model.layer.machine.num_nodes
    per_rank = -(-experts // ranks) + action.extra
    top_k = build_model(case.scenario.model).top_k
    size = float(model.layer.costs.expert_bytes)
    tokens = fitting_tokens(case, model.layer, beside, per_rank * layers * size)
    if tokens < 1:
        return None
    before, after = (_scaled(windows, float(tokens * top_k)) for windows in (known, later))
    problem = ReplicaProblem(model, np.swapaxes(before, 0, 1), per_rank * ranks)
    start = np.tile(np.arange(per_rank * ranks) % experts, (layers, 1))
    if not action.extra:
        start = np.tile(np.arange(per_rank * ranks) * experts // (per_rank * ranks), (layers, 1))
    if action.placed:
        start = tuned_slots(problem, case.moves, steps=0, seed=case.seed).slots
    policy = Policy("keep") if action.every is None else Policy("tuned", action.every, moves=case.moves // 4)
    run = rebalanced(problem, after, before, start, policy, case.steps, case.seed)
    others = 0.0 if beside is None else float(beside(jnp.asarray(float(tokens))).total)
    loads = [loads_of_slots(held, window, ranks) for held, window in zip(run.slots, after, strict=True)]
    seconds = token_seconds(model, run.slots, after, tokens, top_k, case.seed)
    return ActionOutcome(
        action,
        tokens,
        seconds + others + run.moving / case.steps,
        float(seconds.mean() / layers),
        float(run.moving.mean()),
        float(run.experts.mean() * size),
        balance(np.concatenate(loads)),
        per_rank * layers * size,
        run.slots,
    )


def _scaled(windows: Windows, choices: float) -> Windows:
    """Loads scaled to a step of `choices` expert choices; a layer without any load gets equal ones."""
    total = windows.sum(axis=2, keepdims=True)
    share = np.where(total > 0, windows / np.where(total > 0, total, 1), 1 / windows.shape[2])
    return share * choices


def fitting_tokens(case: Case, layer: Layer, beside: EvenParts | None, expert_bytes: float) -> int:
    """The number of tokens in a step whose KV caches fit beside the weights, at most `case.tokens`."""
    if layer.machine.capacity is None or beside is None:
        return case.tokens
    ranks, room = layer.machine.num_nodes, float(np.min(np.asarray(layer.machine.capacity)))
    free = room - _others(layer, beside) - expert_bytes
    context = float(beside.attention.bytes_per_token)
    return int(np.clip(free * ranks / context if context else np.inf * free, 0, case.tokens))


# The choice among actions.


@dataclass(frozen=True)
class Advice:
    """The recommended action and its gain over keeping the placement.

    `sampled`: the gain of that action in parts of the seconds of a token, end to end, or, where none is recommended,
    of the best other one.
    """

    chosen: ActionOutcome
    outcomes: list[ActionOutcome]
    sampled: SampledGain
    break_even: float  # steps after which placing anew has paid for what it moves
    moving: float  # s of it
    moved_bytes: float
    deployed: Slots  # of that action, made for all windows

    @property
    def gain(self) -> float:
        """Of the recommended action, a part of the seconds of a token."""
        return self.sampled.mean if self.chosen.action.placed else 0.0

    @property
    def sentence(self) -> str:
        if not self.chosen.action.placed:
            return (
                f"Leave the placement as it is: nothing else gains {WORTH:.0%} surely, the best {self.sampled.mean:.1%}"
                f" ({self.sampled.told_interval}; {self.sampled.told_confidence})."
            )
        pays = f"moving takes {self.moving:.3g} s and pays after {self.break_even:,.0f} steps"
        if np.isinf(self.break_even):
            pays = "while it runs, moving does not pay for itself: deploy it at a restart"
        action = self.chosen.action.name
        gained = f"{self.gain:.1%} less time a token end to end on later loads ({self.sampled.told_interval})"
        return f"{action[0].upper()}{action[1:]}: {gained}; {pays} ({self.sampled.told_confidence})."


def advise(case: Case, windows: Windows) -> Advice:
    """Recommend an action: placements are made for the first half of the windows and evaluated on the second.

    A more complex action replaces a simpler one only if its mean gain exceeds both `WORTH` and the gain's standard
    error over windows. Raises `PlanError` for fewer than four windows.
    """
    if len(windows) < WINDOWS:
        raise PlanError(
            f"the loads are of {len(windows)} window{'s' * (len(windows) != 1)}, expected {WINDOWS} or more, to "
            "evaluate on later ones; record longer, or give an npz with `counts` [windows, layers, experts]"
        )
    half = len(windows) // 2
    found = outcomes(case, windows[:half], windows[half:])
    chosen = found[0]
    for other in found[1:]:
        gain = 1 - other.per_token / chosen.per_token
        if gain.mean() > WORTH and gain.mean() > ERRORS * _error(gain):
            chosen = other
    change = _change(case, found[0], chosen) if chosen.action.placed else (0.0, 0.0, 0.0)
    tokens = windows.sum(axis=(0, 2)).max() / build_model(case.scenario.model).top_k
    gains = [1 - each.per_token / found[0].per_token for each in ([chosen] if chosen is not found[0] else found[1:])]
    best = max(gains, key=np.mean, default=np.zeros(half))
    sampled = SampledGain(best, float(tokens), WORTH, case.seed, least=float(WINDOWS * case.tokens))
    return Advice(chosen, found, sampled, *change, _for_all(case, chosen, windows))


def _change(case: Case, base: ActionOutcome, chosen: ActionOutcome) -> tuple[float, float, float]:
    """Steps until the gain of a change has paid for its movement of weights; seconds and bytes of that movement.

    For a placement made once: from the slots before, where extra slots hold experts in order from 0, to the new ones.
    For repeated placements: the mean of a window.
    """
    model = replica_model(case.layer(), case.choice)
    size = float(model.layer.costs.expert_bytes)
    seconds, moved = chosen.moving, chosen.bytes_moved
    if chosen.action.every is None:
        experts, before = build_model(case.scenario.model).num_experts, base.slots
        if chosen.slots.shape != before.shape:
            before = np.tile(np.arange(chosen.slots.shape[1]) % experts, (len(before), 1))
        seconds = float(moving_seconds(model, before, chosen.slots, experts).sum())
        moved = float(new_copies(before, chosen.slots, experts, model.layer.machine.num_nodes).sum()) * size
    # What a step gains, without what moving takes of it.
    gain = float((base.per_token - chosen.per_token).mean() * chosen.tokens + chosen.moving / case.steps)
    return (seconds / gain if gain > 0 else np.inf), seconds, moved


def _error(values: Float[np.ndarray, " window"]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _for_all(case: Case, chosen: ActionOutcome, windows: Windows) -> Slots:
    """The slots to deploy: the chosen action's placement, made for all windows, [layer, slot]."""
    if not chosen.action.placed:
        return chosen.slots
    model, top_k = replica_model(case.layer(), case.choice), build_model(case.scenario.model).top_k
    loads = np.swapaxes(_scaled(windows, float(chosen.tokens * top_k)), 0, 1)
    return tuned_slots(ReplicaProblem(model, loads, chosen.slots.shape[1]), case.moves, seed=case.seed).slots


def advice_report(advice: Advice, ranks: int) -> dict[str, Any]:
    """The advice and all outcomes for `summary.json`; times in seconds."""
    base = advice.outcomes[0]
    return {
        "advice": advice.sentence,
        "action": advice.chosen.action.name,
        "gain": advice.gain,
        **advice.sampled.report(),
        "break_even_steps": None if np.isinf(advice.break_even) else advice.break_even,
        "moving_s": advice.moving,
        "moving_B": advice.moved_bytes,
        "actions": {
            each.action.name: {
                "tokens": each.tokens,
                "token_s": float(each.per_token.mean()),
                **step_report(each.step(ranks)),
                "layer_s": each.layer_seconds,
                "gain": float((1 - each.per_token / base.per_token).mean()),
                "moving_s_of_a_window": each.moving,
                "moving_B_of_a_window": each.bytes_moved,
                "experts_B_of_a_rank": each.rank_bytes,
                "balance": each.balance,
            }
            for each in advice.outcomes
        },
    }
