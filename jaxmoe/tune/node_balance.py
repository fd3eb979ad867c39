"""Node balance: experts spread over logical clusters by a mixed-integer programme (hd_moe IV-C1, Eq. 5-12).

Variables are P[e, c], the share of expert e on cluster c, Z[e, c], whether it is there at all, and the times of
compute and communication:

    minimise    t_comp + 2 gamma t_comm                                         (11, 12)
    subject to  P <= Z, sum_c P = 1                                             (5, 6)
                t_comp >= work of the cluster / its FLOP/s                      (7)
                t_comm >= bytes of the cluster / bandwidth                      (8)
                t_comp <= even work + t_comm of tensor parallelism              (9, 10)

Eq. 8 sums over groups of experts chosen together and counts an expert once in each group that has it, so it comes
to sum_e f_e Z[e, c]. Memory is a constraint of ours: sum_e P[e, c] is at most the room of the cluster. Of Eq. 9
the upper bound is kept, as a time, so that clusters may differ; where no plan known is within it, as with tight
memory or links so fast that R_CC is large, the compute time of a known plan takes its place.

HiGHS gets help that leaves the optimum as it is, up to the ties below. The even plan, a vertex that balances
compute alone, is known first. No better plan computes for longer than the even plan's objective leaves when the
least communication is taken off, so a cluster holds only so much of a hot expert: P <= most Z with most < 1, and
every expert has at least so many hosts. Plans of equal objective are told apart by their volume in all, which
counts a hundredth of the largest. HiGHS finds the clusters' symmetries itself.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from threading import Thread
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from jaxtyping import Array, Float
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from jaxmoe.engine import Layer
from jaxmoe.network import sharded_visits
from jaxmoe.placement.rounding import SLACK, SMALLEST_SHARE, rebalance
from jaxmoe.relax import HardSupport
from jaxmoe.traces import Batch
from jaxmoe.tune.problem import PlacementProblem
from jaxmoe.tune.settings import StopSwitch

LOOK_S = 0.05  # between two looks at the stop switch
TIE_WEIGHT = 0.01  # of the clusters' mean volume beside the largest
TIGHTENINGS = 3  # rounds in which bounds on compute and communication sharpen each other

Share = Float[np.ndarray, "expert node"]


@dataclass(frozen=True)
class NodeBalance:
    """A plan for one layer on logical clusters, what it takes by Eq. 12, and how near the optimum it is known to be."""

    share: Share  # rows sum to 1
    seconds: float  # t_comp + 2 gamma t_comm of `share`
    bound: float  # s: no plan within Eq. 5-10 takes less
    gap: float  # (seconds - bound) / seconds
    status: str  # "optimal", or why the solver ended: "time limit", "interrupted", or what it said
    wall_s: float
    relaxed: bool  # the plan is of a linear programme, because one was asked for or no incumbent was found


def node_balance(
    problem: PlacementProblem,
    layer: int,
    gamma: float,
    time_limit_s: float = 45.0,
    stop: StopSwitch | None = None,
    relaxed: bool = False,
    mip_rel_gap: float = 1e-3,
    report: Callable[[float], None] = lambda part: None,
) -> NodeBalance:
    """Balance the nodes of one layer, given by its row in the trace, within about `time_limit_s`.

    With `relaxed`, Z may be fractional: a linear programme, whose plan is rounded to a vertex on the same hosts. A
    legal plan always results: where the solver has none in time, or `stop` strikes, it is the even plan. `report`
    gets the part of the time limit that is spent. Raises `PlanError` where the experts do not fit.
    """
    begun, stop = time.perf_counter(), stop or StopSwitch()
    costs = _costs_of(problem, layer, gamma)
    share = costs.balanced(np.ones((costs.frequency.size, costs.work.size), bool))
    solved, bound, found = None, costs.value_bound(np.inf), False
    if not stop.reason:
        solved = _solve(_programme(costs, share, relaxed), time_limit_s, mip_rel_gap, stop, report)
    if solved is not None and solved.x is not None:
        spread, hosts = solved.x[:-2].reshape(2, *share.shape)
        balanced = costs.balanced((spread > SMALLEST_SHARE) & (relaxed | (hosts > 0.5)))
        found = costs.value(balanced) <= costs.value(share)
        share = balanced if found else share
    if solved is not None:
        bound = max(bound, _bound(solved, relaxed))
    report(1.0)
    value = costs.value(share)
    bound = min(bound, value)
    return NodeBalance(
        share=share,
        seconds=value * costs.even_s,
        bound=bound * costs.even_s,
        gap=(value - bound) / value,
        status=_status(solved, stop),
        wall_s=time.perf_counter() - begun,
        relaxed=relaxed or not found,
    )


@dataclass(frozen=True)
class _Costs:
    """Numbers of Eq. 7 and 8 for one layer. Times are relative to `even_s`, which even work takes."""

    frequency: Float[np.ndarray, " expert"]  # sums to 1
    work: Float[np.ndarray, " node"]  # time of all of the layer's work on one node
    visits: float  # time of a message for every choice of every token
    tensor_parallel: float  # compute and one stage of communication of tensor parallelism, Eq. 9
    room: Float[np.ndarray, " node"]
    gamma: float
    even_s: float

    def compute(self, share: Share) -> float:
        return float((self.work * (self.frequency @ share)).max())

    def communication(self, hosts: np.ndarray) -> float:
        return float(self.visits * (self.frequency @ hosts).max())

    def value(self, share: Share) -> float:
        """The objective, Eq. 12."""
        return self.compute(share) + 2 * self.gamma * self.communication(share > 0)

    def balanced(self, hosts: np.ndarray) -> Share:
        """The fastest division of experts over these hosts, a vertex: few of them are needed."""
        return rebalance(hosts, self.frequency[None], self.work, self.room)

    def most(self, compute: float) -> Share:
        """The largest share of every expert on every node where compute takes at most so long."""
        return np.minimum(np.minimum(1, self.room * SLACK), compute / np.outer(self.frequency, self.work))

    def fewest_hosts(self, compute: float) -> np.ndarray:
        """How many hosts every expert needs where compute takes at most so long, int [expert]."""
        held = np.sort(self.most(compute), axis=1)[:, ::-1].cumsum(axis=1)
        return np.minimum((held < 1 - 1e-6).sum(axis=1) + 1, len(self.work))

    def least_communication(self, compute: float) -> float:
        """Least communication time of a plan whose compute time is at most `compute`: every expert has enough hosts."""
        mean = self.frequency @ self.fewest_hosts(compute) / len(self.work)
        return float(self.visits * max(self.frequency.max(), mean))

    def value_bound(self, compute: float) -> float:
        """Lower bound on the objective of every plan whose compute time is at most `compute`, relative to `even_s`."""
        return 1 + 2 * self.gamma * self.least_communication(compute)

    def most_compute(self, share: Share) -> float:
        """Upper bound on the compute time of every plan that is better than `share` and within Eq. 9."""
        longest = value = self.value(share)
        for _ in range(TIGHTENINGS):
            longest = value - 2 * self.gamma * self.least_communication(longest)
        return min(longest, max(self.tensor_parallel, self.compute(share)))


def _costs_of(problem: PlacementProblem, layer: int, gamma: float) -> _Costs:
    model, choices = problem.model, problem.batch_tokens * problem.trace.top_k
    alone = choices * float(model.costs.flops_per_token_expert) / np.asarray(model.machine.die.flops, float)
    even_s = 1 / float(np.sum(1 / alone))
    message = float(model.costs.combine_bytes) / float(mean_bandwidth(model)) / even_s
    return _Costs(
        frequency=problem.frequency[layer],
        work=alone / even_s,
        visits=choices * message,
        tensor_parallel=1 + problem.batch_tokens * message,
        room=problem.room,
        gamma=gamma,
        even_s=even_s,
    )


def _programme(costs: _Costs, known: Share, relaxed: bool) -> dict[str, Any]:
    """Arguments of `milp` for plans as good as `known`; variables are P, Z, t_comp, t_comm."""
    (experts, nodes), longest = known.shape, costs.most_compute(known)
    one, zero = sp.csr_matrix(np.ones((nodes, 1))), None
    by_expert, by_node = sp.kron(sp.eye(experts), np.ones((1, nodes))), sp.eye(nodes)
    limited = np.flatnonzero(np.isfinite(costs.room))
    held = sp.kron(np.ones((1, experts)), by_node, format="csr")[limited]
    not_above = np.full(nodes, -np.inf)
    rows: list[tuple[Any, Any, Any]] = [  # columns of P, Z, t_comp, t_comm; least and most
        (
            [sp.eye(known.size), -sp.diags(costs.most(longest).ravel()), zero, zero],
            np.full(known.size, -np.inf),
            np.zeros(known.size),
        ),
        ([by_expert, zero, zero, zero], np.ones(experts), np.ones(experts)),
        ([zero, by_expert, zero, zero], costs.fewest_hosts(longest), np.full(experts, np.inf)),
        ([sp.kron(costs.frequency, sp.diags(costs.work)), zero, -one, zero], not_above, np.zeros(nodes)),
        ([zero, sp.kron(costs.frequency * costs.visits, by_node), zero, -one], not_above, np.zeros(nodes)),
        ([zero, zero, sp.eye(1), sp.eye(1) * (2 * costs.gamma)], [-np.inf], [costs.value(known) * SLACK]),
        ([held, zero, zero, zero], not_above[limited], costs.room[limited] * SLACK),
    ]
    blocks, least, most = zip(*rows, strict=True)
    ties = 2 * costs.gamma * TIE_WEIGHT * costs.visits * np.repeat(costs.frequency, nodes) / nodes
    return {
        "c": np.concatenate([np.zeros(known.size), ties, [1, 2 * costs.gamma]]),
        "constraints": LinearConstraint(sp.bmat(blocks, format="csr"), np.concatenate(least), np.concatenate(most)),
        "bounds": Bounds(
            np.append(np.zeros(2 * known.size), [1, costs.least_communication(longest)]),
            np.append(np.ones(2 * known.size), [longest * SLACK, np.inf]),
        ),
        "integrality": np.concatenate([np.zeros(known.size), np.full(known.size, 0 if relaxed else 1), np.zeros(2)]),
    }


def _solve(
    programme: dict[str, Any], time_limit_s: float, gap: float, stop: StopSwitch, report: Callable[[float], None]
) -> OptimizeResult | None:
    """Solves the programme by HiGHS in a thread of its own, which leaves Python free to look at `stop` meanwhile.

    Returns `None` once `stop` is set, for HiGHS cannot hand out the best plan so far. The thread then ends by its own
    time limit, or with the process.
    """
    answer: Future[OptimizeResult] = Future()

    def work() -> None:
        try:
            answer.set_result(milp(**programme, options={"time_limit": time_limit_s, "mip_rel_gap": gap}))
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    begun = time.monotonic()
    while not stop.reason:
        report(min((time.monotonic() - begun) / max(time_limit_s, LOOK_S), 1.0))
        try:
            return answer.result(timeout=LOOK_S)
        except NotYet:
            continue
    return None


def _bound(solved: OptimizeResult, relaxed: bool) -> float:
    """A bound on the objective without the ties, which add at most their weight to it; 0 where none is known."""
    # What an unfinished linear programme has is no bound.
    bound = (solved.fun if solved.status == 0 else None) if relaxed else solved.mip_dual_bound
    return 0.0 if bound is None else float(bound) / (1 + TIE_WEIGHT)


def _status(solved: OptimizeResult | None, stop: StopSwitch) -> str:
    if solved is None:
        return stop.reason or "interrupted"
    return {0: "optimal", 1: "time limit"}.get(solved.status, solved.message)


# hd_moe's linear estimate of communication: what the busiest node sends, over one link's bandwidth (Eq. 2, 3).
#
# Eq. 2 prints a product over a token's experts; the text below it says that a node counts when *any* of them lives
# there, and that is what is counted here. The estimate knows nothing of paths: `gamma` scales it to simulated time.


@dataclass(frozen=True)
class GammaFit:
    """How simulated time follows the estimate: `gamma` times it, with the coefficient of determination `r2`."""

    gamma: float
    r2: float


def mean_bandwidth(model: Layer) -> Float[Array, ""]:
    """BW of Eq. 2 where links differ: their mean, B/s."""
    return jnp.mean(model.machine.topology.link_bandwidth)


def node_estimate(
    model: Layer, share: Float[Array, "expert node"], batch: Batch, bandwidth: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Estimated seconds of one stage, dispatch or combine, for a sharded plan (hd_moe Eq. 2).

    The largest volume of any node over `bandwidth`, B/s: a hidden vector for every token any of whose experts is
    there.
    """
    visits = sharded_visits(share, batch, HardSupport())
    return jnp.max(visits.weight @ visits.visited) * model.costs.combine_bytes / bandwidth


@eqx.filter_jit
def node_estimates(
    model: Layer,
    shares: Float[Array, "plan expert node"],
    batches: Batch,
    bandwidth: Float[Array, ""] | float | None = None,
) -> Float[Array, "plan batch"]:
    """The estimate for every plan of a layer and every batch, leaves [batch, ...]; links' mean bandwidth by default."""
    rate = mean_bandwidth(model) if bandwidth is None else bandwidth
    return jax.lax.map(lambda share: jax.vmap(lambda batch: node_estimate(model, share, batch, rate))(batches), shares)


def fit_gamma(estimates: Float[np.ndarray, "*cases"], simulated: Float[np.ndarray, "*cases"]) -> GammaFit:
    """Least squares through the origin, simulated = gamma * estimate, both in s (hd_moe Eq. 3).

    `r2` is 1 - sum of squared residuals / sum of squared deviations of `simulated` from its mean. Without an
    intercept it may be below 0. Raises `ValueError` where nothing can be fitted.
    """
    x, y = np.ravel(estimates).astype(float), np.ravel(simulated).astype(float)
    if not np.any(x) or np.ptp(y) == 0:
        raise ValueError(
            f"gamma cannot be fitted to {x.size} cases with estimates up to {x.max(initial=0):.3g} s and simulated "
            f"times from {y.min(initial=np.inf):.3g} to {y.max(initial=0):.3g} s; give times of plans that differ and "
            "communicate"
        )
    gamma = float(x @ y / (x @ x))
    return GammaFit(gamma, 1 - float(np.sum((y - gamma * x) ** 2) / np.sum((y - y.mean()) ** 2)))
