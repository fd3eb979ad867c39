"""The proven optimum of a small layer, with which the results of optimisers are compared.

All sharded placements count, on the very batches that the problem gives, by the mean of their total times.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float
from optimum_branch import descend, explore, open_bound, plant
from optimum_costs import Costs, as_sets, layer_costs

from jaxmoe.placement import PlanError
from jaxmoe.tune.bounds import lower_bound
from jaxmoe.tune.problem import BRIM, PlacementProblem
from jaxmoe.tune.settings import StopSwitch

TOLERANCE = 2e-6  # relative; what is left open between plans that take next to the same time
STARTS = 30  # descents from random sets before the search, so that it begins with a good plan
NODES = 500  # explored between two looks at the clock


@dataclass(frozen=True)
class Optimum:
    """The best plan found, and a bound that no plan beats; they meet, but for `TOLERANCE`, when `proven`."""

    share: Float[np.ndarray, "expert node"]
    seconds: float  # mean total time over the batches
    bound: float  # s
    proven: bool
    nodes_explored: int


def optimum(
    problem: PlacementProblem,
    layer: int,
    incumbent: Float[np.ndarray, "expert node"] | None = None,
    time_limit_s: float | None = None,
) -> Optimum:
    """The best sharded plan of the layer at position `layer`, on the batches that the problem gives.

    For few experts, at most two per token, on few nodes: the search is exhaustive. One batch without a memory limit
    is soon proven, eight experts on 2x3 nodes in seconds. Several batches, or a limit, need a linear programme for
    every set of hosts that the bounds leave, and may not be in time. `incumbent` is a legal plan to beat. When time
    is up, or at Ctrl-C, the best plan so far comes back unproven. A share of `optimum_costs.TOKEN_SHARE` names a host
    that does next to no work but is a good place to gather. Raises `PlanError` for other problems, with the remedy.
    """
    with StopSwitch(time_limit_s) as stop:
        costs = layer_costs(problem, layer)
        share = _start(costs, _legal(incumbent, costs), stop)
        best = costs.seconds(share)
        tables, tree = plant(costs, best)
        while tree.level[0] >= 0 and not stop.reason:
            if explore(tables, tree, best * (1 - TOLERANCE), NODES):
                found = costs.divide(tree.place)
                if found is not None and costs.seconds(found) < best:
                    share, best = found, costs.seconds(found)
    (floor,) = lower_bound(problem, jax.tree.map(lambda leaf: leaf[layer : layer + 1], problem.batches))
    bound = min(max(open_bound(tree), float(floor)), best * (1 - TOLERANCE))
    return Optimum(share, best, bound, bool(tree.level[0] < 0), int(tree.nodes[0]))


def _legal(incumbent: np.ndarray | None, costs: Costs) -> np.ndarray | None:
    if incumbent is None:
        return None
    shape = (costs.demand.shape[1], len(costs.room))
    if incumbent.shape != shape:
        raise PlanError(f"the incumbent has shape {incumbent.shape}; give shares [expert, node] of shape {shape}")
    overfull = incumbent.sum(axis=0) > costs.room * BRIM
    if overfull.any():
        node = int(np.argmax(overfull))
        raise PlanError(
            f"the incumbent puts {incumbent[:, node].sum():.4g} experts on node {node}, which has room for "
            f"{costs.room[node]:.4g}; give a plan that fits, or none"
        )
    return np.asarray(incumbent, float)


def _start(costs: Costs, incumbent: np.ndarray | None, stop: StopSwitch) -> Float[np.ndarray, "expert node"]:
    """A good plan to begin with: the best of the incumbent and what descent finds from random sets."""
    experts, sets = costs.demand.shape[1], costs.supply.shape[1]
    everywhere = np.full(experts, sets - 1)  # fits if anything does
    starts = [everywhere, *np.random.default_rng(0).integers(1, sets, (STARTS, experts))]
    found = {tuple(descend(costs, start)) for start in starts if not stop.reason}
    plans = [costs.divide(np.array(places)) for places in [tuple(everywhere), *sorted(found)]]
    if incumbent is not None:
        plans += [incumbent, costs.divide(as_sets(incumbent))]
    return min((plan for plan in plans if plan is not None), key=costs.seconds)
