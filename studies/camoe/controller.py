"""The controller on a network that changes: the bottleneck link at half its rate from iteration 200 of 1,000 on.

`python studies/camoe/controller.py` writes `controller.csv`; see README.md.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gate_control import GateController, Observed
from setting import HERE, LOGIT_SCALE, TOP_K, contiguous, costs, network, problem, tokens

from jaxmoe.engine.all_to_all import assignment_copies
from jaxmoe.engine.gating import biased, chosen_experts
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.methods.camoe.gate import gate_bias, unbiased_copies

ITERATIONS, CHANGE, BATCH, POOL, SEED = 1000, 200, 512, 8192, 0
NOISE = 0.03  # of observed times, relative
STRENGTH, ROW = 0.2, 3  # the layer that is watched


@eqx.filter_jit
def iterate(given, true, bias, logits):
    """Copies that a biased gate sends, and what dispatch and combine take on the true network."""
    chosen = chosen_experts(biased(logits, bias, given.source), TOP_K)
    copies = given.weight * assignment_copies(chosen, given.source, given.share[0])
    seconds = true.seconds(given.topology, copies)
    return copies, seconds["dispatch"], seconds["combine"]


def slowed(exchange, pair):
    """The all-to-all with one directed link at half its rate."""
    factor = jnp.ones((4, 4)).at[pair].set(2.0)
    models = {name: replace(model, beta=model.beta * factor) for name, model in exchange.models.items()}
    return replace(exchange, models=models)


def controller() -> list[dict]:
    """One line for each iteration; what they come to is printed."""
    trace = tokens(POOL, SEED, layers=ROW + 1)
    trace = trace.select_layers([ROW])
    given = problem(trace, 0, BATCH, network())
    before = costs(network())
    copies = unbiased_copies(problem(trace, 0, POOL, network()))[0]
    share = contiguous(4, 1)[0]
    control = GateController(before, copies, share, STRENGTH)
    sent = before.traffic(copies)["dispatch"] * before.models["dispatch"].beta * (1 - jnp.eye(4))
    pair = tuple(int(at) for at in np.unravel_index(int(sent.argmax()), (4, 4)))
    after = slowed(before, pair)
    oracle = {True: gate_bias(after, copies, share, STRENGTH), False: gate_bias(before, copies, share, STRENGTH)}
    rng, state, rows, probed = np.random.default_rng(SEED), control.init(), [], 0.0
    step, bias_of = eqx.filter_jit(control.step), eqx.filter_jit(control.bias)
    pool = jnp.asarray(LOGIT_SCALE * np.moveaxis(trace.logits, 1, 0)[0])
    for iteration in range(ITERATIONS):
        changed = iteration >= CHANGE
        true = after if changed else before
        logits = pool[rng.integers(0, POOL, BATCH)]
        now, dispatch, combine = iterate(given, true, bias_of(state), logits)
        best = sum(map(float, iterate(given, true, oracle[changed], logits)[1:]))
        fixed = sum(map(float, iterate(given, true, oracle[False], logits)[1:]))
        lone = true.models["dispatch"].alpha + true.models["dispatch"].beta * control.probe_bytes
        shake = 1 + NOISE * rng.standard_normal(18)
        probes = jnp.where(state.probe, lone * shake[:16].reshape(4, 4), 0)
        probed += float(state.probe.sum() * control.probe_bytes)
        moved = float((now * (1 - jnp.eye(4))).sum() * (before.dispatch_bytes + before.combine_bytes))
        seen = Observed(now, dispatch * shake[16], combine * shake[17], jnp.asarray(probes, jnp.float32))
        state = step(state, seen)
        rows.append(
            {
                "iteration": iteration,
                "controlled_ms": 1e3 * float(dispatch + combine),
                "for_the_network_ms": 1e3 * best,
                "not_controlled_ms": 1e3 * fixed,
                "lambda": float(state.strength),
                "believed_slowness": float(state.slowness[pair]),
                "probed_bytes": probed,
                "moved_bytes": moved,
            }
        )
    found = next(row["iteration"] for row in rows if row["iteration"] >= CHANGE and row["believed_slowness"] > 1.5)
    late = [row for row in rows if row["iteration"] >= CHANGE + 20]
    ratio = np.mean([row["controlled_ms"] for row in late]) / np.mean([row["for_the_network_ms"] for row in late])
    alone = np.mean([row["not_controlled_ms"] for row in late]) / np.mean([row["for_the_network_ms"] for row in late])
    part = 100 * probed / sum(row["moved_bytes"] for row in rows)
    print(f"link {pair[0]} -> {pair[1]} at half its rate from {CHANGE} on; found after {found - CHANGE} iterations")
    print(
        f"from 20 iterations after the change on, latency is {ratio:.4f} of that with a bias made for the new network,"
    )
    print(f"{alone:.4f} without a controller; probes are {part:.4f} % of the traffic")
    return rows


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    make_tables(HERE, tables_of({"controller": controller}, digits=6), study_options(__doc__).parse_args())
