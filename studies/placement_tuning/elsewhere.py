"""Plans made elsewhere, under the exchanges and the rules at run time that a tuned plan may have.

`published` is HD-MoE's plan of the layer, and `published_rebalanced` has its experts divided over the same hosts anew.
With more slots than experts, equally many on every node, balancers put whole copies on single nodes for the loads of
the text that is tuned on: `eplb`, and `balanced_slots` of jaxmoe, which is at least as even as FlashLB wherever that is
recorded (`studies/replicas`). A copy serves by the best of several rules, and in `eplb_by_draw` by EPLB's own, which
draws among the copies of an expert.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
from cases import Case, Run
from scoring import SEED, Found

from jaxmoe.experiment.inputs import Inputs
from jaxmoe.placement.copies import ByDraw, ByHome, Copies, LeastWork, Serving
from jaxmoe.placement.eplb import eplb
from jaxmoe.tune import PlacementProblem
from jaxmoe.tune.evaluator import Evaluator
from jaxmoe.tune.regions import LOOK_BATCHES
from jaxmoe.tune.replicas import balanced_slots
from jaxmoe.tune.results import Ranked
from jaxmoe.tune.settings import StopSwitch

Searches = dict[str, Callable[[], Found]]  # what finds a plan, by strategy
VISITS = (0.0, 0.01, 0.1, 1.0)  # what a node that is visited anew costs under least work, in mean work of nodes


@dataclass(frozen=True)
class SlotProblem(PlacementProblem):
    """The problem with copies that are given."""

    given: Copies | None = None

    @property
    def copies(self) -> Copies:  # type: ignore[override]
        assert self.given is not None
        return self.given

    @property
    def num_experts(self) -> int:
        return self.copies.copy_of.shape[1]


def published(case: Case, run: Run, problem: PlacementProblem, inputs: Inputs) -> Searches:
    """The published plan, if there is one, and the same with its experts divided over their hosts anew."""
    share = case.published_share(run, inputs)
    if share is None:
        return {}
    return {
        "published": lambda: under_best(problem, share[None]),
        "published_rebalanced": lambda: rebalanced(problem, share[None]),
    }


def slots(problem: PlacementProblem, copies: int) -> Searches:
    """Balancers' copies, so many for each expert on average; none where nodes cannot have equally many slots."""
    count, nodes = copies * problem.num_experts, problem.num_nodes
    if count % nodes:
        return {}
    loads = problem.expert_frequency

    def by_eplb(*rules: str) -> Found:
        return served_best(problem, eplb(loads, count, nodes), rules)

    return {
        "eplb": by_eplb,
        "eplb_by_draw": lambda: by_eplb("draw"),
        "balanced_slots": lambda: served_best(problem, balanced_slots(loads, count, nodes, seed=SEED)),
    }


def served_best(problem: PlacementProblem, held: np.ndarray, rules: tuple[str, ...] = ()) -> Found:
    """Copies in slots [1, slot], node by node, under the best of these rules, or of all, and its best exchange."""
    nodes, (_, count) = problem.num_nodes, held.shape
    share = np.eye(nodes, dtype=np.float32)[np.arange(count) // (count // nodes)][None]
    common = {field.name: getattr(problem, field.name) for field in fields(problem)}
    able = {}
    for name, rule in serving_rules(held[0], np.asarray(problem.model.machine.topology.hop_counts())).items():
        if not rules or name in rules:
            served_by = "least_work" if isinstance(rule, LeastWork) else "home"
            able[name] = SlotProblem(**common | {"served_by": served_by, "given": Copies(held, share, rule)})
    looks = {name: _ranked(each, share, LOOK_BATCHES).seconds.mean() for name, each in able.items()}
    best = min(looks, key=looks.__getitem__)
    return under_best(able[best], share)._replace(served_by=best)


def serving_rules(held: np.ndarray, hops: np.ndarray) -> dict[str, Serving]:
    """Rules by which copies [copy] of experts may serve: `nearest` to where a token lives and `in_turn` over the nodes
    where tokens live know nothing at run time, nor does `draw`; least work knows the batch.
    """
    count = np.bincount(held)
    node = np.arange(len(held)) // (len(held) // len(hops))
    rules: dict[str, Serving] = {
        "nearest": ByHome(_homes(held, lambda able: hops[:, node[able]] == hops[:, node[able]].min(axis=1)[:, None])),
        "in_turn": ByHome(_homes(held, lambda able: np.ones((len(hops), len(able)), bool))),
        "draw": ByDraw(1 / count[held][None]),
    }
    ones = np.ones(1)
    return rules | {f"least_work_{visits:g}": LeastWork(ones, visits * ones) for visits in VISITS}


def _homes(held: np.ndarray, may: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The copy that serves every node, int [1, expert, node]: those that `may` [node, copy] of an expert in turn."""

    def of_expert(expert: int) -> Iterator[int]:
        able = np.flatnonzero(held == expert)
        for node, allowed in enumerate(may(able)):
            options = able[allowed]
            yield int(options[node % len(options)])

    return np.array([[list(of_expert(expert)) for expert in range(held.max() + 1)]])


def _ranked(problem: PlacementProblem, share: np.ndarray, batches: int | None = None) -> Ranked:
    """A plan under its best exchange, on batches that may be seen, or on so many of them."""
    with StopSwitch() as stop:
        return Evaluator(problem, SEED, stop, most_batches=batches).under_best(share, problem.gathers)


def under_best(problem: PlacementProblem, share: np.ndarray) -> Found:
    """A plan [1, expert, node] under its best exchange."""
    return Found(problem, share, str(_ranked(problem, share).exchange[0]))


def rebalanced(problem: PlacementProblem, share: np.ndarray) -> Found:
    """A plan [1, expert, node] whose experts are divided over their hosts anew, under its best exchange."""
    with StopSwitch() as stop:
        evaluator, plans = Evaluator(problem, SEED, stop), share[:, None].astype(float)
        exchange = problem.gathers[str(evaluator.under_best(share, problem.gathers).exchange[0])]
        plans, _ = evaluator.rebalance(plans, evaluator.score(plans, exchange), exchange)
    return under_best(problem, plans[:, 0])
