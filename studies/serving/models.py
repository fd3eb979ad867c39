"""Models of recorded runs by the names of their weights: those with experts that jaxmoe ships, and dense ones."""

from pathlib import Path

from jaxmoe.config import load_model
from jaxmoe.config.model import build_model
from jaxmoe.errors import InputError
from jaxmoe.models import GroupedQueryAttention, MoEModel, dense_model
from jaxmoe.models.config_fields import (
    DENSE_SIZE,
    HEAD_SIZE,
    HEADS,
    HIDDEN_SIZE,
    KV_HEADS,
    NUM_LAYERS,
    VOCABULARY,
    Fields,
)
from jaxmoe.models.hugging_face import read_json

WITH_EXPERTS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "phi-3.5-moe")


def dense(
    name: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int, vocabulary: int
) -> MoEModel:
    """A model without experts."""
    return dense_model(name, hidden, layers, inner, vocabulary, GroupedQueryAttention(heads, kv_heads, head))


# From the config.json that was published with each.
DENSE = (
    dense("qwen3-32b", 5120, 25600, 64, 64, 8, 128, 151936),
    dense("qwen3-14b", 5120, 17408, 40, 40, 8, 128, 151936),
    dense("qwen3-8b", 4096, 12288, 36, 32, 8, 128, 151936),
    dense("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256),
    dense("llama-3.1-70b", 8192, 28672, 80, 64, 8, 128, 128256),
)


def model_of(weights: str, config: Path | None = None) -> MoEModel:
    """The model of these weights, whose name may say more after its own; with `config` that of a config.json.

    Raises `InputError` for a name that is not known.
    """
    name = weights.rsplit("/", 1)[-1].lower()
    if config is not None:
        return _from_config(config, name)
    known = {model.name: model for model in DENSE}
    fits = [each for each in (*known, *WITH_EXPERTS) if name == each or name.startswith(f"{each}-")]
    if not fits:
        raise InputError(
            f"the model {weights} is not known; known are {', '.join((*known, *WITH_EXPERTS))}. Give its config.json "
            "with --model"
        )
    best = max(fits, key=len)
    return known[best] if best in known else build_model(load_model(best, "model"))


def _from_config(path: Path, name: str) -> MoEModel:
    content = read_json(path)
    if any(key in content for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return build_model(load_model(str(path), "--model"))
    fields = Fields.of(content, {})
    heads, hidden = fields.required(HEADS), fields.required(HIDDEN_SIZE)
    head = fields.number(HEAD_SIZE) or hidden // heads
    sizes = (fields.required(DENSE_SIZE), fields.required(NUM_LAYERS), heads, fields.number(KV_HEADS) or heads, head)
    return dense(name, hidden, *sizes, fields.required(VOCABULARY))
