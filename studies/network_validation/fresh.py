"""The model on MoE traffic that no choice in it has seen: drawn anew, judged by the simulator; see README.md.

The simulator stands for BookSim2: it agrees with it to the cycle on every record of these set-ups. Traffic is drawn as
the reference says its own was, with other seeds and as often: tokens that choose different nodes, popular ones more
often (Gumbel top-k); of every four matrices one is a dispatch of top 4 transposed, as combine is. Writes `fresh.csv`.

Takes half a minute of one core.
"""

from collections.abc import Iterator
from itertools import product

import jax.numpy as jnp
import numpy as np
from booksim import VARIANTS, predict, router
from study import HERE, by_class

from jaxmoe.des import replay_traffic
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table

SHAPES = ((4, 4), (4, 8), (3, 8), (5, 5), (8, 8))
SKEWS, FLITS, SEEDS = (0.8, 1.0, 1.2), 8, 2
TOKENS = {2: 32, 4: 32, 8: 16}  # of every node, by how many nodes each chooses
ORDERS = 3  # seeds of shuffled packets, as the reference has
SET_UPS = ("vc4s2_shuffle", "vc4_shuffle")


def drawn(nodes: int, skew: float, top_k: int, seed: int) -> np.ndarray:
    """Flits from every node to every other in a dispatch."""
    rng = np.random.default_rng([seed, nodes, top_k, round(10 * skew)])
    log_popularity = -skew * np.log(1 + rng.permutation(nodes))
    score = log_popularity + rng.gumbel(size=(nodes, TOKENS[top_k], nodes))
    chosen = np.argsort(-score, axis=2)[:, :, :top_k]
    traffic = np.zeros((nodes, nodes))
    np.add.at(traffic, (np.repeat(np.arange(nodes), TOKENS[top_k] * top_k), chosen.ravel()), FLITS)
    return traffic * (1 - np.eye(nodes))


def rows() -> Iterator[dict[str, object]]:
    """Every matrix under every set-up, with the simulator as what is measured."""
    for name in SET_UPS:
        variant = next(variant for variant in VARIANTS if variant.name == name)
        for shape in SHAPES:
            cases = [*product(SKEWS, TOKENS, range(SEEDS))]
            traffic = [drawn(shape[0] * shape[1], *case) for case in cases]
            traffic += [matrix.T for matrix, (_, top_k, _) in zip(traffic, cases, strict=True) if top_k == 4]
            topology, model, fabric = router(variant, shape)
            plain_topology, plain, _ = router(variant, shape, ideal=True)
            matrices = jnp.asarray(np.stack(traffic), jnp.float32)
            told, without = predict(model, topology, matrices)[0], predict(plain, plain_topology, matrices)[0]
            for number, matrix in enumerate(traffic):
                seen = [replay_traffic(fabric, matrix, variant.order, seed).completion_s for seed in range(ORDERS)]
                yield {
                    "reference": "simulator",
                    "variant": name,
                    "class": "moe_dispatch" if number < len(cases) else "moe_combine",
                    "record": f"{shape[0]}x{shape[1]}_{number}",
                    "measured": float(np.mean(seen)),
                    "model": float(told[number]),
                    "congestion": float(without[number]),
                }


def main() -> None:
    """Write the table of errors by class."""
    given = script_options(__doc__, writes=True).parse_args()
    table = [row for row in by_class([*rows()]) if row["class"] == "moe (both)"]
    told = [{key: value for key, value in row.items() if value != ""} for row in table]
    write_table(folder_of_tables(HERE, given) / "fresh.csv", told)
    for row in table:
        print(row["variant"], row["records"], row["model_mean_error_percent"], row["congestion_mean_error_percent"])


if __name__ == "__main__":
    main()
