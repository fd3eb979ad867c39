"""How hidden vectors get to the experts of a deployment and back: seconds of both ways, and what these take of a GPU.

Collectives are those of the backend or NCCL, within a node. DeepEP's normal kernels have processors of their own as
long as they run; its low-latency kernels hand over to the network and free the GPU (a hook receives what came). An
all-to-all crosses the nodes of one domain of links. Where GPUs have uneven loads, the fullest decides.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.engine import Launch
from jaxmoe.hardware.gpu.deepep import BYTES, Load, copies_of
from jaxmoe.hardware.gpu.deepep_files import ExchangeFile, KnownExchange
from jaxmoe.hardware.gpu.files import KernelFileError
from jaxmoe.hardware.gpu.terms import Numbers
from jaxmoe.models import MoEModel
from jaxmoe.serving.deployment import Count, Deployment, is_one
from jaxmoe.serving.gating import ExpertLoadTable
from jaxmoe.serving.kernels import Kernels

HIDDEN_BYTES = 2.0
PARTS = {"deepep_normal": ("transmit", "notify"), "deepep_low_latency": ("avg_t",)}


class StepExchange(abc.ABC):
    """Exchanges of a layer: `added` sums partial results of attention, then tokens go `there` and `back`.

    Each is for so many tokens of a data-parallel rank, and `None` where a deployment has no such exchange.
    """

    @abc.abstractmethod
    def added(self, tokens: Numbers) -> Launch | None: ...

    @abc.abstractmethod
    def there(self, tokens: Numbers) -> Launch | None: ...

    @abc.abstractmethod
    def back(self, tokens: Numbers) -> Launch | None: ...


def _shared(deployment: Deployment, kernels: Kernels) -> Float[Array, ""]:
    """The part of a GPU's processors that an exchange takes from the kernels beside it."""
    return (deployment.held - deployment.set_aside) / kernels.sheet.processors


@dataclass(frozen=True, eq=False)
class Collectives(StepExchange):
    """Sums of partial results; with data-parallel attention all tokens there, and sums of their results back."""

    model: MoEModel
    deployment: Deployment
    kernels: Kernels

    def added(self, tokens: Numbers) -> Launch | None:
        return self._launch("all_reduce", self._bytes(tokens), self.deployment.tensor)

    def there(self, tokens: Numbers) -> Launch | None:
        if is_one(self.deployment.data):
            return None
        return self._launch("all_gather", self._bytes(tokens) * self.deployment.data, self.deployment.devices)

    def back(self, tokens: Numbers) -> Launch | None:
        if is_one(self.deployment.data):
            return self.added(tokens)
        return self._launch("reduce_scatter", self._bytes(tokens) * self.deployment.data, self.deployment.devices)

    def _bytes(self, tokens: Numbers) -> Numbers:
        return tokens * self.model.hidden_size * HIDDEN_BYTES

    def _launch(self, operation: str, bytes_: Numbers, ranks: Count) -> Launch | None:
        if is_one(ranks):
            return None
        seconds = self.kernels.collective(operation, bytes_, ranks)
        return Launch(seconds, "network", _shared(self.deployment, self.kernels))


@dataclass(frozen=True, eq=False)
class RoutedExchange(StepExchange):
    """Tokens go to the GPUs of their experts, where choices fall evenly on a token's groups, and results back."""

    model: MoEModel
    deployment: Deployment
    kernels: Kernels
    gating: ExpertLoadTable

    def added(self, tokens: Numbers) -> Launch | None:
        """An all-reduce within a node."""
        return Collectives(self.model, self.deployment, self.kernels).added(tokens)

    @property
    def _slots(self) -> int:
        return self.model.num_experts + self.deployment.redundant

    def _sent(self, tokens: Numbers) -> Numbers:
        """Tokens of a GPU if all had the choices of the fullest one: an exchange ends when that one has its own."""
        tokens = jnp.maximum(tokens, 1.0)
        every = tokens * self.deployment.data
        mean = every * self.model.top_k / self.deployment.expert_ranks
        return tokens / self.deployment.tensor * jnp.maximum(self.gating(every).slots / mean, 1.0)

    def _reached(self, many: int) -> float:
        """On how many of so many equal parts of the experts a token has a choice on average."""
        model, slots = self.model, self._slots
        groups, chosen, top_k = model.expert_groups, model.groups_per_token, model.top_k
        near, size = slots * chosen // groups, slots // groups  # experts that it chooses among, and those of a group
        if groups % many == 0:  # each part has several groups, of which some are chosen
            own = groups // many
            missed = sum(
                comb(own, count) * comb(groups - own, chosen - count) * comb(near - count * size, top_k)
                for count in range(min(own, chosen) + 1)
            )
            return many * (1 - missed / (comb(groups, chosen) * comb(near, top_k)))
        if many % groups == 0:
            return copies_of(many * chosen // groups, near, top_k)
        return copies_of(many, slots, top_k)


@dataclass(frozen=True, eq=False)
class DomainAllToAll(RoutedExchange):
    """TensorRT-LLM's all-to-all between GPUs that one domain of links joins.

    Raises `KernelFileError` where its kernels are not known.
    """

    def __post_init__(self) -> None:
        if not self.kernels.file.of_kind("alltoall"):
            raise KernelFileError(
                f"{self.kernels.file.system}: has no all-to-all between GPUs; take deployment.exchange collectives"
            )

    def there(self, tokens: Numbers) -> Launch | None:
        return self._launch(("prepare", "dispatch"), tokens)

    def back(self, tokens: Numbers) -> Launch | None:
        return self._launch(("combine",), tokens)

    def _launch(self, operations: Sequence[str], tokens: Numbers) -> Launch:
        ranks, model = self.deployment.devices, self.model
        given = (self._sent(tokens), model.hidden_size, model.top_k, self._reached(ranks), ranks)
        times = (self.kernels.all_to_all(each, *given, self.deployment.experts) for each in operations)
        return Launch(sum(times, jnp.zeros(())), "network", _shared(self.deployment, self.kernels))


@dataclass(frozen=True, eq=False)
class DeepEP(RoutedExchange):
    """DeepEP's exchange between all GPUs, by kernels fitted to measurements, over the links of the GPU's data sheet.

    All GPUs of a domain of links are a node to it. Raises `KernelFileError` where its kernels are not known for so many
    nodes.
    """

    file: ExchangeFile

    def __post_init__(self) -> None:
        for side in BYTES:
            self._chosen(side)

    def there(self, tokens: Numbers) -> Launch | None:
        return self._launch("dispatch", tokens)

    def back(self, tokens: Numbers) -> Launch | None:
        return self._launch("combine", tokens)

    @property
    def nodes(self) -> int:
        return max(self.deployment.devices // self.kernels.sheet.domain, 1)

    def _launch(self, side: str, tokens: Numbers) -> Launch:
        sheet, load = self.kernels.sheet, self._load(side, tokens)
        links = self.file.links._replace(link=sheet.link)
        times = [known.kernel.seconds(load, links) for known in self._chosen(side)]
        return Launch(sum(times, jnp.zeros(())), "network", _shared(self.deployment, self.kernels))

    def _load(self, side: str, tokens: Numbers) -> Load:
        normal = self.deployment.exchange == "deepep_normal"
        return Load(
            tokens=self._sent(tokens),
            vector=jnp.asarray(self.model.hidden_size * BYTES[side]),
            choices=jnp.asarray(float(self.model.top_k)),
            experts=jnp.asarray(float(self._slots)),
            gpu_copies=jnp.asarray(self._reached(self.deployment.expert_ranks)),
            node_copies=jnp.asarray(self._reached(self.nodes)),
            nodes=jnp.asarray(float(self.nodes)),
            gpus=jnp.asarray(float(min(self.deployment.devices, self.kernels.sheet.domain))),
            processors=jnp.asarray(float(self.deployment.held)) if normal else self.kernels.sheet.processors,
        )

    def _chosen(self, side: str) -> list[KnownExchange]:
        """The kernel of a side, and its notice on several nodes: of each, the one with the most measured rows."""
        across = "nodes" if self.nodes > 1 else "node"
        found = []
        for part in PARTS[self.deployment.exchange]:
            wanted = {"side": side, "part": part, "across": across}
            fits = [each for each in self.file.exchanges if wanted.items() <= each.names.items()]
            if fits:
                found.append(max(fits, key=lambda each: each.told["rows"]))
            elif part != "notify":
                raise KernelFileError(
                    f"{self.file.system}: has no {side} of {self.deployment.exchange} on {self.nodes} nodes; "
                    "calibrate with a table of it"
                )
        return found


def exchange_of(
    model: MoEModel, deployment: Deployment, kernels: Kernels, gating: ExpertLoadTable, file: ExchangeFile | None
) -> StepExchange:
    """The exchange that a deployment names. Raises `KernelFileError` where its kernels are not known."""
    if deployment.exchange == "collectives":
        return Collectives(model, deployment, kernels)
    if deployment.exchange == "all_to_all":
        return DomainAllToAll(model, deployment, kernels, gating)
    if file is None:
        raise KernelFileError(
            f"{kernels.file.system}: has no exchanges of DeepEP; take deployment.exchange collectives"
        )
    return DeepEP(model, deployment, kernels, gating, file)
