"""Where SRAM stops to help (Fig. 16a): `python studies/expert_streaming/knee.py` writes `knee.csv`.

Arrays' busy part of the time, A3 of Qwen3-30B-A3B with 64 tokens on 2x2 and 48 GB/s of DDR a die, in the event
simulator. Three whole experts are 14.2 MB, a pair in work and one loaded ahead (Algorithm 1, line 12).
Takes 20 seconds of one core.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from agreement import CONTROL, costs_of, described, machine_of, tokens_of
from readings import BASE, DIES, SEEDS, decided
from study import HERE

from jaxmoe.des.streaming import stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.experiment.table import Table, make_tables, study_options

MODEL, TOKENS, DDR = "qwen3-30b-a3b", 64, 48e9
SRAM = (4e6, 4.8e6, 6e6, 8e6, 10e6, 12e6, 14.2e6, 16e6, 20e6, 32e6)  # B a die
LOADED_BY, LINKS, CUTS = ("all", "trajectory"), (288, 144, 72), (1, 8)  # GB/s each way of a link


def busy_part(counts: np.ndarray, sram: float, link: int, cut: int, loaded_by: str) -> float:
    """The part of the layer's time that arrays compute, their mean."""
    layer = described(machine_of(BASE._replace(ddr=DDR, d2d=1e9 * link, sram=sram)), costs_of(MODEL))
    groups, following = map(np.asarray, decided(True)(jnp.asarray(counts, jnp.float32)))
    loading = (counts > 0) | (loaded_by == "all") | (counts.sum(axis=1, keepdims=True) == 0)
    seen = stream(flow_of(layer, Slicing(cut, sram, CONTROL, matched=True), counts, groups, following, loading))
    return float(seen.compute_busy.mean() / seen.seconds)


def knee(loaded_by: str, link: int, cut: int) -> Iterator[dict[str, Any]]:
    """A row for every SRAM whose slots a micro-slice can pass: the mean over seeds of gating."""
    drawn = [tokens_of(MODEL, TOKENS, DIES, np.random.default_rng(seed)) for seed in SEEDS]
    slice_bytes = float(costs_of(MODEL).expert_bytes) / DIES / cut
    for sram in SRAM:
        if sram >= DIES * slice_bytes:
            busy = [busy_part(counts, sram, link, cut, loaded_by) for counts in drawn]
            row = {"loaded_by": loaded_by, "link_GB_per_s": link, "micro_slices": cut, "sram_MB": sram / 1e6}
            yield row | {"slots": int(sram // slice_bytes), "utilisation": np.mean(busy)}


CASES = [*product(LOADED_BY, LINKS, CUTS)]
TABLES = [Table("knee", knee, CASES, ("loaded_by", "link_GB_per_s", "micro_slices"), digits=4)]

if __name__ == "__main__":
    make_tables(HERE, TABLES, study_options(__doc__).parse_args())
