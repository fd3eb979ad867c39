"""Expert slots on a serving machine: batches of counts for tuning, and exact times and replays of single tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.config import Scenario, load_hardware, load_model
from jaxmoe.des import LayerReplay, replay_plan
from jaxmoe.engine import LayerTime, evaluate
from jaxmoe.engine.copies import ReplicaModel
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.rebalancing import step_seconds
from jaxmoe.placement.replica_choice import serving_nodes, serving_parts
from jaxmoe.placement.slots import copies_of_slots, share_of_slots
from jaxmoe.traces import Batch
from jaxmoe.tune.replica_placement import ReplicaProblem, TunedSlots, starting_slots, tuned_slots

EXCHANGE = "token_home"  # a token's results come back to the rank where it lives, as all expert-parallel engines do it
Slots = Int[np.ndarray, "layer slot"]
Windows = Float[np.ndarray, "window layer expert"]
FIT_BATCHES = 16
# Costs of an engine with FP8 weights, FP8 in dispatch and BF16 in combine.
FP8_DISPATCH = {"bytes_per_element": 2.0, "dispatch_bytes_per_element": 1.0, "weight_bytes_per_element": 1.0}


def serving_scenario(
    machine: Path, model: str, tokens: int, context: int = 1024, costs: Mapping[str, float] | None = None
) -> Scenario:
    """A serving engine on a machine: `tokens` of all ranks in a step, with bytes of the model where no costs are given.

    `costs` are keys of the section costs of a scenario.
    """
    return Scenario.model_validate(
        {
            "name": f"{Path(model).stem} on {machine.stem}",
            "hardware": load_hardware(machine),
            "model": load_model(model, "--model"),
            "workload": {
                "batch_tokens": tokens,
                "context_tokens": context,
                "trace": {"kind": "synthetic", "tokens": max(tokens, 8192)},
            },
            "costs": {"metadata_bytes_per_choice": 8, "exchange": EXCHANGE, **(costs or {})},
            "strategies": {"hybrid_regions": 1},
        }
    )


def drawn_loads(
    windows: Float[np.ndarray, "window layer expert"], choices: int, batches: int, seed: int
) -> Float[np.ndarray, "layer batch expert"]:
    """Choices of every expert in batches of so many choices, drawn one by one.

    Every other batch is drawn from all windows together, like a mixture of requests, and the rest from single windows
    in turn, so that differences between windows count too.
    """
    rng = np.random.default_rng(seed)
    share = windows + 1e-12
    share = share / share.sum(axis=2, keepdims=True)
    drawn = np.where(np.arange(batches) % 2, np.arange(batches) // 2 % len(share), -1)
    picked = np.concatenate([share, share.mean(axis=0)[None]])[drawn]  # [batch, layer, expert]
    return np.swapaxes(rng.multinomial(choices, picked), 0, 1).astype(float)


@dataclass(frozen=True)
class PlacedForTime:
    """Tuned slots, and mean seconds of a layer by name of the candidate.

    `fitted`: of all candidates, on the batches they were made for. `later`: of the tuned slots and the starting ones
    such as EPLB's, made for the first half of the windows, on the second; `None` for a single window.
    """

    slots: Slots
    fitted: dict[str, float]
    later: dict[str, float] | None


def placed_for_time(problem: ReplicaProblem, windows: Windows, choices: int, seed: int = 0) -> PlacedForTime:
    """Slots tuned for batches of so many choices drawn from all windows. The problem's own loads are ignored."""

    def made(windows: Windows, seed: int) -> TunedSlots:
        return tuned_slots(replace(problem, loads=drawn_loads(windows, choices, FIT_BATCHES, seed)), seed=seed)

    found, half, later = made(windows, seed), len(windows) // 2, None
    if half:
        first, judged = windows[:half], drawn_loads(windows[half:], choices, FIT_BATCHES, seed + 1)
        named = {"tuned": made(first, seed).slots}
        asked = replace(problem, loads=drawn_loads(first, choices, FIT_BATCHES, seed))
        named |= starting_slots(asked)
        later = {name: float(step_seconds(problem.model, slots, judged).mean()) for name, slots in named.items()}
    return PlacedForTime(found.slots, {name: float(value.mean()) for name, value in found.values.items()}, later)


def served_by(
    model: ReplicaModel, slots: Slots, batches: Batch, experts: int
) -> Int[np.ndarray, "layer batch token top_k"]:
    """The node that serves every choice of every token, as the engine picks among copies."""
    nodes = model.layer.machine.num_nodes
    held = copies_of_slots(slots, experts, nodes).astype(np.float32)
    source, draw = np.asarray(batches.sources(nodes)), np.asarray(batches.draw)
    chosen = np.asarray(batches.experts)
    served = np.empty(chosen.shape, np.int32)
    for layer, copies in enumerate(held):
        parts = np.asarray(serving_parts(jnp.asarray(copies), model.tier, model.tiers, model.choice))
        for batch in range(chosen.shape[1]):
            at = layer, batch
            served[at] = serving_nodes(parts, chosen[at], source[at], draw[at])
    return served


def judged(model: ReplicaModel, slots: Slots, batches: Batch, experts: int) -> LayerTime:
    """Exact times of tokens, [layer, batch]: one copy of a vector for every rank that a token visits."""
    share = jnp.asarray(share_of_slots(slots, experts, model.layer.machine.num_nodes))
    served = jnp.asarray(served_by(model, slots, batches, experts))
    return evaluate(model.layer, share, batches, None, served).as_numpy()


def replayed(inputs: Inputs, model: ReplicaModel, slots: Slots, batches: Batch) -> list[list[LayerReplay]]:
    """Replay the batches under these slots in the event simulator; results [layer][batch]."""
    experts = inputs.moe.num_experts
    share = share_of_slots(slots, experts, inputs.num_nodes)
    return replay_plan(
        describe(inputs, "sharded", EXCHANGE), share, batches, served=served_by(model, slots, batches, experts)
    )


def token_seconds(
    model: ReplicaModel,
    slots: Int[np.ndarray, "window layer slot"],
    loads: Windows,
    tokens: int,
    top_k: int,
    seed: int,
) -> Float[np.ndarray, " window"]:
    """Seconds of a step in every window, all layers together, of so many tokens drawn from its loads."""
    windows, layers, experts = loads.shape
    drawn = [drawn_tokens(row, tokens, top_k, seed + number) for number, row in enumerate(loads.reshape(-1, experts))]
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves)[:, None], *drawn)
    seconds = judged(model, slots.reshape(windows * layers, -1), batches, experts).total
    return seconds.reshape(windows, layers).sum(axis=1)


def drawn_tokens(loads: Float[np.ndarray, " expert"], tokens: int, top_k: int, seed: int) -> Batch:
    """Tokens that choose different experts, more likely those with more load (Gumbel top-k)."""
    rng = np.random.default_rng(seed)
    score = np.log(loads + 1e-9 * loads.sum() + 1e-30) + rng.gumbel(size=(tokens, len(loads)))
    experts = np.argsort(-score, axis=1)[:, :top_k]
    return Batch(
        jnp.asarray(experts, jnp.int32),
        jnp.asarray(rng.random(tokens), jnp.float32),
        jnp.asarray(rng.random(experts.shape), jnp.float32),
        jnp.ones(tokens),
    )
