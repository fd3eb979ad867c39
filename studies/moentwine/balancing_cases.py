"""Machines, layouts and drifting workloads of the balancing study, and a run of a balancer on them."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from cases import clusters_of, hardware_of
from scenarios import iteration_mixture, merged_arrivals, scenario_of_requests, scenario_shares

from jaxmoe.config import build_machine, build_model, load_model
from jaxmoe.engine import LayerCosts, grouped_attention, rollout
from jaxmoe.engine.counts import CountModel, paths_of
from jaxmoe.engine.rollout import Rollout
from jaxmoe.engine.schedule import Overlap
from jaxmoe.engine.stage import chained
from jaxmoe.files import atomic_write
from jaxmoe.hardware import Machine
from jaxmoe.methods import Balancer, Eplb, KeepSlots, ShadowSlots, Windows, facts_alone, first_slots
from jaxmoe.methods.forecast import MovingAverage, PerfectForecast
from jaxmoe.methods.moentwine.balancing import AbstractRule, check_slots_fit
from jaxmoe.methods.moentwine.gradient_slots import HIDDEN, GradientSlots, Objective, hop_price
from jaxmoe.models import MoEModel
from jaxmoe.network import Congestion
from jaxmoe.network.token_communication import all_reduce_rounds
from jaxmoe.placement.token_layout import TokenLayout, links_inside_domains, successive_layout, token_layout
from jaxmoe.relax import HardMax
from jaxmoe.traces.synthesis import drawn_counts, preset_process, read_arrivals

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
SCENARIOS = ("chat", "coding", "math", "privacy")  # four topics of the preset's sixteen stand for them
TOPIC_TOKENS = 8192
CYCLES = 4.0  # of the mixture over the hour of recorded arrivals
TOKENS = {"prefill": 1024, "decode": 256, "hybrid": 512}  # of a group, in an iteration
# Tokens before each, of the recorded arrivals: prompts of 1,155 and answers of 211 tokens on average. The tokens of a
# prompt read its keys and values together, those of answers each its own.
CONTEXT = {"prefill": 577, "decode": 1260, "hybrid": 919}
READ_TOGETHER = {"prefill": 1155.0, "decode": 1.0, "hybrid": 2.0}
LINEAR_SPEEDUP = 2.0  # INT8 beside FP16, VI-A1
CHUNK = 1024.0  # B, of the routers of the machines
RATE = 0.2  # of the moving average: about the last nine iterations
SHADOW = 1  # slots for copies on a device
WARM = 20  # iterations that are left out
EVERY_TEN = {"alpha": 0.0, "beta": 9.0}  # VI-C1: "triggered on average every 10 iterations"; all balancers alike


@dataclass(frozen=True)
class Place:
    """A machine with its layout: what an iteration of balanced gating needs. Changes follow a name after colons."""

    machine: str
    layout: str
    tp: int
    model: str = "deepseek-v3"
    tokens: int | None = None  # of a group in an iteration; None: those of the phase

    def tokens_of(self, phase: str) -> int:
        """Tokens of all groups in an iteration."""
        return (self.tokens or TOKENS[phase]) * layout_of(self).num_groups


WAFERS, WAFER = Place("moentwine_4x8x8", "her", 4), Place("moentwine_8x8", "er", 4)
RACK = Place("nvl72", "successive", 4)


@lru_cache
def machine_of(name: str) -> Machine:
    return build_machine(hardware_of(name))


@lru_cache
def moe_of(name: str) -> MoEModel:
    return build_model(load_model(str(CONFIGS / "models" / f"{name}.yaml"), "model"))


@lru_cache
def layout_of(place: Place) -> TokenLayout:
    topology = machine_of(place.machine).topology
    if topology.grid is None:
        return successive_layout(*clusters_of(place.machine), place.tp)
    wafer = getattr(hardware_of(place.machine), "wafer_shape", None)
    return token_layout(place.layout, topology.grid, place.tp, wafer)


@lru_cache
def model_of(place: Place, phase: str) -> CountModel:
    """The costs of a layer. Micro-batches overlap communication and compute, Fig. 11e."""
    machine, moe, layout = machine_of(place.machine), moe_of(place.model), layout_of(place)
    rounds = all_reduce_rounds(layout)
    attention = grouped_attention(
        moe, layout.tp, layout.num_groups, float(CONTEXT[phase]), rounds,
        bytes_per_element=2.0, weight_bytes_per_element=1.0, linear_speedup=LINEAR_SPEEDUP,
    )  # fmt: skip
    attention = replace(attention, context_bytes=attention.context_bytes / READ_TOGETHER[phase])
    in_all = jnp.asarray(float(place.tokens_of(phase)))
    (first, second), _ = attention.lower(machine.topology, in_all, Congestion(jnp.asarray(CHUNK)))
    before = tuple(stage.priced(machine, HardMax()) for stage in chained((first, second)))
    vector = 2.0 * moe.hidden_size
    numbers = (
        vector,
        vector,
        moe.expert_parameters,
        2.0 * moe.expert_parameters / LINEAR_SPEEDUP,
        moe.expert_size,
        3.0,
    )
    costs = LayerCosts(*(jnp.asarray(float(number)) for number in numbers))
    paths = paths_of(machine.topology, layout.parts)
    return CountModel(machine, costs, jnp.asarray(layout.parts), paths, before, Overlap())


# Workloads.


@lru_cache
def shares_of(model: str) -> np.ndarray:
    """Shares of experts under each scenario."""
    return np.stack([_shares(model, topic) for topic in range(len(SCENARIOS))])


def _shares(model: str, topic: int) -> np.ndarray:
    """Those of one, kept in a file between runs as drawing them takes the longest."""
    known = ROOT / ".cache" / "moentwine" / f"shares_{model}_{TOPIC_TOKENS}_{topic}.npy"
    if not known.is_file():
        known.parent.mkdir(parents=True, exist_ok=True)
        (shares,) = scenario_shares(preset_process(model), [topic], TOPIC_TOKENS, seed=topic)
        with atomic_write(known) as aside, aside.open("wb") as file:
            np.save(file, shares)
    return np.load(known)


def loads_of(
    place: Place, scenario: str, phase: str, iterations: int, shared: Path, seed: int = 0, power: float = 1.0
) -> np.ndarray:
    """Choices of every expert in every iteration, float32 [iteration, layer, expert].

    `mixed` has all scenarios as requests arrived, any other name that one alone. `power` is what shares are raised to.
    """
    mixture, tokens = mixture_of(place, scenario, phase, iterations, shared, seed), place.tokens_of(phase)
    shares = sharpened(shares_of(place.model), power)
    return drawn_counts(shares, mixture, tokens * moe_of(place.model).top_k, seed).astype(np.float32)


def mixture_of(place: Place, scenario: str, phase: str, iterations: int, shared: Path, seed: int = 0) -> np.ndarray:
    """Parts of the scenarios, [iteration, scenario]."""
    if scenario != "mixed":
        return np.tile(np.eye(len(SCENARIOS))[SCENARIOS.index(scenario)], (iterations, 1))
    arrivals = merged_arrivals(
        [read_arrivals(shared / "arrivals" / f"azure_llm_2023_{name}.npz") for name in ("code", "conv")]
    )
    of_request = scenario_of_requests(arrivals, len(SCENARIOS), CYCLES, seed)
    return iteration_mixture(arrivals, of_request, phase, iterations, place.tokens_of(phase))


def sharpened(shares: np.ndarray, power: float) -> np.ndarray:
    """Shares raised to a power: the order of experts stays, and above 1 they differ more."""
    raised = shares**power
    return raised / raised.sum(axis=-1, keepdims=True)


def peak_of_devices(shares: np.ndarray) -> np.ndarray:
    """Largest of 8 devices' loads over their mean (Fig. 12), in every layer."""
    devices = shares.reshape(*shares.shape[:-1], 8, -1).sum(axis=-1)
    return devices.max(axis=-1) / devices.mean(axis=-1)


# Balancers.


@dataclass(frozen=True)
class Method:
    """A balancer by name. `alpha` is per layer: Eq. 2 sums over layers."""

    name: str
    invasive: bool
    alpha: float = 0.0
    beta: float = 0.0
    oracle: bool = False
    shadow: int = SHADOW
    renamed: bool = False  # of `eplb`
    horizon: float = 10.0  # iterations over which `gradient` writes a move off
    objective: Objective = "time"  # what `gradient` makes short

    def balancer(self, place: Place, phase: str) -> Balancer:
        model, moe, layout = model_of(place, phase), moe_of(place.model), layout_of(place)
        topology = model.machine.topology
        layers = len(moe.moe_layer_ids)
        slots = slots_in_order(layers, moe.num_experts, topology.num_nodes, self.shadow)
        changing = slots.shape[2] if self.name == "eplb" else self.shadow
        arriving = 0 if self.invasive else changing
        check_slots_fit(slots, float(model.costs.expert_bytes), model.machine, arriving)
        distance = jnp.asarray(np.asarray(topology.hop_counts()), jnp.float32)
        native = slots.shape[2] - self.shadow
        rules: dict[str, AbstractRule] = {
            "none": KeepSlots(),
            "eplb": Eplb(renamed=self.renamed),
            "greedy": ShadowSlots(distance, native, "coldest"),
            "topology_aware": ShadowSlots(distance, native, "nearest"),
        }
        if self.name == "gradient":
            hop = hop_price(model.machine, model.costs.expert_bytes)
            costs = (jnp.asarray(self.horizon), hop if self.invasive else HIDDEN * hop)
            rules["gradient"] = GradientSlots(model, distance, *costs, native, self.objective)
        windows = None
        if not self.invasive:
            inside = None if topology.grid is None else links_inside_domains(layout, topology.link_ends)
            windows = Windows.always(topology.num_links) if inside is None else Windows.alternating(inside)
        even = jnp.full((layers, moe.num_experts), 1 / moe.num_experts)
        forecast = PerfectForecast() if self.oracle else MovingAverage(even, jnp.asarray(RATE))
        numbers = (jnp.asarray(layers * self.alpha), jnp.asarray(float(self.beta)))
        sizes = {"expert_bytes": model.costs.expert_bytes, "experts": moe.num_experts}
        return Balancer(rules[self.name], forecast, jnp.asarray(slots), distance, *numbers, windows, **sizes)


def slots_in_order(layers: int, experts: int, nodes: int, shadow: int) -> np.ndarray:
    """Experts in order, as evenly as they go, and `shadow` empty slots on every node, int [layer, node, slot]."""
    share = np.eye(nodes)[np.arange(experts) * nodes // experts]
    return first_slots(np.broadcast_to(share, (layers, *share.shape)), shadow)


def run(method: Method, place: Place, phase: str, loads: np.ndarray) -> Rollout:
    """The iterations of a balancer, as NumPy arrays."""
    in_turn = jnp.swapaxes(jnp.asarray(loads), 0, 1)
    ran = rollout(method.balancer(place, phase), model_of(place, phase), in_turn, keep=facts_alone)
    return jax.tree.map(np.asarray, ran)


def figures_of(ran: Rollout, warm: int) -> dict[str, float]:
    """What a run comes to from iteration `warm` on; times are of one layer, means over layers and iterations."""
    stages = {name: 1e6 * float(each[warm:].mean()) for name, each in ran.time.stages.items()}
    moved = ran.kept["experts_moved"][warm:].sum(axis=1)
    total = 1e6 * float(ran.time.total[warm:].mean())
    interrupted = int((moved > 0).sum())
    waits = 1e6 * float(ran.time.stages["migration"][warm:].sum()) / ran.time.total.shape[1]
    return {
        "excess": float(ran.kept["excess"][warm:].mean()),
        "attention_us": stages["attention"],
        "all_reduce_us": stages["all_reduce"],
        "compute_us": stages["compute"],
        "all_to_all_us": stages["dispatch"] + stages["combine"],
        "migration_us": stages["migration"],
        "total_us": total,
        "migration_share": stages["migration"] / total,
        "iterations_between": len(moved) / max(interrupted, 1) if interrupted else float("inf"),
        "migration_costs_iterations": waits / max(interrupted, 1) / (total - stages["migration"]),
        "experts_moved": float(moved.mean()),
        "hops_per_expert": float(ran.kept["expert_hops"][warm:].sum() / max(moved.sum(), 1)),
    }
