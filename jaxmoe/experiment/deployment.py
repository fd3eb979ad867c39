"""A scenario's whole model as it is deployed: its step, its memory, what its users wait for, and other layouts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from jaxmoe.config import Scenario
from jaxmoe.config.deployment import DeploymentConfig
from jaxmoe.config.dies import FittedGemmConfig
from jaxmoe.config.files import find_kernels
from jaxmoe.config.model import build_model
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.hardware.gpu.deepep_files import ExchangeFile, beside, read_exchanges
from jaxmoe.hardware.gpu.files import KernelFile, at_sheet, read_kernels
from jaxmoe.models import MoEModel
from jaxmoe.serving.closed_loop import BACKENDS, OVERHEADS, Backend, MeanWaits, Overheads, Users, serve
from jaxmoe.serving.costs import DeviceCosts
from jaxmoe.serving.deployment import Deployment, DeploymentError, check_deployment
from jaxmoe.serving.gating import expert_loads
from jaxmoe.serving.kernels import Kernels
from jaxmoe.serving.memory import DeviceMemory, memory_of
from jaxmoe.serving.step import AbstractStep, ModelStep
from jaxmoe.units import GIGA

# The precision of measured tables for so many bytes of a weight, at most.
PRECISIONS = ((0.54, "w4a16_mxfp4"), (0.6, "nvfp4"), (1.1, "fp8_block"))


Step = TypeVar("Step", bound=AbstractStep, covariant=True)


@dataclass(frozen=True, eq=False)
class Deployed(Generic[Step]):
    """A model in a deployment with its users."""

    step: Step
    memory: DeviceMemory
    users: Users
    backend: Backend
    overheads: Overheads
    costs: DeviceCosts = field(default_factory=DeviceCosts)

    @property
    def deployment(self) -> Deployment:
        return self.step.deployment

    def serve(self) -> MeanWaits:
        """Waiting times of its users."""
        return serve(self.step, self.users, self.memory, self.backend, self.overheads)


def deployed(
    scenario: Scenario,
    read: Callable[[Path], KernelFile] = read_kernels,
    read_deepep: Callable[[Path], ExchangeFile] = read_exchanges,
) -> Deployed[ModelStep]:
    """The deployment that a scenario describes, by kernels and exchanges of the files that are read so.

    Raises `OptionError` for one without, or on a machine whose kernels or memory are not known, and `DeploymentError`
    for one that cannot be.
    """
    asked, die = stated_deployment(scenario), scenario.hardware.die
    if die is None or not isinstance(die.gemm, FittedGemmConfig) or die.memory_capacity_GB is None:
        raise OptionError(
            "hardware.die has no kernels that were fitted to measurements, or no memory_capacity_GB; the time of a "
            "whole model needs both. Take a machine that has them, such as h200_sxm_8 (jaxmoe list machines)"
        )
    if asked.exchange == "engine":
        raise OptionError(
            "deployment.exchange is engine, which jaxmoe evaluate --phase alone times; take collectives or DeepEP's"
        )
    model = build_model(scenario.model)
    deployment = _deployment(asked, model)
    path = find_kernels(die.gemm.path)
    file = at_sheet(read(path), die.gemm.sheet)
    check_deployment(model, deployment, file.sheet.domain)
    if deployment.devices > scenario.hardware.num_nodes:
        raise DeploymentError(
            f"deployment.tensor * deployment.data is {deployment.devices}; expected at most the "
            f"{scenario.hardware.num_nodes} GPUs of the machine. {_nearest(deployment, scenario.hardware.num_nodes)}"
        )
    most = int(file.sheet.processors) - 1
    if deployment.overlap != "serial" and deployment.held > most:
        raise DeploymentError(
            f"deployment.processors is {deployment.held}; expected at most {most}, so that kernels beside an exchange "
            "keep one of the GPU's"
        )
    deepep = read_deepep(beside(path)) if beside(path).exists() else None
    own = _laid(asked, model, deployment, file, deepep, die.memory_capacity_GB * GIGA)
    return replace(own, costs=costs_of(scenario))


def _nearest(deployment: Deployment, most: int) -> str:
    """The nearest layout on no more GPUs, that has the groups of one kind as they are."""
    if deployment.tensor <= most:
        return f"The nearest is deployment.data {most // deployment.tensor}."
    tensor = max(count for count in range(1, most + 1) if deployment.tensor % count == 0)
    return f"The nearest is deployment.tensor {tensor} with deployment.data 1."


def stated_deployment(scenario: Scenario) -> DeploymentConfig:
    """The deployment of a scenario. Raises `OptionError` where it has none."""
    if scenario.deployment is None:
        die = scenario.hardware.die
        measured = die is not None and isinstance(die.gemm, FittedGemmConfig)
        example = "{backend: sglang, tensor: 8}" if measured else "{backend: vllm, concurrency: 64}"
        raise OptionError(
            f"the scenario has no deployment. Write for example deployment: {example}, or --set 'deployment={example}'"
        )
    return scenario.deployment


def users_of(asked: DeploymentConfig) -> Users:
    """Requests in flight, and what a draft is worth to them."""
    acceptance = 0.0 if asked.speculative is None else asked.speculative.acceptance
    requests = float(asked.concurrency), float(asked.prompt_tokens), float(asked.output_tokens)
    return Users(*requests, acceptance=acceptance)


def drafted_of(asked: DeploymentConfig) -> int:
    """Tokens that are drafted for a sequence in a step."""
    return 0 if asked.speculative is None else asked.speculative.tokens


def costs_of(scenario: Scenario) -> DeviceCosts:
    """Power and price of a device of the scenario, where they are given."""
    asked, die = scenario.deployment, scenario.hardware.die
    hours = [each.price_per_device_hour for each in (asked, die) if each is not None]
    hour = next((each for each in hours if each is not None), None)
    return DeviceCosts(None if die is None else die.board_W, hour)


def other_layouts(scenario: Scenario, own: Deployed[ModelStep]) -> Iterator[Deployed[ModelStep]]:
    """Other ways to lay the scenario's model over as many GPUs: any attention, experts cut over all or none.

    Those that cannot be are left out.
    """
    asked, devices = stated_deployment(scenario), own.deployment.devices
    for tensor in (count for count in range(devices, 0, -1) if devices % count == 0):
        for ranks in sorted({1, devices}):
            other = replace(own.deployment, tensor=tensor, data=devices // tensor, expert_ranks=ranks)
            if other == own.deployment:
                continue
            try:
                capacity = own.memory.capacity / own.backend.memory_part
                found = _laid(asked, own.step.model, other, own.step.kernels.file, own.step.deepep, capacity)
            except DeploymentError:
                continue
            yield replace(found, costs=own.costs)


def _laid(
    asked: DeploymentConfig,
    model: MoEModel,
    deployment: Deployment,
    file: KernelFile,
    deepep: ExchangeFile | None,
    capacity: float,
) -> Deployed[ModelStep]:
    backend = BACKENDS[deployment.backend]
    kernels = Kernels(file, deployment.backend)
    layer = (model.num_experts, model.top_k, deployment.expert_ranks)
    gating = expert_loads(*layer, asked.gating_spread, redundant=deployment.redundant)
    copies = 1 + deployment.redundant / model.num_experts
    context = asked.prompt_tokens + asked.output_tokens / 2
    return Deployed(
        ModelStep(model, deployment, kernels, gating, deepep),
        memory_of(model, deployment, capacity * backend.memory_part, context, copies),
        users_of(asked),
        backend,
        OVERHEADS[deployment.backend],
    )


def _deployment(asked: DeploymentConfig, model: MoEModel) -> Deployment:
    return Deployment(
        asked.backend,
        asked.tensor,
        asked.data,
        asked.expert_ranks,
        asked.products or _precision(max(model.bytes.attention, model.bytes.dense)),
        asked.experts or _precision(model.bytes.experts),
        asked.cache or ("fp8" if model.bytes.kv <= 1 else "bfloat16"),
        asked.overlap,
        asked.exchange,
        asked.processors,
        asked.redundant_experts,
        drafted_of(asked),
    )


def _precision(bytes_: float) -> str:
    return next((name for most, name in PRECISIONS if bytes_ <= most), "bfloat16")
