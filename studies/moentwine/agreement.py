"""Communication of token layouts, and layers under both readings of memory: the model against the event simulator.

Writes `agreement.csv`, a line for each case, and prints R2 and errors: `python studies/moentwine/agreement.py`. Tokens
choose experts at random, all as likely or by a skewed popularity; each is counted, in the model and in the simulator.
`agreement_memory.csv` has whole layers of experts under `die.overlap: true` (the longer of products and memory counts)
and `false` (their sum), by expert parallelism under `least_loaded`.
"""

import itertools
from collections.abc import Iterator

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from cases import MICRO, STAGES, Case, hardware_of, layout_of, topology_of
from layouts import token_communication
from study import HERE, Row

import jaxmoe as jm
from jaxmoe.config import build_machine
from jaxmoe.des import fabric_of
from jaxmoe.des.token_communication import replay_communication
from jaxmoe.experiment.table import Table, make_tables, study_options, tables_of
from jaxmoe.experiment.validation import agreement
from jaxmoe.hardware import Machine
from jaxmoe.methods import StaticPlan
from jaxmoe.network import Congestion, token_homes, visit_counts
from jaxmoe.network.token_communication import num_homes
from jaxmoe.placement.token_layout import TokenLayout
from jaxmoe.relax import HardMax

VECTOR, TOP_K, SKEW, SEED = 8192.0, 8, 0.6, 0
TOKENS = {"moentwine_4x8x8": (16, 64, 256)}
USUAL = (16, 64, 256, 1024)
LAYOUTS = (
    ("baseline", "domain", None),
    ("baseline", "nearest", None),
    ("baseline", "domain", False),
    ("er", "domain", None),
    ("er", "nearest", None),
    ("er", "domain", False),
    ("esp", "domain", None),
    ("baseline_esp", "domain", None),
)
LAYERS = tuple(
    itertools.product(("moentwine_4x4", "moentwine_8x8", "dgx_b200_4x8", "nvl72"), ("qwen3-235b-a22b", "deepseek-v3"))
)
TOKENS_OF_A_DEVICE = (1, 8, 64)


def cases() -> Iterator[Case]:
    """All layouts on all machines."""
    for machine, tp in (("moentwine_4x4", 4), ("moentwine_6x6", 4), ("moentwine_6x6", 9), ("moentwine_8x8", 16)):
        for layout, fetch, gather in LAYOUTS:
            yield Case(machine, layout, tp=tp, fetch=fetch, all_gather=gather)
    for layout, gather in (("baseline", None), ("er", None), ("her", None), ("her", True), ("her_blocks", None)):
        yield Case("moentwine_4x8x8", layout, tp=16, all_gather=gather)
    for machine in ("dgx_b200_4x8", "dgx_b200_8x8", "nvl72"):
        yield Case(machine, "successive")


def visits(layout: TokenLayout, tokens: int, skew: float) -> np.ndarray:
    """Where tokens go, bool [token, node]: two experts on every device, or slices of them on several."""
    rng = np.random.default_rng(SEED)
    hosts = layout.tp if layout.sliced else layout.num_nodes
    experts = max(2 * hosts, 2 * TOP_K)
    popularity = np.log(np.arange(1, experts + 1)) * -skew
    luck = rng.gumbel(size=(tokens, experts)) + rng.permutation(popularity)
    chosen = np.argpartition(luck, -TOP_K, axis=1)[:, -TOP_K:] * hosts // experts
    visited = np.zeros((tokens, hosts), bool)
    visited[np.arange(tokens)[:, None], chosen] = True
    return visited[:, layout.slices] if layout.sliced else visited


@eqx.filter_jit
def _price(communication, topology, counts, tokens):
    return communication(topology, counts, tokens, VECTOR, HardMax())


def line(case: Case, tokens: int, skew: float) -> Row:
    """Model and simulator of one batch."""
    topology, chunk = topology_of(case.machine)
    cut_through = topology.grid is None
    layout, model = layout_of(case), Congestion(jnp.asarray(chunk), cut_through)
    visited = visits(layout, tokens * layout.num_groups, skew)
    group = np.arange(len(visited)) // tokens
    homes = jnp.asarray(token_homes(layout, len(visited)), jnp.int32)
    clusters = layout.shape[0] if layout.name == "successive" else 1
    counts = visit_counts(jnp.asarray(visited, float), jnp.ones(len(visited)), homes, num_homes(layout), clusters)
    told = _price(token_communication(layout, topology, model, model), topology, counts, float(tokens))
    seen = replay_communication(fabric_of(topology, chunk, cut_through), layout, visited, group, VECTOR)
    known = {name: getattr(case, name) for name in ("machine", "layout", "tp", "fetch", "all_gather")}
    row: Row = known | {"tokens": tokens, "gating": "skewed" if skew else "balanced"}
    for name in STAGES:
        row |= {
            f"model_{name}_us": MICRO * float(told[name].seconds),
            f"simulated_{name}_us": MICRO * seen[name].seconds,
        }
    for who in ("model", "simulated"):
        row[f"{who}_total_us"] = sum(float(str(row[f"{who}_{name}_us"])) for name in STAGES)
    return row


def rows() -> list[Row]:
    """All cases; how well the two agree is printed."""
    made: list[Row] = []
    for case, skew in itertools.product(cases(), (0.0, SKEW)):
        made += [line(case, tokens, skew) for tokens in TOKENS.get(case.machine, USUAL)]
    told, seen = (np.array([float(str(row[f"{who}_total_us"])) for row in made]) for who in ("model", "simulated"))
    print(len(made), "cases:", agreement(told, seen))
    error = np.abs(told / seen - 1)
    for index in np.argsort(-error)[:8]:
        print(
            f"{told[index] / seen[index] - 1:+.3f}",
            [made[index][key] for key in ("machine", "layout", "tp", "fetch", "all_gather", "tokens", "gating")],
        )
    return made


def machine_of(name: str, overlap: bool) -> Machine:
    """A machine whose dies read while they multiply, or before."""
    hardware = hardware_of(name)
    assert hardware.die is not None
    die = hardware.die.model_copy(update={"overlap": overlap})
    return build_machine(hardware.model_copy(update={"die": die}))


def layers(machine: str, model: str) -> Iterator[Row]:
    """Microseconds of a layer of experts by model and simulator, over tokens and both readings of memory."""
    sizes = jm.model(model)
    drawn = {"skew": SKEW, "coactivation": 0.3, "reuse": 0.2, "seed": SEED}
    trace = jm.synthetic_trace(8192, range(1), num_experts=sizes.num_experts, top_k=sizes.top_k, **drawn)
    for overlap in (True, False):
        layer = jm.layer(machine_of(machine, overlap), sizes, exchange="least_loaded")
        share = jm.expert_parallel(trace, layer.machine.topology)
        for tokens in TOKENS_OF_A_DEVICE:
            batches = jm.sample_batches(trace, tokens * layer.machine.num_nodes, 1, seed=1)
            run = jm.rollout(StaticPlan(share), layer, batches)
            told, seen = float(run.time.total[0, 0]), float(jm.replay(run, step=0).seconds[0])
            known = {"machine": machine, "model": model, "overlap": overlap, "tokens_of_a_device": tokens}
            compute = float(run.time.stages["compute"][0, 0])
            yield known | {"model_us": MICRO * told, "simulated_us": MICRO * seen, "model_compute_us": MICRO * compute}


def print_agreement(made: list[dict[str, str]]) -> None:
    """How well model and simulator agree under each reading."""
    for overlap in ("True", "False"):
        chosen = [row for row in made if row["overlap"] == overlap]
        told, seen = (np.array([float(row[f"{who}_us"]) for row in chosen]) for who in ("model", "simulated"))
        print(f"die.overlap {overlap}, {len(chosen)} layers:", agreement(told, seen))


if __name__ == "__main__":
    tables = [
        *tables_of({"agreement": rows}, digits=6),
        Table("agreement_memory", layers, LAYERS, ("machine", "model"), digits=6),
    ]
    made = make_tables(HERE, tables, study_options(__doc__).parse_args())
    if "agreement_memory" in made:
        print_agreement(made["agreement_memory"])
