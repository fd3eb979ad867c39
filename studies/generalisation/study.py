"""Plans tuned on one topic, on several, or on synthetic text, judged on held-out text of every topic; see README.md.

`python studies/generalisation/study.py --shared FOLDER` writes `times.csv`; with `--only
deepseek_whole/0` the rows of a case and seed alone. FOLDER has the recorded traces in `traces/`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.engine import Layer, evaluate
from jaxmoe.experiment.comparison import placement_problem
from jaxmoe.experiment.inputs import EVALUATION_SEEDS, read_inputs
from jaxmoe.experiment.table import Table, add_shared, make_tables, study_options
from jaxmoe.hardware import node_memory
from jaxmoe.network import AbstractExchange, build_exchange
from jaxmoe.traces import Batch, GatingTrace, read_trace, sample_batches, synthetic_trace
from jaxmoe.traces.synthesis import fit_process, sample_trace
from jaxmoe.tune import PlacementProblem, TuneResult, TunerSettings, tune

HERE = Path(__file__).resolve().parent
SCENARIOS = HERE.parents[1] / "configs" / "scenarios"
jax.config.update("jax_default_matmul_precision", "highest")  # also in processes of `--jobs`

COLUMNS = ("case", "seed", "tuned_on", "judged_on", "layer", "mean_s", "exchange")
MEAN, WORST, SYNTHETIC, EVEN = "mean of topics", "worst topic", "synthetic", "even choices"
SEEDS = (0, 1)
JUDGED = 32  # held-out batches of every topic
SYNTHETIC_TOKENS = 8192
SETTINGS = TunerSettings(
    restarts=2, steps=75, batches_per_step=6, refine_steps=100, refine_chains=1, refine_batches=24, hybrid_cuts=0
)
QUICK = replace(SETTINGS, restarts=1, steps=25, refine_steps=25)


@dataclass(frozen=True)
class Case:
    """A model on a machine, with the topics of its recorded traces and some of its layers.

    With `slots` dies hold so many whole experts of a layer, and further copies of hot ones; else experts may be cut.
    """

    scenario: str
    model: str
    topics: tuple[str, ...]
    layers: str
    slots: int | None = None

    def problem(self, trace: Path) -> PlacementProblem:
        """Where to place the experts of the layers, for the text of any topic of the trace's model."""
        overrides = [f"model={self.model}", "costs.exchange=least_loaded", "strategies.hybrid_regions=1"]
        problem = placement_problem(read_inputs(SCENARIOS / f"{self.scenario}.yaml", overrides, trace, self.layers))
        model = problem.model
        if self.slots is None:
            return problem
        capacity = self.slots * float(model.costs.expert_bytes) * len(problem.trace.layer_ids)
        memory = node_memory(None, jnp.full(problem.num_nodes, capacity, jnp.float32))
        machine = replace(model.machine, memory=memory)
        return replace(problem, model=replace(model, machine=machine, mode="replicated"), exchanges=WHOLE)


WHOLE = ("least_loaded_split_tree", "corner_host_split_tree")  # beside least_loaded: exchanges of whole experts
DEEPSEEK = ("intent", "summary", "translation")
GPT_OSS = ("gpqa_main", "mmlu_test", "sorry_bench", "tulu3_polyglot")
MIXTRAL = ("coding", "extraction", "humanities", "math", "reasoning", "writing")
ON_4X8 = "hd_moe/deepseek-v2-lite_4x8_5TFLOPs_50GBps"
ON_4X4 = "hd_moe/deepseek-v2-lite_4x4_5TFLOPs_50GBps"
CASES = {
    "deepseek_cut": Case(ON_4X8, "deepseek-v2-lite", DEEPSEEK, "9"),
    "deepseek_whole": Case(ON_4X8, "deepseek-v2-lite", DEEPSEEK, "9,17", 3),
    "deepseek_roomy": Case(ON_4X8, "deepseek-v2-lite", DEEPSEEK, "9,17", 8),
    "gpt_oss_whole": Case(ON_4X4, "gpt-oss-20b", GPT_OSS, "12", 3),
    "mixtral_whole": Case(ON_4X4, "mixtral-8x7b", MIXTRAL, "16", 1),
}


def sources(seen: dict[str, GatingTrace], seed: int) -> Iterator[tuple[str, tuple[GatingTrace, ...], float]]:
    """What plans are tuned on: a name, traces, and the weight of the worst of them."""
    every = tuple(seen.values())
    for name, trace in seen.items():
        yield name, (trace,), 0.0
    yield MEAN, every, 0.0
    yield WORST, every, 1.0
    for name, trace in seen.items():
        yield f"{SYNTHETIC} {name}", (sample_trace(fit_process(trace, seed), SYNTHETIC_TOKENS, seed),), 0.0
    yield EVEN, (even_choices(every[0], seed),), 0.0


def even_choices(like: GatingTrace, seed: int) -> GatingTrace:
    """Tokens that choose every expert with equal chance: nothing is known of the text."""
    shape = (like.num_experts, like.top_k)
    return synthetic_trace(SYNTHETIC_TOKENS, like.layer_ids.tolist(), *shape, 0.0, 0.0, 0.0, seed)


def rows_of(shared: Path, quick: bool, name: str, seed: int) -> Iterator[dict[str, str]]:
    """One row for each plan, topic and layer of a case."""
    case, settings = CASES[name], replace(QUICK if quick else SETTINGS, seed=seed)
    folder = shared / "traces" / case.model
    problem = case.problem(folder / f"{case.topics[0]}.npz")
    layers = problem.trace.layer_ids.tolist()
    both = {topic: read_trace(folder / f"{topic}.npz").select_layers(layers).halves() for topic in case.topics}
    held = {
        topic: sample_batches(text, problem.batch_tokens, JUDGED, EVALUATION_SEEDS) for topic, (_, text) in both.items()
    }
    for source, given, worst in sources({topic: seen for topic, (seen, _) in both.items()}, seed):
        # As many topics for all, the same one several times over for some: one compiled function serves all.
        topics = given * (len(both) // len(given))
        result = tune(replace(problem, trace=given[0], topics=topics, worst_weight=worst), settings)
        for topic, batches in held.items():
            for layer, mean, exchange in zip(layers, seconds(problem, result, batches), result.exchange, strict=True):
                row = (name, seed, source, topic, layer, f"{mean:.6g}", exchange)
                yield dict(zip(COLUMNS, map(str, row), strict=True))


def seconds(problem: PlacementProblem, result: TuneResult, batches: Batch) -> np.ndarray:
    """Mean time of every layer under the exchange that tuning chose for it, s [layer]."""
    made, topology = np.zeros(len(result.share)), problem.model.machine.topology
    for name in dict.fromkeys(result.exchange):
        rows = np.flatnonzero([name == other for other in result.exchange])
        exchange, some = build_exchange(name, topology), jax.tree.map(lambda leaf, at=rows: leaf[at], batches)
        merged = problem.merged(some, exchange)
        share = jnp.asarray(result.share[rows], jnp.float32)
        made[rows] = _timed(problem.model, share, merged, exchange).mean(axis=1)
    return made


@eqx.filter_jit
def _timed(model: Layer, share: Array, batches: Batch, exchange: AbstractExchange) -> Array:
    return evaluate(model, share, batches, exchange).total


if __name__ == "__main__":
    parser = study_options(__doc__)
    add_shared(parser, HERE.parents[2] / "shared", "traces")
    given = parser.parse_args()
    rows = partial(rows_of, given.shared, given.quick)
    make_tables(HERE, [Table("times", rows, [*product(CASES, SEEDS)], ("case", "seed"), COLUMNS)], given)
