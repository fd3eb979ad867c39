"""How the event simulator's communication follows hd_moe's linear node estimate: gamma of Eq. 3, fitted (Fig. 5)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.des import replay_layer
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import Inputs
from jaxmoe.latency import evaluate
from jaxmoe.placement import expert_parallel_random
from jaxmoe.placement.strategies import filled_in_order
from jaxmoe.traces import sample_batches
from jaxmoe.tune.node_traffic import GammaFit, fit_gamma, node_estimates

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
    """Fitted on random plans with full nodes of the run's first layer."""
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
