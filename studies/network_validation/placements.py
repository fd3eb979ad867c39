"""What finite buffers change for placements of experts on an 8x8 mesh; see README.md.

100 random placements of 128 experts are timed in the event simulator with finite and with unbounded buffers, and in the
model with and without contention: Kendall's tau between all of them and the first (`ranking.csv`). Then the same swaps
of experts are searched under either model from the same start, and the ends are judged in the simulator (`search.csv`).
Everything for the base router, whose crossbar is as fast as its links, and for that of speed-up 2; and once more with
another order of packets, for a rank that a seed changes is not one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from booksim import VARIANTS, predict, router
from scipy.stats import kendalltau
from study import HERE

from jaxmoe.des import Fabric, replay_traffic
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import AbstractTimeModel
from jaxmoe.traces import synthetic_trace

SHAPE, EXPERTS, TOP_K, TOKENS, FLITS = (8, 8), 128, 4, 512, 8
NODES = SHAPE[0] * SHAPE[1]
ROUTERS = ("vc4_shuffle", "vc4s2_shuffle")
SEEDS, STEPS, SWAPS = 3, 30, 16

Row = dict[str, object]


@dataclass(frozen=True)
class Case:
    """A router in all four ways to time it, and how many tokens of every node choose every expert."""

    model: AbstractTimeModel
    topology: AbstractTopology
    congestion: AbstractTimeModel
    ideal: AbstractTopology
    fabric: Fabric
    unbounded: Fabric
    chosen: np.ndarray  # [node, expert]

    def traffic(self, node_of: np.ndarray) -> np.ndarray:
        """Flits of dispatch, [plan, source, destination], for the node of every expert, [plan, expert]."""
        here = np.eye(NODES)[node_of]
        matrices = FLITS * np.einsum("se,ped->psd", self.chosen, here)
        return matrices * (1 - np.eye(NODES))


def case_of(name: str, seed: int) -> Case:
    """Choices of a synthetic trace whose tokens live on the nodes in equal runs."""
    variant = next(variant for variant in VARIANTS if variant.name == name)
    trace = synthetic_trace(TOKENS, range(1), EXPERTS, TOP_K, skew=0.8, coactivation=0.3, reuse=0.2, seed=seed)
    chosen = np.zeros((NODES, EXPERTS))
    np.add.at(chosen, (np.repeat(np.arange(NODES), TOKENS // NODES)[:, None], np.asarray(trace.experts)[:, 0]), 1)
    topology, model, fabric = router(variant, SHAPE)
    ideal, congestion, unbounded = router(variant, SHAPE, ideal=True)
    return Case(model, topology, congestion, ideal, fabric, unbounded, chosen)


def random_plans(count: int, seed: int) -> np.ndarray:
    """The node of every expert, equally many on each, [plan, expert]."""
    draw = np.random.default_rng(seed)
    slots = np.arange(EXPERTS) * NODES // EXPERTS
    return np.stack([draw.permutation(slots) for _ in range(count)])


def simulated(fabric: Fabric, matrices: np.ndarray, seed: int) -> np.ndarray:
    return np.array([replay_traffic(fabric, matrix, "shuffled", seed).completion_s for matrix in matrices])


def told(model: AbstractTimeModel, topology: AbstractTopology, matrices: np.ndarray) -> np.ndarray:
    return np.asarray(predict(model, topology, jnp.asarray(matrices, jnp.float32))[0])


def ranking_rows(name: str, plans: int) -> Iterator[Row]:
    """Kendall's tau between the ranks of plans under finite buffers and every other way to time them."""
    for seed in range(SEEDS):
        case = case_of(name, seed)
        matrices = case.traffic(random_plans(plans, seed))
        finite = simulated(case.fabric, matrices, 0)
        others = {
            "simulator, finite buffers, another order": simulated(case.fabric, matrices, 1),
            "simulator, unbounded buffers": simulated(case.unbounded, matrices, 0),
            "model with contention": told(case.model, case.topology, matrices),
            "model without": told(case.congestion, case.ideal, matrices),
        }
        for other, values in others.items():
            best = finite[values.argmin()] / finite.min()
            yield {
                "router": name,
                "trace": seed,
                "plans": plans,
                "against": other,
                "kendall_tau": f"{kendalltau(finite, values).statistic:.3f}",
                "ratio": f"{(finite / values).mean():.4f}",
                "its_best_over_best": f"{best:.4f}",
            }


def searched(model: AbstractTimeModel, topology: AbstractTopology, case: Case, seed: int) -> np.ndarray:
    """The end of a search: of so many swaps of two experts the best is taken, if it is better."""
    draw, plan = np.random.default_rng(seed), random_plans(1, seed)[0]
    best = np.inf
    for _ in range(STEPS):
        tried = np.tile(plan, (SWAPS, 1))
        pairs = draw.integers(0, EXPERTS, (SWAPS, 2))
        rows = np.arange(SWAPS)
        tried[rows, pairs[:, 0]], tried[rows, pairs[:, 1]] = plan[pairs[:, 1]], plan[pairs[:, 0]]
        seconds = told(model, topology, case.traffic(tried))
        if seconds.min() < best:
            best, plan = seconds.min(), tried[seconds.argmin()]
    return plan


def search_rows(name: str) -> Iterator[Row]:
    """Both ends in the simulator with finite buffers, the mean over orders of packets."""
    for seed in range(SEEDS):
        case = case_of(name, seed)
        ends = {
            "with": searched(case.model, case.topology, case, seed),
            "without": searched(case.congestion, case.ideal, case, seed),
        }
        times = {
            key: [simulated(case.fabric, case.traffic(plan[None]), order)[0] for order in range(SEEDS)]
            for key, plan in ends.items()
        }
        start = simulated(case.fabric, case.traffic(random_plans(1, seed)), 0)[0]
        means = {key: float(np.mean(values)) for key, values in times.items()}
        yield {
            "router": name,
            "trace": seed,
            "start_cycles": start,
            "without_contention_cycles": f"{means['without']:.0f}",
            "with_contention_cycles": f"{means['with']:.0f}",
            "gain": f"{means['without'] / means['with']:.4f}",
            "orders_in_which_it_gains": sum(a > b for a, b in zip(times["without"], times["with"], strict=True)),
        }


if __name__ == "__main__":
    parser = study_options(__doc__)
    parser.add_argument("--plans", type=int, default=100)
    given = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    routers = [(name,) for name in ROUTERS]
    ranking = partial(ranking_rows, plans=given.plans)
    tables = [Table("ranking", ranking, routers, ("router",)), Table("search", search_rows, routers, ("router",))]
    for rows in make_tables(HERE, tables, given).values():
        print(*rows, sep="\n")
