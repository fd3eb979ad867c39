"""Placements of replicas by the time they take, against EPLB's: see README.md.

python studies/replicas/study.py 'topology_*_0'                           # of every machine, model and rule, seed 0
python studies/replicas/study.py 'topology_dgx_b200_8x8*' time_nearest_0 --only 300     # windows of 300 steps
"""

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import build_layer_model, build_model, load_model
from jaxmoe.engine.copies import replica_model
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.rebalancing import Policy, Rebalanced, rebalanced
from jaxmoe.experiment.replica_plans import FP8_DISPATCH, drawn_loads, judged, replayed, serving_scenario
from jaxmoe.experiment.table import Table, add_shared, make_tables, study_options
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.replica_choice import REPLICA_CHOICES
from jaxmoe.traces import Batch, GatingTrace, load_counts, read_trace, sample_batches
from jaxmoe.traces.synthesis.sampling import drawn_counts, read_arrivals
from jaxmoe.tune.replica_placement import ReplicaProblem, tuned_slots

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"
TOKENS = 2048  # of all ranks in a step
MOVES = 8000  # of local search for every layer; a quarter on 256 ranks
BATCHES = 8  # that judge, of tokens of the second half

# By machine and model the trace, slots of a rank, and every so many layers of the trace.
CASES = {
    "dgx_b200_8x8": {"deepseek-v2-lite": ("summary", 2, 6), "gpt-oss-20b": ("gpqa_main", 1, 6)},
    "moentwine_8x8": {"deepseek-v2-lite": ("summary", 2, 6), "gpt-oss-20b": ("gpqa_main", 1, 6)},
    "moentwine_4x8x8": {"deepseek-v2-lite": ("summary", 1, 13), "gpt-oss-20b": ("gpqa_main", 1, 12)},
}
SEEDS = (0, 1)


@cache
def inputs_for(
    traces: Path, machine: str, model: str, trace: str, every: int
) -> tuple[Inputs, GatingTrace, GatingTrace]:
    """The inputs of some layers, and both halves of the trace."""
    scenario = serving_scenario(CONFIGS / "hardware" / f"{machine}.yaml", model, TOKENS, costs=FP8_DISPATCH)
    layers = build_model(load_model(model, "model")).moe_layer_ids[::every]
    inputs = inputs_of(scenario, traces / model / f"{trace}.npz", ",".join(map(str, layers)))
    half = inputs.trace.num_tokens // 2
    parts = np.arange(half), np.arange(half, inputs.trace.num_tokens)
    first, second = (inputs.trace.select_tokens(part) for part in parts)
    return inputs, first, second


def windows_of(trace: GatingTrace, count: int = 8) -> np.ndarray:
    """Choices of every expert in successive parts, [window, layer, expert]."""
    parts = np.array_split(np.arange(trace.num_tokens), count)
    return np.stack([load_counts(trace.select_tokens(part)).counts.sum(axis=0) for part in parts]).astype(float)


def topology(traces: Path, machine: str, model: str, choice: str, seed: int) -> list[dict]:
    """Acceptance 3: ours against EPLB's, on tokens of the later half, in the model and in the simulator."""
    name, per_rank, every = CASES[machine][model]
    inputs, first, second = inputs_for(traces, machine, model, name, every)
    rows = compared(inputs, first, second, per_rank, choice, seed)
    print(machine, model, choice, told(rows), flush=True)
    about = {"machine": machine, "model": model, "slots": per_rank * inputs.num_nodes, "seed": seed}
    return [about | {"choice": choice} | row for row in rows]


def mixed(batches: Batch, ranks: int, seed: int) -> Batch:
    """The same tokens, as many on every rank, in mixed order, so that ranks are answered side by side.

    With a rank's tokens in a row, all ranks that serve answer rank 0 first, then rank 1, as no engine does.
    """
    home = np.random.default_rng(seed).permutation(TOKENS) * ranks // TOKENS
    homes = jnp.asarray(np.broadcast_to(home, batches.token_draw.shape), jnp.int32)
    return eqx.tree_at(lambda batch: batch.source, batches, homes, is_leaf=lambda leaf: leaf is None)


def compared(
    inputs: Inputs, first: GatingTrace, second: GatingTrace, per_rank: int, choice: str, seed: int
) -> list[dict]:
    """Times of EPLB's and tuned slots, layer by layer."""
    ranks, experts = inputs.num_nodes, inputs.moe.num_experts
    loads = drawn_loads(windows_of(first), TOKENS * inputs.moe.top_k, 16, seed)
    by_rank = sample_batches(second, TOKENS, BATCHES, seed + 1)
    batches = mixed(by_rank, ranks, seed)
    timed = replica_model(inputs.model, choice)
    found = tuned_slots(ReplicaProblem(timed, loads, per_rank * ranks), MOVES if ranks <= 64 else MOVES // 4, seed=seed)
    published = eplb(loads.mean(axis=1), per_rank * ranks, ranks)
    rows = []
    for plan, slots in (("eplb", published), ("tuned", found.slots)):
        seconds = judged(timed, slots, batches, experts)
        seen, in_a_row = (
            np.array([[each.total_s for each in layer] for layer in replayed(inputs, timed, slots, tokens)])
            for tokens in (batches, by_rank)
        )
        for row, layer in enumerate(inputs.layer_ids):
            rows.append(
                {
                    "plan": plan,
                    "layer": layer,
                    "tuned_on_us": round(found.values[plan][row] * 1e6, 4),
                    "later_us": round(seconds.total[row].mean() * 1e6, 4),
                    "later_p95_us": round(float(np.quantile(seconds.total[row], 0.95)) * 1e6, 4),
                    "simulated_us": round(seen[row].mean() * 1e6, 4),
                    "simulated_by_rank_us": round(in_a_row[row].mean() * 1e6, 4),
                    "compute_us": round(seconds.stages["compute"][row].mean() * 1e6, 4),
                    "came_from": found.chosen[row] if plan == "tuned" else "eplb",
                }
            )
    return rows


def told(rows: list[dict]) -> str:
    """Mean times of both plans."""

    def gain(key: str) -> str:
        before, after = (np.mean([row[key] for row in rows if row["plan"] == plan]) for plan in ("eplb", "tuned"))
        return f"{before:.2f} µs, tuned {after:.2f}, {1 - after / before:.1%} less"

    return f"{gain('later_us')}; simulated {gain('simulated_us')}"


MACHINE, MODEL, SLOTS = "dgx_b200_8x8", "deepseek-v2-lite", 128
SERVICES = {"azure_llm_2023_conv": "summary", "azure_llm_2023_code": "translation"}  # whose requests choose as whose
STEPS = (300, 3000, 30_000)  # of a window: how long loads stay alike is the machine's speed and the service's
SEARCH = 3000  # moves of every placement over time
LONG = 12  # windows that a policy with a long memory looks back on
POLICIES = [
    Policy("keep"),
    *(Policy("eplb", every) for every in (1, 2, 4)),
    *(Policy("eplb_matched", every) for every in (1, 4)),
    *(Policy(placer, memory=LONG) for placer in ("eplb", "eplb_matched")),
    Policy("eplb", trigger=1.3),
    Policy("eplb_matched", trigger=1.3),
    Policy("tuned", moves=SEARCH),
    *(Policy("tuned", every, memory=LONG, moves=SEARCH) for every in (1, 4)),
    *(Policy("tuned", patience=patience, memory=LONG, moves=SEARCH) for patience in (0.25, 4.0, np.inf)),
    Policy("oracle", moves=SEARCH),
]


def drifting_loads(traces: Path, layers: list[int], windows: int, seed: int) -> np.ndarray:
    """Choices of a step in windows of an hour, [window, layer, expert]: two services as their requests arrived.

    A service's tokens choose experts as the trace says that stands for it. Made from recorded parts, not recorded.
    """
    tokens, shares = [], []
    for service, trace in SERVICES.items():
        arrivals = read_arrivals(traces / "arrivals" / f"{service}.npz")
        edges = np.linspace(0, 3436, windows + 1)  # s: both services were recorded until then
        work = (arrivals.prompt + arrivals.answer).astype(float)
        tokens.append(np.histogram(arrivals.seconds, edges, weights=work)[0])
        counts = load_counts(read_trace(traces / MODEL / f"{trace}.npz").select_layers(layers)).counts.sum(axis=0)
        shares.append(counts / counts.sum(axis=1, keepdims=True))
    mixture = np.stack(tokens, axis=1) / np.sum(tokens, axis=0)[:, None]
    return drawn_counts(np.stack(shares), mixture, TOKENS * 6, seed).astype(float)


@cache
def drifting(
    traces: Path, choice: str, seed: int
) -> tuple[ReplicaProblem, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Where to place copies, windows of loads that are known and those that follow, and slots to start from."""
    layers = list(build_model(load_model(MODEL, "model")).moe_layer_ids[::13])
    scenario = serving_scenario(CONFIGS / "hardware" / f"{MACHINE}.yaml", MODEL, TOKENS, costs=FP8_DISPATCH)
    loads = drifting_loads(traces, layers, 29, seed)
    known, windows = loads[:4], loads[4:]
    model = replica_model(build_layer_model(scenario, "sharded"), choice)
    problem = ReplicaProblem(model, np.swapaxes(known, 0, 1), SLOTS)
    starts = {
        "eplb": eplb(known.sum(axis=0), SLOTS, problem.ranks),
        "tuned": tuned_slots(problem, MOVES, seed=seed).slots,
    }
    return problem, known, windows, starts


def over_time(traces: Path, choice: str, seed: int, steps: int) -> Iterator[dict]:
    """Acceptance 4 and the replay over time: every policy, for windows of a length."""
    problem, known, windows, starts = drifting(traces, choice, seed)
    layers, size = known.shape[1], float(problem.model.layer.costs.expert_bytes)
    for policy in POLICIES:
        if steps != STEPS[0] and (policy.placer != "tuned" or np.isinf(policy.patience)):
            continue  # windows that are longer change nothing but what weighs moving against gains
        for name in ("eplb", "tuned") if policy.placer == "keep" else ("eplb",):
            run = rebalanced(problem, windows, known, starts[name], policy, steps, seed)
            yield {
                "choice": choice,
                "seed": seed,
                "policy": f"{policy.name}, {name} at the start" if policy.placer == "keep" else policy.name,
                "memory": policy.memory,
                "patience": policy.patience,
                "steps": steps,
                "layer_us": round(run.seconds.mean() / layers * 1e6, 4),
                "moved_GB_a_window": round(run.experts.mean() * size / 1e9, 4),
                "moving_ms_a_window": round(run.moving.mean() * 1e3, 4),
            } | {f"step_us_{every}": round(per_step(run, every) / layers * 1e6, 4) for every in STEPS}


def per_step(run: Rebalanced, steps: int) -> float:
    """Mean seconds of a step including its share of the movements, for windows of so many steps."""
    return float(run.seconds.mean() + run.moving.mean() / steps)


def tables(traces: Path) -> Iterator[Table]:
    """One for each machine, model, rule and seed; and one over time for each rule and seed."""
    models = ((machine, model) for machine, models in CASES.items() for model in models)
    for (machine, model), choice, seed in product(models, REPLICA_CHOICES, SEEDS):
        rows = partial(topology, traces, machine, model, choice, seed)
        yield Table(f"topology_{machine}_{model}_{choice}_{seed}", rows)
    for choice, seed in product(REPLICA_CHOICES, SEEDS):
        yield Table(
            f"time_{choice}_{seed}", partial(over_time, traces, choice, seed), [(s,) for s in STEPS], ("steps",)
        )


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, HERE.parents[2] / "shared", "traces")
    given = parser.parse_args()
    make_tables(HERE, [*tables(given.shared / "traces")], given)
