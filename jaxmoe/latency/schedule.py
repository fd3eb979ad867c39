"""How stages combine, and the time of a layer that comes of it."""

import abc
import functools
import re
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.errors import InputError
from jaxmoe.relax import AbstractReduction

# What a layer takes: seconds of every stage by name, busy seconds of every resource, and the total.
#
# One type for the model and the event simulator.

STAGES = ("dispatch", "compute", "combine")  # what every layer has, in order

# All stages that a layer may have, in order: a phase is what the network does before its nodes compute, what they
# compute, and what the network does after it. Tensor-parallel attention ends in an all-reduce, which may be left to the
# end of the layer (`closing`) for partial sums.
PHASES = (((), "attention", ("all_reduce",)), (("metadata", "dispatch"), "compute", ("combine", "closing")))


class LayerTime(eqx.Module):
    """Seconds. `vmap` adds leading axes to everything, such as layers and batches; arrays are of JAX or NumPy.

    `busy[stage][kind]` is how long every resource of a kind is busy in a stage: `node` for compute and memory, `link`
    and `port` for the network. `energy` is of what the machine states: `compute`, levels of memory, kinds of link,
    `idle`.
    """

    stages: dict[str, Any]  # [*lead]
    busy: dict[str, dict[str, Any]]  # [*lead, resource]
    total: Any  # [*lead]
    energy: dict[str, Any] = eqx.field(default_factory=dict)  # J by resource, [*lead]

    @property
    def total_energy(self) -> Any:
        """J of all resources, [*lead]. Raises `ValueError` where the machine states no energy."""
        if not self.energy:
            raise ValueError("the machine states no energy; give it an Energy")
        return sum(self.energy.values())

    @property
    def dispatch(self) -> Any:
        return self.stages["dispatch"]

    @property
    def compute(self) -> Any:
        return self.stages["compute"]

    @property
    def combine(self) -> Any:
        return self.stages["combine"]

    @property
    def communication(self) -> Any:
        return self.dispatch + self.combine

    @property
    def node_time(self) -> Any:
        """Busy seconds of every node in compute."""
        return self.busy["compute"]["node"]

    @property
    def dispatch_link_time(self) -> Any:
        return self.busy["dispatch"]["link"]

    @property
    def combine_link_time(self) -> Any:
        return self.busy["combine"]["link"]

    @property
    def link_time(self) -> Any:
        """Busy seconds of every link in dispatch and combine together."""
        return self.dispatch_link_time + self.combine_link_time

    @property
    def mean(self) -> Any:
        """Mean total over batches, the last leading axis."""
        return self.total.mean(axis=-1)

    @property
    def p95(self) -> Any:
        """95th percentile of the total over batches, the last leading axis."""
        return (np if isinstance(self.total, np.ndarray) else jnp).quantile(self.total, 0.95, axis=-1)

    def first_batches(self, count: int) -> "LayerTime":
        """Times [layer, batch] of the first batches; busy times that are means over batches stay as they are."""
        stages = {name: seconds[..., :count] for name, seconds in self.stages.items()}
        energy = {name: joules[..., :count] for name, joules in self.energy.items()}
        return LayerTime(stages, self.busy, self.total[..., :count], energy)

    def as_numpy(self) -> "LayerTime":
        """The same as float64 NumPy arrays."""
        return jax.tree.map(lambda leaf: np.asarray(leaf, float), self)


# How the stages of a layer combine to its time: one named rule each.
#
# - `Serial`: one after the other, t = t_comp + 2 t_comm (hd_moe Eq. 12).
# - `Overlap`: communication and compute of different work at once, so the longer of them counts: the limit of many
#   micro-batches, or of two batches that take turns.
# - `Pipelined`: the batch in `m` micro-batches of successive tokens. The network serves one stage at a time, in the
#   order dispatch 1, dispatch 2, combine 1, dispatch 3, combine 2, ...; a micro-batch computes when it is dispatched
#   and the one before has computed.
# - `IdleLinks`: stages as in `Serial`, while a background movement uses what they leave idle of every link: the layer
#   takes longer only where a link has no idle time left. In the other rules a movement comes before the stages.

Seconds = Float[Array, ""]


class AbstractSchedule(eqx.Module):
    """Combines stages. `micro_batches` is into how many parts a batch is cut, each with stages of its own."""

    @property
    def micro_batches(self) -> int:
        return 1

    @property
    def in_background(self) -> bool:
        """Whether a movement runs beside the stages."""
        return False

    def total(self, stages: Mapping[str, Float[Array, " part"]], reduction: AbstractReduction) -> Seconds:
        """Time of all parts of a batch, s, from the seconds of its stages: phase after phase."""
        nothing = jnp.zeros_like(stages["compute"])

        def together(names: tuple[str, ...]) -> Float[Array, " part"]:
            given = [stages[name] for name in names if name in stages]
            return functools.reduce(jnp.add, given) if given else nothing

        totals = [
            self.of_phase(together(before), stages[nodes], together(after), reduction)
            for before, nodes, after in PHASES
            if nodes in stages
        ]
        return functools.reduce(jnp.add, totals)

    @abc.abstractmethod
    def of_phase(
        self,
        dispatch: Float[Array, " part"],
        compute: Float[Array, " part"],
        combine: Float[Array, " part"],
        reduction: AbstractReduction,
    ) -> Seconds:
        """Time of one phase of all parts of a batch, s: the network before and after what nodes compute."""


class Serial(AbstractSchedule):
    """One stage after the other."""

    def of_phase(self, dispatch, compute, combine, reduction):
        return (dispatch + compute + combine).sum()


class Overlap(AbstractSchedule):
    """Compute hides communication, or the other way round."""

    def of_phase(self, dispatch, compute, combine, reduction):
        return reduction(jnp.stack([(dispatch + combine).sum(), compute.sum()]))


class Pipelined(AbstractSchedule):
    """Micro-batches in a pipeline of network and compute."""

    parts: int = eqx.field(static=True, default=2)

    @property
    def micro_batches(self) -> int:
        return self.parts

    def of_phase(self, dispatch, compute, combine, reduction):
        network = node = jnp.zeros((), dispatch.dtype)
        computed: list[Seconds] = []
        for part in range(self.parts):
            network = network + dispatch[part]
            node = jnp.maximum(node, network) + compute[part]
            computed.append(node)
            if part:
                network = jnp.maximum(network, computed[part - 1]) + combine[part - 1]
        return jnp.maximum(network, computed[-1]) + combine[-1]


class IdleLinks(AbstractSchedule):
    """Stages one after the other; movements in the background."""

    @property
    def in_background(self) -> bool:
        return True

    def of_phase(self, dispatch, compute, combine, reduction):
        return (dispatch + compute + combine).sum()


SCHEDULES = ("serial", "overlap", "pipelined(m)", "idle_links")


class ScheduleError(InputError):
    """A schedule that is not known, with the known ones."""


def schedule_of(name: str) -> AbstractSchedule:
    """The schedule of this name; `pipelined(4)` has four micro-batches. Raises `ScheduleError`."""
    plain: dict[str, AbstractSchedule] = {"serial": Serial(), "overlap": Overlap(), "idle_links": IdleLinks()}
    if name in plain:
        return plain[name]
    if found := re.fullmatch(r"pipelined\(([1-9]\d*)\)", name):
        return Pipelined(int(found[1]))
    raise ScheduleError(f"schedule is {name!r}, expected one of {', '.join(SCHEDULES)}, with a number for m")
