"""Does placement matter on GPUs whose kernels and links were measured? See README.md.

    python studies/measured/placement.py --traces ../shared/traces

Experts in their order, EPLB's copies and tuned ones, each under its own best exchange and rule of choice, are chosen on
one text and timed on another, in half an hour on two cores. Writes placement.csv: per machine, model, text and tokens
the seconds of a layer, the gain of tuning over both with its paired interval, and what the simulator says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.config import build_model, load_hardware, load_model
from jaxmoe.des import replay_plan
from jaxmoe.engine.copies import ReplicaModel, replica_model
from jaxmoe.experiment.confidence import SampledGain
from jaxmoe.experiment.evaluation import describe
from jaxmoe.experiment.inputs import Inputs, inputs_of
from jaxmoe.experiment.replica_plans import drawn_loads, drawn_tokens, judged, served_by, serving_scenario
from jaxmoe.experiment.table import folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.placement.eplb import eplb
from jaxmoe.placement.slots import EMPTY, share_of_slots
from jaxmoe.traces import Batch, GatingTrace, LoadCounts, load_counts, read_loads, read_trace, sample_batches
from jaxmoe.tune.replica_placement import ReplicaProblem, tuned_slots

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"
BF16: dict[str, Any] = {"bytes_per_element": 2.0, "dispatch_bytes_per_element": 2.0, "weight_bytes_per_element": 2.0}
SEED, MOVES, FIT_BATCHES = 0, 6000, 16
CHOOSING, JUDGING, REPLAYED = 4, 16, 2  # batches: of the text that plans are made for, of the other, in the simulator
CHOICES = ("even", "nearest", "fixed")
TOKENS = (1024, 4096)  # of all ranks in a step
WINDOWS = 8  # parts of a text
LAYERS = 4  # of a model, evenly spaced
# Of a node of B200, as nothing larger was measured: NVLink's part that a low-latency dispatch reaches, and its launch.
NVL = ("nodes=64", "link.bandwidth_GB_per_s=515", "router.endpoint_latency_ns=13200")


@dataclass(frozen=True)
class Setting:
    """A machine of so many ranks, the exchanges that it may have, and what is set of it beside its file."""

    machine: str
    ranks: int
    exchanges: tuple[str, ...]
    changes: tuple[str, ...] = ()


SETTINGS = (
    Setting("h200_sxm_8x4", 32, ("token_home", "two_level_4")),
    Setting("gb200_nvl72", 64, ("token_home",), NVL),
)
# Model, the text that placements are made for, the one that judges, and slots of a rank by how many ranks there are.
CASES: tuple[tuple[str, str, str, dict[int, int]], ...] = (
    ("deepseek-v2-lite", "summary", "translation", {32: 3, 64: 2}),
    ("deepseek-v2-lite", "intent", "summary", {32: 3, 64: 2}),
    ("gpt-oss-20b", "gpqa_main", "mmlu_test", {32: 2}),
    ("olmoe-1b-7b", "load_c4", "load_github", {32: 3, 64: 2}),
    ("qwen3-235b-a22b", "load_single_prompt", "load_single_prompt", {32: 5, 64: 3}),  # no other text of it is there
)


@dataclass(frozen=True)
class Text:
    """Gating of some layers of a text: recorded token by token, or as loads of which tokens are drawn."""

    gating: GatingTrace | LoadCounts
    rows: Int[np.ndarray, " layer"]

    @classmethod
    def of(cls, path: Path) -> "Text":
        """Some layers of a file, evenly spaced."""
        gating = read_loads(path) if path.stem.startswith("load_") else read_trace(path)
        count = len(gating.layer_ids)
        return cls(gating, np.unique(np.linspace(0, count - 1, LAYERS).round().astype(int)))

    @property
    def layers(self) -> list[int]:
        """Their numbers in the model."""
        return self.gating.layer_ids[self.rows].tolist()

    @property
    def windows(self) -> Float[np.ndarray, "window layer expert"]:
        """Choices of each expert in successive parts."""
        if isinstance(self.gating, LoadCounts):
            return self.gating.counts[:, self.rows].astype(float)
        parts = np.array_split(np.arange(self.gating.num_tokens), WINDOWS)
        each = (load_counts(self.gating.select_tokens(part)).counts.sum(axis=0) for part in parts)
        return np.stack([*each])[:, self.rows].astype(float)

    def batches(self, tokens: int, count: int, top_k: int, seed: int, ranks: int) -> Batch:
        """Batches of tokens, as many on every rank, in mixed order; leaves [layer, batch, ...]."""
        if isinstance(self.gating, LoadCounts):
            loads = self.windows.sum(axis=0)
            drawn = [[drawn_tokens(row, tokens, top_k, seed + at) for at in range(count)] for row in loads]
            found = jax.tree.map(_stack, *(jax.tree.map(_stack, *row) for row in drawn))
        else:
            found = sample_batches(self.gating.select_layers(self.layers), tokens, count, seed)
        home = np.random.default_rng(seed).permutation(tokens) * ranks // tokens
        homes = jnp.asarray(np.broadcast_to(home, found.token_draw.shape), jnp.int32)
        return eqx.tree_at(lambda batch: batch.source, found, homes, is_leaf=lambda leaf: leaf is None)


def _stack(*leaves: jax.Array) -> jax.Array:
    return jnp.stack(leaves)


@dataclass(frozen=True)
class Way:
    """Slots of every layer, and the rule and the exchange that serve them."""

    slots: Int[np.ndarray, "layer slot"]
    choice: str
    exchange: str


@dataclass(frozen=True)
class Site:
    """Layers of a model on a machine, under each exchange."""

    inputs: dict[str, Inputs]

    @classmethod
    def of(cls, setting: Setting, model: str, layers: Sequence[int], tokens: int) -> "Site":
        path, moe = CONFIGS / "hardware" / f"{setting.machine}.yaml", build_model(load_model(model, "model"))
        hardware = load_hardware(path, (*setting.changes, f"die.gemm.top_k={moe.top_k}"))
        found = {}
        for exchange in setting.exchanges:
            scenario = serving_scenario(path, model, tokens, costs=BF16 | {"exchange": exchange})
            scenario = scenario.model_copy(update={"hardware": hardware})
            found[exchange] = inputs_of(scenario, None, ",".join(map(str, layers)))
        return cls(found)

    @property
    def any(self) -> Inputs:
        """What does not depend on the exchange."""
        return next(iter(self.inputs.values()))

    def model(self, way: Way) -> ReplicaModel:
        return replica_model(self.inputs[way.exchange].model, way.choice)

    def seconds(self, way: Way, batches: Batch) -> Float[np.ndarray, "layer batch"]:
        return judged(self.model(way), way.slots, batches, self.any.moe.num_experts).total

    def simulated(self, way: Way, batches: Batch) -> Float[np.ndarray, "layer batch"]:
        experts = self.any.moe.num_experts
        share = share_of_slots(way.slots, experts, self.any.num_nodes)
        layer = describe(self.inputs[way.exchange], "sharded", way.exchange)
        served = served_by(self.model(way), way.slots, batches, experts)
        return np.array([[each.total_s for each in row] for row in replay_plan(layer, share, batches, served=served)])


def in_order(layers: int, experts: int, ranks: int) -> Int[np.ndarray, "layer slot"]:
    """Every expert once, in the order of their numbers over the ranks."""
    slots = np.full(-(-experts // ranks) * ranks, EMPTY)
    slots[:experts] = np.arange(experts)
    return np.tile(slots, (layers, 1))


def ways_of(site: Site, loads: Float[np.ndarray, "layer batch expert"], most: int) -> Iterator[tuple[str, Way]]:
    """Every way of each strategy: with as few slots as hold all experts, or with as many as there is memory for."""
    layers, _, experts = loads.shape
    ranks = site.any.num_nodes
    fewest = -(-experts // ranks) * ranks
    for exchange in site.inputs:
        yield "ep", Way(in_order(layers, experts, ranks), CHOICES[0], exchange)
    for slots in sorted({fewest, most}):
        published = eplb(loads.mean(axis=1), slots, ranks)
        for choice in CHOICES:
            problem = ReplicaProblem(replica_model(site.any.model, choice), loads, slots)
            tuned = tuned_slots(problem, MOVES, steps=0, seed=SEED).slots
            for exchange in site.inputs:
                yield "eplb", Way(published, choice, exchange)
                yield "tuned", Way(tuned, choice, exchange)


def compared(
    traces: Path, setting: Setting, model: str, made_for: str, judged_on: str, slots: dict[int, int], tokens: int
) -> dict[str, object]:
    """One row: each strategy's best way on the text that it is made for, timed on the other."""
    first, second = (Text.of(traces / model / f"{name}.npz") for name in (made_for, judged_on))
    layers, ranks = first.layers, setting.ranks
    site = Site.of(setting, model, layers, tokens)
    top_k = site.any.moe.top_k
    loads = drawn_loads(first.windows, tokens * top_k, FIT_BATCHES, SEED)
    seen = first.batches(tokens, CHOOSING, top_k, SEED + 100, ranks)
    other = second.batches(tokens, JUDGING, top_k, SEED + 200, ranks)
    best: dict[str, tuple[float, Way]] = {}
    for name, way in ways_of(site, loads, slots[ranks] * ranks):
        value = float(site.seconds(way, seen).mean())
        if name not in best or value < best[name][0]:
            best[name] = value, way
    found: dict[str, object] = {"machine": setting.machine, "ranks": ranks, "model": model, "made_for": made_for}
    found |= {"judged_on": judged_on, "tokens": tokens, "slots": slots[ranks] * ranks, "layers": len(layers)}
    few = jax.tree.map(lambda leaf: leaf[:, :REPLAYED], other)
    times = {name: site.seconds(way, other) for name, (_, way) in best.items()}
    replays = {name: site.simulated(way, few) for name, (_, way) in best.items()}
    for name, (_, way) in best.items():
        found[f"{name}_us"] = round(times[name].mean() * 1e6, 2)
        found[f"{name}_simulated_us"] = round(replays[name].mean() * 1e6, 2)
        found[f"{name}_way"] = f"{way.exchange} {way.choice} {way.slots.shape[1]}"
    for rival in ("ep", "eplb"):
        gain = SampledGain(1 - times["tuned"].sum(axis=0) / times[rival].sum(axis=0), tokens * JUDGING, 0.0)
        found[f"less_than_{rival}_%"] = round(100 * gain.mean, 2)
        found[f"from_{rival}"], found[f"to_{rival}"] = (round(100 * end, 2) for end in gain.interval)
        found[f"simulated_less_than_{rival}_%"] = round(100 * (1 - replays["tuned"].sum() / replays[rival].sum()), 2)
    return found


def told(rows: Sequence[Mapping[str, object]]) -> str:
    """What tuning wins on each machine, in words."""
    lines = []
    groups = {"": rows, " of another text": [row for row in rows if row["made_for"] != row["judged_on"]]}
    for machine, rival in product(dict.fromkeys(str(row["machine"]) for row in rows), ("ep", "eplb")):
        for name, some in groups.items():
            gains = np.array([float(str(row[f"less_than_{rival}_%"])) for row in some if row["machine"] == machine])
            ends = f"{gains.min():.1f} to {gains.max():.1f} %"
            lines.append(f"{machine}: {gains.mean():.1f} % less than {rival}, mean of {len(gains)} cases{name}, {ends}")
    return "\n".join(lines)


def main() -> None:
    parser = script_options(__doc__, writes=True)
    parser.add_argument("--traces", type=Path, required=True, help="folder of recorded gating, by model")
    parser.add_argument("--machines", nargs="+", default=[each.machine for each in SETTINGS])
    options = parser.parse_args()
    out = folder_of_tables(HERE, options)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for setting in SETTINGS:
        if setting.machine in options.machines:
            for case in (each for each in CASES if setting.ranks in each[3]):
                for tokens in TOKENS:
                    rows.append(compared(options.traces, setting, *case, tokens))
                    print(rows[-1], flush=True)
                    write_table(out / "placement.csv", rows)
    print(told(rows))


if __name__ == "__main__":
    main()
