"""What is compared: a name, a placement, and how its partial results come together."""

from dataclasses import dataclass

import numpy as np

from jaxmoe.cli.inputs import Inputs
from jaxmoe.latency import is_tensor_parallel
from jaxmoe.placement import (
    Placement,
    PlanError,
    check_fits,
    expert_parallel_balanced,
    expert_parallel_random,
    hybrid,
    tensor_parallel,
)
from jaxmoe.traces import GatingTrace

TUNED = "tuned"
GATHERED = "tuned_gathered"  # what tuning found before tensor parallelism took over some layers
STANDARD = ("tp", "tp_both_ways", "ep_random", "ep_balanced", "hybrid", "hybrid_ring")


@dataclass(frozen=True)
class Rings:
    """That many equal rectangles of the mesh reduce by ring, one way round or both."""

    count: int
    both_ways: bool = False


@dataclass(frozen=True)
class Strategy:
    """A named placement of the layers of a run.

    `forced_rings` reduce in every layer. Otherwise results gather by the scenario's rule, except in layers that
    are tensor parallel: one ring over the whole mesh, both ways round, serves those. `comparable` is false where
    the accounting leaves something out. `note` is what a reader of its figures has to know.
    """

    name: str
    placement: Placement
    forced_rings: Rings | None = None
    fits: bool = True
    comparable: bool = True
    note: str = ""

    @property
    def rings(self) -> list[Rings | None]:
        """Rings of every layer; `None` where results gather."""
        if self.forced_rings is not None or self.placement.mode == "replicated":
            return [self.forced_rings] * len(self.placement.share)
        return [Rings(1, both_ways=True) if is_tensor_parallel(share) else None for share in self.placement.share]


def standard_strategies(inputs: Inputs) -> list[Strategy]:
    """The usual placements. Those that do not fit the memory are kept, and marked."""
    layers, experts, nodes = len(inputs.layer_ids), inputs.moe.num_experts, inputs.num_nodes
    counts = _choice_counts(inputs.trace)
    regions = inputs.scenario.strategies.hybrid_regions
    regional = hybrid(counts, inputs.shape, regions)
    spread = tensor_parallel(layers, experts, nodes)
    shares = {
        "ep_random": expert_parallel_random(layers, experts, nodes, inputs.scenario.seed),
        "ep_balanced": expert_parallel_balanced(counts, nodes),
        "hybrid": regional,
    }
    ring_note = "a ring inside each region as hd_moe counts it, without what the regions send each other"
    return [
        strategy(inputs, "tp", spread, Rings(1)),  # hd_moe Eq. 4: one way round
        strategy(inputs, "tp_both_ways", spread),
        *(strategy(inputs, name, share) for name, share in shares.items()),
        strategy(inputs, "hybrid_ring", regional, Rings(regions), ring_note),
    ]


def strategy(
    inputs: Inputs, name: str, share: np.ndarray, rings: Rings | None = None, leaves_out: str = ""
) -> Strategy:
    """Name sharded shares of this run's layers, and say whether they fit."""
    placement = Placement(share.astype(np.float32), inputs.shape, "sharded", inputs.layer_ids)
    try:
        check_fits(placement, float(inputs.model.expert_bytes), inputs.capacity(len(inputs.layer_ids)))
    except PlanError as error:
        return Strategy(name, placement, rings, fits=False, comparable=False, note=f"does not fit: {error}")
    return Strategy(name, placement, rings, comparable=not leaves_out, note=leaves_out)


def _choice_counts(trace: GatingTrace) -> np.ndarray:
    """How often every expert was chosen, int [layer, expert]."""
    layers = np.moveaxis(trace.experts, 1, 0).reshape(len(trace.layer_ids), -1)
    return np.stack([np.bincount(layer, minlength=trace.num_experts) for layer in layers])
