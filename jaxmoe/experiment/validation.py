"""How well the model agrees with the event simulator; and gamma of hd_moe Eq. 3, fitted to the latter (Fig. 5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.des import replay_layer
from jaxmoe.engine import LayerTime, evaluate
from jaxmoe.experiment.evaluation import Replay, describe, replay, score
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.experiment.stage_timer import Report, StageTimer
from jaxmoe.experiment.strategies import Strategy
from jaxmoe.placement import expert_parallel_random
from jaxmoe.placement.strategies import filled_in_order
from jaxmoe.traces import sample_batches
from jaxmoe.tune.node_balance import GammaFit, fit_gamma, node_estimates

Figures = dict[str, float | int | None]
STAGES = ("dispatch", "compute", "combine", "total")
COMPARED = ("communication", "total")


def agreement(model_s: np.ndarray, simulated_s: np.ndarray) -> Figures:
    """R2 of the prediction itself (no line is fitted), and its mean and largest absolute error in percent.

    `None` where it has no meaning: R2 of equal times, errors of times that are all 0.
    """
    model, simulated = np.ravel(model_s), np.ravel(simulated_s)
    spread = ((simulated - simulated.mean()) ** 2).sum()
    some = simulated > 0
    error = 100 * np.abs(model[some] / simulated[some] - 1)
    return {
        "points": model.size,
        "r2": float(1 - ((simulated - model) ** 2).sum() / spread) if spread > 0 else None,
        "mean_abs_error_percent": float(error.mean()) if error.size else None,
        "max_abs_error_percent": float(error.max()) if error.size else None,
    }


@dataclass(frozen=True)
class Trial:
    """One strategy at one batch size, in the model and in the simulator, both with the same schedule."""

    strategy: Strategy
    tokens: int
    model: LayerTime
    replay: Replay

    @property
    def simulated(self) -> LayerTime:
        return self.replay.time


def run_trial(inputs: Inputs, strategy: Strategy, tokens: int, clock: StageTimer, report: Report) -> Trial:
    """Evaluate and replay a strategy on batches of so many tokens."""
    batches = inputs.first_batches(inputs.batches_of(tokens))
    with clock.stage("evaluate"):
        model = score(inputs, strategy, batches, as_simulated=True)
    stage = f"simulate {strategy.name}, {tokens} tokens"
    with clock.stage("simulate"):
        simulated = replay(inputs, strategy, batches, lambda done, total: report(stage, done, total))
    return Trial(strategy, tokens, model, simulated)


def validation_report(layer_ids: Sequence[int], trials: list[Trial]) -> dict[str, Any]:
    """All trials by strategy and batch size, and the agreement over all of them. Times are seconds."""
    strategies: dict[str, dict[str, Any]] = {}
    for trial in trials:
        placement = trial.strategy.placement
        note = {"fits": trial.strategy.fits, "note": trial.strategy.note}
        note |= {"mode": placement.mode, "exchange": [*placement.exchange]}
        entry = strategies.setdefault(trial.strategy.name, note | {"batch_tokens": {}})
        entry["batch_tokens"][str(trial.tokens)] = _trial_report(layer_ids, trial)
    return {"strategies": strategies, "agreement": trials_agreement(trials)}


def _trial_report(layer_ids: Sequence[int], trial: Trial) -> dict[str, Any]:
    count = trial.simulated.total.shape[1]
    return {
        "mean": _both(trial, ()),
        "agreement": trials_agreement([trial]),
        "layers": [
            {"layer_id": layer, "batches": [_both(trial, (row, column)) for column in range(count)]}
            for row, layer in enumerate(layer_ids)
        ],
    }


def _both(trial: Trial, at: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Seconds of model and simulator for the batch of a layer, or as means over all."""

    def times(of: LayerTime) -> dict[str, float]:
        return {f"{name}_s": float(getattr(of, name)[at].mean()) for name in STAGES}

    free = {"free_running_s": float(trial.replay.free_running[at].mean())}
    return {"model": times(trial.model), "simulated": times(trial.simulated) | free}


def trials_agreement(trials: list[Trial]) -> dict[str, Figures]:
    """Agreement of model and simulator on communication and on the total time, over all these trials."""
    return {
        what: agreement(
            np.concatenate([np.ravel(getattr(trial.model, what)) for trial in trials]),
            np.concatenate([np.ravel(getattr(trial.simulated, what)) for trial in trials]),
        )
        for what in COMPARED
    }


# How the event simulator's communication follows hd_moe's linear node estimate: gamma of Eq. 3, fitted (Fig. 5).

PLANS = 8  # of each kind
BALANCED = "full nodes"  # the kind that node balance makes, and gamma is for
SEED = 0


@dataclass(frozen=True)
class NodeTraffic:
    """Seconds of combine for random plans of one layer, a batch each: estimated, by the link model, and simulated."""

    kind: list[str]
    estimate: np.ndarray  # [plan]
    link_model: np.ndarray
    simulated: np.ndarray

    def of(self, kind: str) -> "NodeTraffic":
        """The plans of one kind alone."""
        chosen = np.array(self.kind) == kind
        times = (seconds[chosen] for seconds in (self.estimate, self.link_model, self.simulated))
        return NodeTraffic([kind] * int(chosen.sum()), *times)

    @property
    def fit(self) -> GammaFit:
        return fit_gamma(self.estimate, self.simulated)


def fitted_gamma(inputs: Inputs) -> GammaFit:
    """Gamma of hd_moe Eq. 3, fitted to simulated combines of random plans with full nodes in the run's first layer."""
    return node_traffic(inputs, inputs.scenario.workload.batch_tokens).of(BALANCED).fit


def node_traffic(inputs: Inputs, tokens: int, plans: int = PLANS) -> NodeTraffic:
    """Estimate, model and simulate so many random plans of each kind on the run's first layer."""
    shares = random_plans(inputs, plans)
    kinds, stacked = [kind for kind, _ in shares], jnp.asarray(np.stack([share for _, share in shares]), jnp.float32)
    batches = sample_batches(inputs.trace, tokens, len(shares), SEED)
    first = jax.tree.map(lambda leaf: leaf[0], batches)
    estimate = np.diagonal(np.asarray(node_estimates(inputs.model, stacked, first)))
    alone = jax.tree.map(lambda leaf: leaf[:, None], first)  # plan by plan, as layers with one batch
    link_model = evaluate(inputs.model, stacked, alone).combine[:, 0]
    layer = describe(inputs, "sharded", inputs.scenario.costs.exchange)
    simulated = [
        replay_layer(layer, share, jax.tree.map(lambda leaf, at=at: np.asarray(leaf[at]), first)).stages["combine"]
        for at, (_, share) in enumerate(shares)
    ]
    return NodeTraffic(kinds, estimate.astype(float), np.asarray(link_model, float), np.array(simulated))


def random_plans(inputs: Inputs, plans: int) -> list[tuple[str, np.ndarray]]:
    """Plans of three kinds: whole experts, full nodes (experts cut where a node is full), experts on several nodes."""
    rng, experts, nodes = np.random.default_rng(SEED), inputs.moe.num_experts, inputs.num_nodes
    load = np.bincount(inputs.trace.experts[:, 0].ravel(), minlength=experts) + 0.1
    frequency, part = load / load.sum(), np.full(nodes, 1 / nodes)

    def full() -> np.ndarray:
        return filled_in_order(frequency, part, rng.permutation(experts), rng.permutation(nodes))

    def several() -> np.ndarray:
        hosts = rng.integers(2, max(3, min(nodes, 8) + 1), size=experts)
        rows = [np.isin(np.arange(nodes), rng.choice(nodes, min(count, nodes), replace=False)) for count in hosts]
        return np.stack(rows) / np.stack(rows).sum(axis=1, keepdims=True)

    whole = expert_parallel_random(plans, experts, nodes, SEED).astype(float)
    return [
        *(("whole experts", share) for share in whole),
        *(("full nodes", full()) for _ in range(plans)),
        *(("several hosts", several()) for _ in range(plans)),
    ]
