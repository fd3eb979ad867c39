"""The time between two tokens of the whole model, by strategy, for `summary.json`."""

from typing import Any

import jax.numpy as jnp

from jaxmoe.cli.comparison import Comparison
from jaxmoe.cli.inputs import Inputs
from jaxmoe.config import build_even_parts
from jaxmoe.models import ModelError


def whole_model_report(inputs: Inputs, comparison: Comparison) -> dict[str, Any]:
    """Seconds of one step: attention, dense FFNs, shared experts, and with the MoE layers of every strategy.

    MoE layers that this run leaves out count as the mean of those it has. Where the model does not give what is
    needed, `missing` says what.
    """
    try:
        parts = build_even_parts(inputs.scenario)(jnp.asarray(float(inputs.scenario.workload.batch_tokens)))
    except ModelError as error:
        return {"missing": str(error)}
    layers = len(inputs.moe.moe_layer_ids)
    beside = {f"{name}_s": float(seconds) for name, seconds in parts._asdict().items()}
    moe = {name: float(score.layer_total.mean()) * layers for name, score in comparison.scores.items()}
    return {
        "batch_tokens": inputs.scenario.workload.batch_tokens,
        "context_tokens": inputs.scenario.workload.context_tokens,
        "moe_layers": layers,
        "moe_layers_timed": len(inputs.layer_ids),
        **beside,
        "moe_s": moe,
        "tbt_s": {name: seconds + float(parts.total) for name, seconds in moe.items()},
    }
