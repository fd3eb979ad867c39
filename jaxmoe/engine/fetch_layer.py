"""A layer whose dies compute experts that they may have to fetch from another die's memory, and who decides where."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxmoe.engine.demand import Fixed, Work
from jaxmoe.engine.fetch import FetchCosts, Fetches, Figures
from jaxmoe.engine.fetch_turns import ReadsInTurn
from jaxmoe.engine.layer import AbstractLayer
from jaxmoe.engine.price import price
from jaxmoe.engine.schedule import AbstractSchedule, Serial
from jaxmoe.engine.stage import Stage
from jaxmoe.engine.times import LayerTime
from jaxmoe.hardware import Machine
from jaxmoe.relax import AbstractReduction, AbstractSupport, HardMax, HardSupport, as_number

Switching = Literal["cut_through", "store_and_forward"]


class HostLink(eqx.Module):
    """PCIe to a host whose processor decides the allocation of a layer (V-F).

    `fixed` seconds for both ways, and the table up and the plan down at its rate.
    """

    bandwidth: Float[Array, ""] = eqx.field(converter=as_number)  # B/s
    fixed: Float[Array, ""] = eqx.field(converter=as_number)  # s

    def seconds(self, experts: int, dies: int) -> Float[Array, ""]:
        """Once for each layer: 4 B of requests, 1 B of home and a bit for each die of every expert up; down as many
        entries of an expert, a die and requests, 8 B each, as an expert has candidate dies at most, 5."""
        table = experts * (5 + dies / 8)
        return self.fixed + (table + experts * 5 * 8) / self.bandwidth


class FetchLayer(AbstractLayer):
    """A layer whose dies compute experts that they may have to fetch, on a machine with an LLC and HBM.

    A die computes with what is there while it reads the rest, so reads and products are side by side in every
    schedule. An expert is read once for a whole batch, so that micro-batches are refused. With a `host` that allocates,
    every layer waits for it.

    With so many reads `outstanding` dies read slices in turn (`ReadsInTurn`), by the `switching` of links; such times
    are exact alone. `None` is as many as a die likes, which stream and cut through.
    """

    machine: Machine
    costs: FetchCosts
    host: HostLink | None = None
    schedule: AbstractSchedule = Serial()
    outstanding: int | None = eqx.field(static=True, default=None)
    switching: Switching = eqx.field(static=True, default="cut_through")

    def time(
        self,
        decisions: Fetches,
        tokens: PyTree = None,
        reduction: AbstractReduction | None = None,
        support: AbstractSupport | None = None,
    ) -> LayerTime:
        """Time of one layer from who computes what; `tokens` are not looked at.

        Raises `ValueError` for a relaxed `support` where reads are in turn.
        """
        costs, requests = self.costs, decisions.requests
        flops = requests.sum(axis=0) * costs.flops_per_request
        nothing = jnp.zeros_like(flops)
        stages: list[Stage] = []
        if self.host is not None:
            stages.append(Stage("host", Fixed(self.host.seconds(*requests.shape)), block="host", split="whole"))
        reads = decisions.reads(costs, HardSupport() if support is None else support)
        if self.outstanding is None:
            work = Work(flops, nothing, nothing)
            stages += [Stage("fetch", reads, split="whole"), Stage("compute", work, split="whole")]
        elif isinstance(support, HardSupport | None):
            turns = ReadsInTurn(decisions, reads, self.outstanding, self.switching == "cut_through")
            stages.append(Stage("fetch", turns, split="whole"))
        else:
            raise ValueError(
                f"outstanding is {self.outstanding}, but reads in turn have no relaxed time; give the layer None for it"
            )
        return price(self.machine, self.schedule, tuple(stages), HardMax() if reduction is None else reduction)

    def blank(self, tokens: PyTree) -> Fetches:
        layers, dies = jax.tree.leaves(tokens)[0].shape[0], self.machine.num_nodes
        nothing = jnp.zeros((layers, 1, dies), self.costs.expert_bytes.dtype)
        return Fetches(nothing, jnp.zeros((layers, 1), jnp.int32), nothing, nothing)


@eqx.filter_jit
def traffic_figures(layer: FetchLayer, fetches: Fetches) -> Figures:
    """Figures of the traffic of a rollout, [step, layer], from who fetched what, leaves [step, layer, ...]."""

    def figures(fetches: Fetches) -> Figures:
        return fetches.reads(layer.costs, HardSupport()).figures(layer.machine)

    return jax.lax.map(jax.vmap(figures), fetches)
