"""moentwine: attention in tensor-parallel groups, tokens in full domains, and experts that migrate on idle links."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des import LayerDescription
from jaxmoe.des.description import node_seconds, plan_tokens
from jaxmoe.des.layers_in_turn import (
    AttentionDescription,
    attention_seconds,
    most_moves,
    run_layers,
    token_layer,
    weight_transfers,
)
from jaxmoe.des.token_communication import replay_communication
from jaxmoe.engine import AbstractMethod, GroupedAttention, Layer, LayerTime, SlotDecisions, grouped_attention, rollout
from jaxmoe.engine.counts import CountModel, paths_of
from jaxmoe.hardware import Machine
from jaxmoe.methods.forecast import MovingAverage
from jaxmoe.methods.moentwine.balancing import (
    AbstractRule,
    Balancer,
    Eplb,
    KeepSlots,
    ShadowSlots,
    check_slots_fit,
    first_slots,
)
from jaxmoe.methods.moentwine.gradient_slots import HIDDEN, GradientSlots, hop_price
from jaxmoe.methods.moentwine.migration import Windows, edge_entries
from jaxmoe.methods.settings.moentwine import MoentwineSettings
from jaxmoe.methods.static import StaticPlan
from jaxmoe.methods.system import (
    AbstractRun,
    AbstractSystem,
    DeploymentSetting,
    RolloutResult,
    SystemRecording,
    TokenPaths,
    UnsuitableSystemError,
    times_on,
)
from jaxmoe.network.token_communication import all_reduce_rounds, closing_rounds, layout_exchange, token_homes
from jaxmoe.placement.slots import share_of_slots
from jaxmoe.placement.token_layout import TokenLayout, links_inside_domains, successive_layout, token_layout
from jaxmoe.traces import Batch
from jaxmoe.traces.prediction.predictor import shares
from jaxmoe.traces.statistics.counting import count_pairs

HORIZON = 10.0  # iterations over which slots by gradient write a move off
RECORDED_CHUNK = 65536.0  # B, of timelines at least: files with every packet are too large for viewers
REPLAYED = ("attention", "all_reduce", "dispatch", "compute", "combine")  # stages that the simulator replays


@dataclass(frozen=True)
class Moentwine(MoentwineSettings, AbstractSystem):
    """A token layout with its exchange, attention before the experts, and a balancer.

    `layout`, `tp`, `fetch` and `all_gather` are as in `token_layout`, `linear_speedup` as in VI-A1; `alpha` and `beta`
    are those of Eq. 2. On networks of switches groups are of successive devices.
    """

    def runs(self, setting: DeploymentSetting) -> dict[str, AbstractRun]:
        """Runs by name: the baseline mapping and the layout, both without a balancer, and last the layout with it."""
        grid = setting.model.machine.topology.grid
        names = dict.fromkeys(["baseline_esp" if self.slices_experts else "baseline", self.layout])
        if grid is None:
            layouts = {"successive": self._switched(setting)}
        else:
            layouts = {name: self._layout(name, grid, setting) for name in names}
        made: dict[str, AbstractRun] = {
            name: self._run(layout, setting, replace(self, balancer="none")) for name, layout in layouts.items()
        }
        if self.balancer == "none":
            *_, last = made
            made["moentwine"] = made.pop(last)
            return made
        return made | {"moentwine": self._run(layouts[[*layouts][-1]], setting, self)}

    def _layout(self, name: str, grid: tuple[int, int], setting: DeploymentSetting) -> TokenLayout:
        baseline = name.startswith("baseline")
        return token_layout(name, grid, self.tp, setting.wafer_shape, self.fetch, None if baseline else self.all_gather)

    def _switched(self, setting: DeploymentSetting) -> TokenLayout:
        if setting.clusters is None:
            raise UnsuitableSystemError(
                "system moentwine places tokens on meshes, wafers, switches and clusters; this machine is neither"
            )
        return successive_layout(*setting.clusters, self.tp)

    def _run(self, layout: TokenLayout, setting: DeploymentSetting, own: "Moentwine") -> "LayoutRun":
        topology = setting.model.machine.topology
        attention = grouped_attention(
            setting.moe,
            layout.tp,
            layout.num_groups,
            float(setting.context_tokens),
            all_reduce_rounds(layout, self.both_ways),
            bytes_per_element=setting.bytes.activations,
            weight_bytes_per_element=setting.bytes.attention,
            kv_bytes_per_element=setting.bytes.kv,
            linear_speedup=self.linear_speedup,
            closing=closing_rounds(layout, self.both_ways) if self.closing else None,
            cached_tokens=setting.cached_tokens,
        )
        model = replace(
            setting.model,
            exchange=layout_exchange(layout, topology),
            mode="sharded" if layout.sliced else "replicated",
            extras=(attention,),
        )
        if layout.sliced and own.balancer != "none":
            raise UnsuitableSystemError(
                f"system.layout: {layout.name} slices experts over domains, which leaves nothing to balance; "
                "set system.balancer: none"
            )
        share = _sliced(layout, setting.moe.num_experts) if layout.sliced else None
        return LayoutRun(
            setting, layout, model, attention, share, None if layout.sliced else own.balancer_of(layout, setting)
        )

    def balancer_of(self, layout: TokenLayout, setting: DeploymentSetting) -> Balancer:
        """The balancer for a plan of whole experts. Raises `UnsuitableSystemError`, or `BalancerError` without room."""
        machine = setting.model.machine
        shadow = 0 if self.balancer == "none" else self.shadow_slots
        if (setting.share.max(axis=2) < 1 - 1e-4).any():
            raise UnsuitableSystemError(
                "system moentwine moves whole experts, but the plan divides some; use a plan such as ep_balanced, or "
                "system.layout: esp to slice them over domains"
            )
        slots = first_slots(setting.share, shadow)
        changing = slots.shape[2] if self.balancer == "eplb" else shadow
        arriving = changing if self.migration == "non_invasive" else 0
        check_slots_fit(slots, float(setting.model.costs.expert_bytes), machine, arriving)
        distance = jnp.asarray(machine.topology.hop_counts(), jnp.float32)
        native = slots.shape[2] - shadow
        rules: dict[str, AbstractRule] = {
            "none": KeepSlots(),
            "eplb": Eplb(),
            "greedy": ShadowSlots(distance, native, "coldest"),
            "topology_aware": ShadowSlots(distance, native, "nearest"),
        }
        if self.balancer == "gradient":
            hop = hop_price(machine, setting.model.costs.expert_bytes)
            price = hop if self.migration == "invasive" else HIDDEN * hop
            parts, paths = jnp.asarray(layout.parts), paths_of(machine.topology, layout.parts)
            # Of experts and all-to-all alone: stages before them do not depend on slots.
            model = CountModel(machine, setting.model.costs, parts, paths, (), setting.model.schedule)
            rules["gradient"] = GradientSlots(model, distance, jnp.asarray(HORIZON), price, native)
        windows = None
        if self.migration == "non_invasive" and self.balancer != "none":
            ends = machine.topology.link_ends
            inside = None if machine.topology.grid is None else links_inside_domains(layout, ends)
            windows = Windows.always(len(ends)) if inside is None else Windows.alternating(inside)
        return Balancer(
            rule=rules[self.balancer],
            forecast=MovingAverage(shares(count_pairs(setting.history).load), jnp.asarray(self.rate)),
            start=jnp.asarray(slots),
            distance=distance,
            alpha=jnp.asarray(np.inf if self.balancer == "none" else self.alpha, jnp.float32),
            beta=jnp.asarray(self.beta, jnp.float32),
            windows=windows,
            entry=jnp.asarray(edge_entries(machine.topology)) if self.weights_from == "edge" else None,
            homes=jnp.asarray(_homes(layout, setting)),
            expert_bytes=setting.model.costs.expert_bytes,
            experts=setting.moe.num_experts,
        )


def _homes(layout: TokenLayout, setting: DeploymentSetting) -> Int[np.ndarray, " token"]:
    return token_homes(layout, setting.batch_tokens).astype(np.int32)


def _slots_and_facts(decisions: SlotDecisions, time: LayerTime) -> tuple[LayerTime, Any]:
    return time, {"slots": decisions.slots, **decisions.facts}


def _sliced(layout: TokenLayout, experts: int) -> Float[np.ndarray, "expert node"]:
    """Experts dealt in their order, each in equal slices over the devices that share it."""
    slices = layout.slices
    member = (np.arange(experts) * (slices.max() + 1) // experts)[:, None] == slices
    return (member / member.sum(axis=1, keepdims=True)).astype(np.float32)


@dataclass(frozen=True)
class LayoutRun(AbstractRun):
    """A token layout over iterations, with a balancer, or with experts in slices."""

    setting: DeploymentSetting
    layout: TokenLayout
    model: Layer
    attention: GroupedAttention
    sliced: Float[np.ndarray, "expert node"] | None
    balancer: Balancer | None

    @cached_property
    def homes(self) -> Int[np.ndarray, " token"]:
        return _homes(self.layout, self.setting)

    @property
    def group(self) -> Int[np.ndarray, " token"]:
        """The group of the layout that has each token."""
        return self.homes if self.layout.name != "successive" else self.layout.group[self.homes]

    @property
    def vector_bytes(self) -> float:
        return self.setting.moe.hidden_size * self.setting.bytes.activations

    def _method(self, layers: int) -> AbstractMethod:
        """The balancer, or experts that stay in slices."""
        if self.balancer is not None:
            return self.balancer
        assert self.sliced is not None
        share = jnp.broadcast_to(jnp.asarray(self.sliced), (layers, *self.sliced.shape))
        return StaticPlan(share, jnp.broadcast_to(jnp.asarray(self.homes), (layers, *self.homes.shape)))

    def timed(self, steps: Batch, machine: Machine) -> LayerTime:
        return times_on(machine, self._method(len(steps.experts)), self.model, steps)

    def rollout(self, steps: Batch) -> RolloutResult:
        method = self._method(len(steps.experts))
        if self.balancer is None:
            time = rollout(method, self.model, steps, keep=lambda _, time: (time, ())).time.as_numpy()
            return RolloutResult(time, (), {}, _replayed_stages(time))
        _, time, decided = rollout(method, self.model, steps, keep=_slots_and_facts)
        time, decided = time.as_numpy(), jax.tree.map(np.asarray, decided)
        moved = decided["experts_moved"].sum(axis=1)
        figures = {
            "excess_over_mean_of_loads": float(decided["excess"].mean()),
            "experts_moved_per_iteration": float(moved.mean()),
            "hops_per_moved_expert": float(decided["expert_hops"].sum() / max(moved.sum(), 1)),
            "iterations_with_a_migration": int((moved > 0).sum()),
        }
        return RolloutResult(time, decided, figures, _replayed_stages(time))

    def replay(self, rolled: RolloutResult, batch: Batch, step: int, row: int) -> float:
        layer: LayerDescription = self.setting.describe(self.model.mode, "lowest_host")
        plan = plan_tokens(layer, self._serving(rolled, step, row), batch)
        sent = replay_communication(layer.fabric, self.layout, plan.visited, self.group, self.vector_bytes)
        node = float(node_seconds(layer, plan, batch).max())
        return self._attention_seconds(layer) + node + sum(stage.seconds for stage in sent.values())

    def token_paths(self, tokens: int) -> TokenPaths | None:
        if self.sliced is not None:
            return None
        if self.layout.name == "successive":  # homes are the devices themselves
            return TokenPaths.of_nodes(self.homes, self.layout.num_nodes)
        return TokenPaths(self.homes, self.layout.parts)

    @property
    def unplaced(self) -> str:
        return f"system.layout: {self.layout.name} slices every expert alike; use the layout er"

    def record(self, rolled: RolloutResult, batch_at: Callable[[int, int], Batch]) -> SystemRecording | None:
        """Two layers, with the weights that move to them where slots change most (moentwine Fig. 11e)."""
        described = self.setting.describe(self.model.mode, "lowest_host")
        fabric = replace(described.fabric, chunk_bytes=max(described.fabric.chunk_bytes or 0.0, RECORDED_CHUNK))
        layer = replace(described, fabric=fabric)
        layers = min(2, len(self.setting.share))
        hidden = self.balancer is not None and self.balancer.windows is not None
        if self.balancer is None:
            step, rows, pairs = 0, range(layers), np.zeros((0, 2), int)
        else:
            # In the background weights travel while those before serve; else inference waits until they are there.
            slots = rolled.kept["slots"]
            before = slots if hidden else np.concatenate([np.asarray(self.balancer.start)[None], slots[:-1]])
            step, rows, pairs = most_moves(before, rolled.kept["target"] if hidden else slots, fabric.hops, layers)
            if self.balancer.entry is not None:
                pairs[:, 0] = np.asarray(self.balancer.entry)[pairs[:, 1]]
        attention = np.full(fabric.num_nodes, self._attention_seconds(layer))
        phases = []
        for row in rows:
            served, batch = self._serving(rolled, step, row), batch_at(row, step)
            phases.append(token_layer(layer, self.layout, served, batch, self.group, attention))
        weights = weight_transfers(fabric, pairs[:, 0], pairs[:, 1], layer.expert_bytes) if len(pairs) else None
        ran = run_layers(fabric, phases, weights, "background" if hidden else "waited_for", record=True)
        shown = (
            f"moentwine, iteration {step}, {len(rows)} layers from the one in row {rows[0]}, {len(pairs)} experts move"
        )
        facts = {"iteration": step, "rows": [*rows], "experts_moved": len(pairs), "chunk_B": fabric.chunk_bytes}
        return SystemRecording(ran.run, ran.stage, fabric, shown, facts)

    def _serving(self, rolled: RolloutResult, step: int, row: int) -> Float[np.ndarray, "expert node"]:
        """The part of every expert that each node serves, in a step and layer."""
        if self.sliced is not None:
            return self.sliced
        slots = rolled.kept["slots"][step, row].reshape(1, -1)
        return share_of_slots(slots, self.setting.moe.num_experts, self.layout.num_nodes)[0]

    def _attention_seconds(self, layer: LayerDescription) -> float:
        """Seconds of attention in the event simulator."""
        flops, weights = float(self.attention.flops_per_token), float(self.attention.weight_bytes)
        numbers = (flops, weights, float(self.attention.context_bytes), self.vector_bytes)
        return attention_seconds(layer, AttentionDescription(self.layout.group, *numbers), self.group)


def _replayed_stages(time: LayerTime) -> Float[np.ndarray, "step layer"]:
    return np.sum([time.stages[name] for name in REPLAYED], axis=0)
