"""How far results on a GPU are off those on CPUs, by exchange; see README.md.

    python studies/benchmarks/devices.py

Plans of `throughput.py` on one batch, in one process on both: exact times, relaxed times, and their gradients by all
shares. A minute or more a case, which is to compile.
"""

import sys
from functools import partial
from itertools import product
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from throughput import MESHES, Size, forward, layer_model, machine, one_batch, random_plans, with_gradient

from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.network import build_exchange
from jaxmoe.tune.settings import DEFAULT_EXCHANGES, HYBRIDS

HERE = Path(__file__).resolve().parent
# What a layer has by itself, what keeps tokens at home, and what the tuner chooses among.
EXCHANGES = ("lowest_host", "token_home", *(name for name in DEFAULT_EXCHANGES if name != HYBRIDS))
PLANS = 8


def results(size: Size, exchange: str, device: jax.Device) -> dict[str, np.ndarray]:
    """Exact and relaxed times of every plan [plan], and the gradient by its shares [plan, expert, node], as doubles."""
    model = layer_model(size)
    model = eqx.tree_at(lambda each: each.exchange, model, build_exchange(exchange, model.machine.topology))
    given = (model, jnp.asarray(random_plans(size, PLANS)), one_batch(size))
    there = jax.tree.map(lambda leaf: jax.device_put(leaf, device) if eqx.is_array(leaf) else leaf, given)
    relaxed, gradient = with_gradient(*there)
    found = {"exact": forward(*there), "relaxed": relaxed, "gradient": gradient}
    return {name: np.asarray(values, np.float64) for name, values in found.items()}


def compared(gpu: jax.Device, mesh: str, exchange: str) -> list[dict[str, object]]:
    """One row: the largest difference among the plans, over the value on CPUs; a gradient's over its largest part."""
    cpu, there = (results(MESHES[mesh], exchange, device) for device in (jax.devices("cpu")[0], gpu))
    row: dict[str, object] = {"mesh": mesh, "exchange": exchange}
    for name, values in cpu.items():
        rest = tuple(range(1, values.ndim))
        off = np.abs(there[name] - values).max(axis=rest) / np.abs(values).max(axis=rest)
        row |= {name: f"{off.max():.1e}", f"{name}_alike": int((off <= 1e-5).sum())}
    return [row | {"plans": PLANS, "machine": machine()}]


if __name__ == "__main__":
    options = study_options(__doc__).parse_args()
    device = jax.devices()[0]
    if device.platform == "cpu":
        sys.exit("JAX finds no GPU here, so there is nothing to compare; install one that JAX knows and '.[cuda13]'")
    jax.config.update("jax_default_matmul_precision", "highest")
    cases = list(product(MESHES, EXCHANGES))
    make_tables(HERE, [Table("devices", partial(compared, device), cases, ("mesh", "exchange"))], options)
