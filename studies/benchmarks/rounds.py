"""Plans a second under least congested exchanges whose tokens choose in rounds, and what links carry; see README.md.

Of the plans of `throughput.py` at 8x8, each on one batch: by a second of a core, and by the clock with a run on every
core. The busiest link is the mean over
plans, over that of tokens that choose one after the other.

Takes two minutes of one core.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from throughput import SIZES, compiled, forward, layer_model, machine, one_batch, random_plans, rate

from jaxmoe.engine import Layer
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.network import build_exchange, sharded_visits
from jaxmoe.relax import HardSupport
from jaxmoe.threads import cores, side_by_side
from jaxmoe.traces import Batch

HERE = Path(__file__).resolve().parent
AT_ONCE = (1, 2, 4, 8)
SIZE = SIZES[2]


@eqx.filter_jit
def busiest_links(model: Layer, shares: jax.Array, batch: Batch) -> jax.Array:
    """What the busiest link carries of every plan, B."""

    def busiest(share: jax.Array) -> jax.Array:
        topology, costs = model.machine.topology, model.costs
        (phase,) = model.exchange(topology, sharded_visits(share, batch, HardSupport()))
        return sum(model.time_model.of_flows(topology, flows, costs.combine_bytes).link_bytes for flows in phase).max()

    return jax.vmap(busiest)(shares)


def on_every_core(run: Callable[[], object]) -> None:
    """The call once on every core, side by side."""
    for _ in side_by_side(lambda _: jax.block_until_ready(run()), range(cores())):
        pass


def rounds() -> Iterator[dict[str, object]]:
    """A row for every number of tokens that choose at once."""
    model, batch, shares = layer_model(SIZE), one_batch(SIZE), jnp.asarray(random_plans(SIZE, SIZE.plans))
    one_by_one = None
    for at_once in AT_ONCE:
        name = "least_congested" + f"_by_{at_once}" * (at_once > 1)
        under = replace(model, exchange=build_exchange(name, model.machine.topology))
        busiest = float(busiest_links(under, shares, batch).mean())
        one_by_one = one_by_one or busiest
        run, compile_s = compiled(forward, under, shares, batch)
        yield {
            "exchange": name,
            "mesh": f"{SIZE.shape[0]}x{SIZE.shape[1]}",
            "plans_at_once": SIZE.plans,
            "per_core_s": round(rate(run, SIZE.plans, time.process_time)),  # of all cores together
            "per_s": round(rate(lambda run=run: on_every_core(run), SIZE.plans * cores())),  # by the clock
            "busiest_link": f"{busiest / one_by_one:.4f}",
            "compile_s": f"{compile_s:.2f}",
            "machine": machine(),
        }


if __name__ == "__main__":
    make_tables(HERE, tables_of({"rounds": rounds}, timed=["rounds"]), study_options(__doc__).parse_args())
