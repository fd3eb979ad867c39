"""What a summary says about the run itself: scenario, software, machine, trace."""

import os
import platform
from importlib.metadata import version
from typing import Any

import jax

from jaxmoe.cli.inputs import EVALUATION_SEEDS, Inputs
from jaxmoe.config import resolved


def provenance(command: str, inputs: Inputs) -> dict[str, Any]:
    """The part of a summary that is the same for all verbs on scenarios."""
    return {
        "command": command,
        "scenario": resolved(inputs.scenario),
        "seed": inputs.scenario.seed,
        **surroundings(),
        "trace": {
            "path": inputs.trace_path,
            "tokens": inputs.trace.num_tokens,
            "layers": len(inputs.layer_ids),
            "facts": inputs.trace.facts,
        },
        "evaluation": {
            "batches": inputs.scenario.evaluation.batches,
            "batch_tokens": inputs.scenario.workload.batch_tokens,
            "seed": inputs.scenario.evaluation.seed,
            "seed_offset": EVALUATION_SEEDS,
            "replayed_batches": inputs.scenario.validation.batches,
        },
        "layer_ids": list(inputs.layer_ids),
    }


def surroundings() -> dict[str, Any]:
    """Software and machine, which every run has."""
    versions = {name: version(name) for name in ("jaxmoe", "jax", "jaxlib", "numpy")}
    return {"versions": versions | {"python": platform.python_version()}, "device": _device()}


def _device() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "cpu_count": os.cpu_count(),
    }
