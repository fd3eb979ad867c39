"""What the study of the wafer-scale GPU runs on: models, machines, made-up requests, and policies by name."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.engine import FetchCosts, FetchLayer, Rollout, rollout, traffic_figures
from jaxmoe.hardware import Machine
from jaxmoe.methods import CrossToken, Guidance, LLCPrefetch, WaferPolicy, copies_that_fit, guide, widest
from jaxmoe.methods.wafer_gpu.system import allocation_of
from jaxmoe.traces.synthesis import PRESETS, GatingProcess, sample_trace

FOLDER = Path(__file__).parent
CONFIGS = FOLDER.parents[1] / "configs"
MACHINES = ("dojo_5x5", "tsmc_sow_3x8", "dojo_enhanced_5x5")
MAIN_MACHINES = MACHINES[:2]  # those of Fig. 11
BATCHES = (512, 4096, 8192, 16384)  # the text has 4,096, over 10,000 and over 15,000
LAYERS = 4  # stand for all of a model, from its lowest to its highest; dies have that part of their memory
PROMPT, STEPS = 12, 20  # tokens of a request: prefill, and decode
SEED = 0

# `top`, `spare` and homes dealt at random in equal numbers are not in the text; they were chosen on DeepSeek-V3 on
# dojo_5x5 with batches of 512 and 4,096, by the published hops, under another reading of Algorithm 1 (README).
SETTINGS: dict[str, Any] = {"block": 50, "spare": 4, "top": 32, "eviction": "least_popular"}
OF_BASE = ("block", "split")  # settings of each allocation
OF_ALLO = ("block", "spare", "cost", "begin", "order")

POLICIES: dict[str, dict[str, Any]] = {
    "base": {"allocation": "base", "prediction": "none"},
    "pred": {"allocation": "base", "prediction": "heatmap"},
    "home": {"allocation": "home", "prediction": "none"},
    "allo": {"allocation": "allo", "prediction": "none"},
    "allo+pred": {"allocation": "allo", "prediction": "heatmap"},
    "pred, perfect": {"allocation": "base", "prediction": "perfect"},
    "pred, unlimited": {"allocation": "base", "prediction": "heatmap", "unlimited": True},
    "base, 3 dies": {"allocation": "base", "prediction": "none", "split": 3},
    "pred, 3 dies": {"allocation": "base", "prediction": "heatmap", "split": 3},
}
PUBLISHED = ("base", "pred", "allo", "allo+pred")


@dataclass(frozen=True)
class Model:
    """A model's layers and experts; weights take `width` B each, 1 for FP8."""

    preset: str
    layers: int
    experts: int
    parameters: float  # of an expert
    width: float = 1.0

    @property
    def weights(self) -> float:
        """Of an expert, B."""
        return self.parameters * self.width

    @property
    def costs(self) -> FetchCosts:
        return FetchCosts(self.weights, 2 * self.parameters)


MODELS = {
    "DeepSeek-V3": Model("deepseek-v3", 58, 256, 3 * 7168 * 2048.0),
    "Qwen3-235B": Model("qwen3-235b-a22b", 94, 128, 3 * 4096 * 1536.0),
}

MODELS |= {f"{name}, FP16": replace(model, width=2.0) for name, model in MODELS.items()}
FP8, FP16 = tuple(MODELS)[:2], tuple(MODELS)[2:]  # of the paper, and of its later edition
DIE_MEMORY = (
    "[{{name: llc, bandwidth_GB_per_s: 10000, capacity_GB: 0.064}}, {{name: hbm, bandwidth_GB_per_s: {rate}, "
    "latency_ns: 300, capacity_GB: {capacity}}}]"
)
LATER = {  # dies of the later edition's Table I
    "die.compute_TFLOPs_per_s": "989",
    "memory": DIE_MEMORY.format(rate=3350, capacity=72),
    "link.bandwidth_GB_per_s": "1700",
}
MODELS |= {  # whose gating is recorded: no preset
    "DeepSeek-V2-Lite": Model("", 26, 64, 3 * 2048 * 1408.0),
    "GPT-OSS-20B": Model("", 24, 32, 3 * 2880 * 2880.0),
}
ROOM = 2.75  # HBM over what home experts take, of DeepSeek-V3 on Dojo


def scaled(model: str) -> dict[str, str]:
    """What is changed of Dojo for a smaller model: 2x3 dies, on which experts are as many to a die as on Dojo, 10 of
    DeepSeek-V2-Lite for those of DeepSeek-V3, 5 of GPT-OSS for those of Qwen3, and HBM with as much room."""
    own = MODELS[model]
    capacity = ROOM * own.layers * own.experts * own.weights / 6 / 1e9
    return {"mesh_shape": "[2, 3]", "memory": DIE_MEMORY.format(rate=2000, capacity=capacity)}


@lru_cache
def machine_of(name: str) -> Machine:
    """A machine of the configs; with "later " before its name, with dies of the later edition; and "scaled " with the
    name of a model, Dojo scaled to it."""
    kind, _, own = name.rpartition(" ")
    changes = scaled(own) if kind == "scaled" else LATER if kind == "later" else {}
    file = CONFIGS / "hardware" / f"{'dojo_5x5' if kind == 'scaled' else own}.yaml"
    return build_machine(load_hardware(file, [f"{key}={value}" for key, value in changes.items()]))


def layer_of(model: str, machine: str) -> FetchLayer:
    """A layer of a model on a machine."""
    return FetchLayer(machine_of(machine), MODELS[model].costs)


def process_of(model: str, popularity: float = 1.0, reuse: float = 1.0, seed: int = SEED) -> GatingProcess:
    """The model's preset in `LAYERS` layers, with requests of one length; its widths of popularity and reuse scaled."""
    preset = PRESETS[MODELS[model].preset]
    preset = replace(
        preset,
        layer_ids=range(LAYERS),
        popularity=preset.popularity * popularity,
        from_token=preset.from_token * reuse,
    )
    process = preset.process(seed)
    dealt = replace(process.requests, length=np.full(256, PROMPT + STEPS), prompt=np.full(256, PROMPT))
    return replace(process, requests=dealt)


@lru_cache(maxsize=2)
def requests_of(
    model: str, count: int = BATCHES[-1], popularity: float = 1.0, reuse: float = 1.0, seed: int = SEED
) -> np.ndarray:
    """Made-up gating [layer, request, token, k]."""
    tokens = PROMPT + STEPS
    trace = sample_trace(process_of(model, popularity, reuse, seed), count * tokens, seed)
    return np.moveaxis(trace.experts.reshape(count, tokens, LAYERS, -1), 2, 0)


def topics_of(model: str, count: int) -> np.ndarray:
    """The topic of each of these requests."""
    requests = process_of(model).requests
    return requests.topics[requests.deal(count * (PROMPT + STEPS), SEED).card, 0]


@dataclass(frozen=True)
class Case:
    """A model with a batch of its requests: what is known of every step, by how many experts a row predicts."""

    model: str
    experts: np.ndarray  # [layer, request, token, k]

    @cached_property
    def prefill(self) -> np.ndarray:
        """Pairs of neighbouring tokens of the prompts, [layer, expert, expert] (Insight 1)."""
        return sum(self.pairs(token) for token in range(PROMPT - 1))

    def pairs(self, token: int) -> np.ndarray:
        layers = zip(self.experts[:, :, token], self.experts[:, :, token + 1], strict=True)
        return np.stack([counted(before, after, MODELS[self.model].experts) for before, after in layers])

    @cached_property
    def across(self) -> np.ndarray:
        """Pairs of experts of the prompts' tokens in a layer and in the next, [pair, expert, expert]."""
        layers = zip(self.experts[:-1, :, :PROMPT], self.experts[1:, :, :PROMPT], strict=True)
        return np.stack([counted(before, after, MODELS[self.model].experts) for before, after in layers])

    def guidance(self, top: int, prefill: bool = True, llc: bool = False) -> Guidance:
        """What each decode step knows, with the prefill's map or without, and with forecasts for the LLC."""
        start = self.prefill if prefill else np.zeros_like(self.prefill)
        decode = jnp.asarray(np.moveaxis(self.experts[:, :, PROMPT:], 2, 1), jnp.int32)
        across = jnp.asarray(self.across) if llc else None
        return guide(CrossToken(jnp.asarray(start), min(top, start.shape[-1])), decode, across)


def counted(before: np.ndarray, after: np.ndarray, experts: int) -> np.ndarray:
    """How often an expert of `before` came with one of `after` [..., k], [expert, expert]."""
    place = before[..., :, None].astype(np.int64) * experts + after[..., None, :]
    return np.bincount(place.ravel(), minlength=experts**2).reshape(experts, experts).astype(np.float32)


def homes(model: str, dies: int, way: str = "random", seed: int = SEED) -> np.ndarray:
    """Home dies [layer, expert] in equal numbers: dealt at random, in runs of numbers, or round the dies."""
    experts = MODELS[model].experts
    even = np.arange(experts) % dies
    if way == "random":
        rng = np.random.default_rng(seed)
        return np.stack([rng.permutation(even) for _ in range(LAYERS)])
    return np.tile({"runs": np.sort(even), "round": even}[way], (LAYERS, 1))


def homes_in_turn(model: str, dies: int) -> np.ndarray:
    """The same, but the dies with one expert more than others are others in each layer."""
    even = np.arange(MODELS[model].experts)
    rng = np.random.default_rng(SEED)
    more = MODELS[model].experts % dies
    return np.stack([rng.permutation((even + layer * more) % dies) for layer in range(LAYERS)])


def policy_of(
    model: str,
    machine: str,
    home: np.ndarray | None = None,
    start: np.ndarray | None = None,
    **changes: Any,
) -> WaferPolicy:
    """A policy with the study's settings but for the changes."""
    known, layer = MODELS[model], layer_of(model, machine)
    chip = layer.machine
    home = homes(model, chip.num_nodes) if home is None else home
    settings = SETTINGS | changes
    name = settings["allocation"]
    own = {key: settings[key] for key in {"base": OF_BASE, "allo": OF_ALLO}.get(name, ()) if key in settings}
    if name == "allo" and start is None and settings["prediction"] == "none":
        own["neighbours"] = widest(np.asarray(chip.topology.hop_counts()))
    room = copies_that_fit(np.asarray(chip.capacity, float), home, known.weights, known.layers)
    return WaferPolicy(
        home=jnp.asarray(home),
        capacity=jnp.asarray(np.full(room.shape, np.inf) if settings.get("unlimited") else room, float),
        allocation=allocation_of(name, layer, **own),
        start=None if start is None else jnp.asarray(start),
        llc=LLCPrefetch(layer) if settings.get("llc") else None,
        prediction=settings["prediction"],
        eviction=settings["eviction"],
    )


def cases(model: str, batches: tuple[int, ...] = BATCHES) -> Iterator[tuple[int, Case]]:
    """Batches of a model, the first requests of one trace."""
    drawn = requests_of(model, max(batches))
    for batch in batches:
        yield batch, Case(model, drawn[:, :batch])


def double() -> Any:
    """Double precision, in which Algorithm 1's costs are exact."""
    return jax.enable_x64(True)


Row = dict[str, Any]


def rolled_out(model: str, machine: str, policy: WaferPolicy, known: Guidance) -> Rollout:
    """All steps as NumPy arrays: the last copies, times [step, layer], and who fetched what with figures of traffic."""
    layer = layer_of(model, machine)
    done = rollout(policy, layer, known)
    return jax.tree.map(np.asarray, done._replace(kept=(done.kept, traffic_figures(layer, done.kept))))


def measured(model: str, machine: str, policy: WaferPolicy, known: Guidance, first: int = 0) -> Row:
    """Means over the steps from `first` on and all layers: times, bytes, hops, and the busiest of each resource."""
    copies, times, (_, traffic) = rolled_out(model, machine, policy, known)
    busy = times.busy
    return {
        "layer_us": times.total[first:].mean() * 1e6,
        "link_us": busy["fetch"]["link"][first:].max(axis=-1).mean() * 1e6,
        "hbm_us": busy["fetch"]["hbm"][first:].max(axis=-1).mean() * 1e6,
        "compute_us": busy["compute"]["node"][first:].max(axis=-1).mean() * 1e6,
        "even_us": even_seconds(machine, model, known)[first:].mean() * 1e6,
        **{name: values[first:].mean() for name, values in traffic.items()},
        "copies": copies.most.max(),
    }


def even_seconds(machine: str, model: str, known: Guidance) -> np.ndarray:
    """Seconds [step, layer] that no allocation and no copies can beat: each expert read once, all dies alike busy."""
    chip, costs, counts = machine_of(machine), MODELS[model].costs, np.swapaxes(known.counts, 0, 1)
    read = (counts > 0).sum(axis=-1) * float(costs.expert_bytes / chip.memory[-1].bandwidth.sum())
    return np.maximum(read, counts.sum(axis=-1) * float(costs.flops_per_request / chip.die.flops.sum()))


def beside(rows: list[Row], base: Row) -> list[Row]:
    """Rows with their gains over one of them; without any hops these are infinitely fewer."""
    return [
        row
        | {
            "speedup": base["layer_us"] / row["layer_us"],
            "hop_reduction": base["hops"] / row["hops"] if row["hops"] > 0 else np.inf,
        }
        for row in rows
    ]
