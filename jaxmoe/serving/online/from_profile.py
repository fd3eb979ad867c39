"""A step of an engine from measured kernels of one layer: a kernel profile, the model's layers and the exchanges.

Kernels follow each other. Ranks that step together wait for the slowest, and for the experts and exchanges of all.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Float

from jaxmoe.errors import InputError
from jaxmoe.models import MoEModel
from jaxmoe.serving.deployment import Deployment, check_deployment
from jaxmoe.serving.online.padding import Padding
from jaxmoe.serving.online.profile import Grid, KernelProfile, onto
from jaxmoe.serving.online.step_table import StepTable, Term

Sizes = Float[np.ndarray, " G"]
Collective = Callable[[str, Sizes], Sizes]
"""Seconds of `all_reduce`, `all_gather` or `reduce_scatter` over the GPUs of the deployment, by bytes of the whole."""

ONCE = ("embedding", "final_layernorm")
LAYER = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1}  # times in a layer
DENSE = ("gate_up_proj", "act_fn", "down_proj")
OPTIONAL = ("qk_norm",)
SEQUENCE = ("lm_head", "sampler")
HIDDEN_BYTES = 2.0
NONE = Padding()


def profile_table(
    profile: KernelProfile,
    model: MoEModel,
    deployment: Deployment,
    collective: Collective,
    padding: Padding = NONE,
    skew: bool = True,
) -> StepTable:
    """The step of `model` by its profile. Experts are chosen evenly; without `skew`, contexts count as equally long.

    Raises `InputError` for a profile that lacks a kernel of the model.
    """
    check_deployment(model, deployment)
    _check(profile, model, deployment)
    layers, points = model.num_layers, padding.points(profile.kernels["qkv_proj"].sizes)
    sequences = profile.kernels["lm_head"].sizes
    terms = [
        Term("layers", ("tokens",), (points,), _dense(profile, model, padding.padded(points))),
        *_attention(profile, layers, skew),
        Term("head", ("sequences",), (sequences,), _sum(profile, SEQUENCE, sequences)),
    ]
    if model.moe_layer_ids and profile.experts is not None:
        seconds = partial(_experts, profile.experts, model, deployment)
        terms.append(padding.common("experts", points, deployment.data, seconds))
    if deployment.devices > 1:
        seconds = partial(_exchange, model, deployment, collective)
        terms.append(padding.common("exchange", points, deployment.data, seconds))
    return StepTable(tuple(terms))


def _check(profile: KernelProfile, model: MoEModel, deployment: Deployment) -> None:
    dense = DENSE if model.num_dense_layers else ()
    needed = (*ONCE, *LAYER, *dense, *SEQUENCE)
    if missing := [name for name in needed if name not in profile.kernels]:
        raise InputError(f"the profile of {profile.model} has no kernel {missing[0]}; profile the model with it")
    if unknown := sorted(profile.kernels.keys() - {*needed, *OPTIONAL}):
        raise InputError(
            f"the profile of {profile.model} has a kernel {unknown[0]}, which {model.name} does not have: known are "
            f"{', '.join((*needed, *OPTIONAL))}. Take the profile of this model"
        )
    if model.moe_layer_ids and profile.experts is None:
        raise InputError(
            f"the profile of {profile.model} has no moe.csv, but {model.name} has experts; profile them too"
        )
    if model.moe_layer_ids and deployment.expert_ranks < deployment.devices:
        raise InputError(
            f"deployment.expert_ranks is {deployment.expert_ranks}; expected {deployment.devices}, all GPUs: profiles "
            "have whole experts alone"
        )
    if deployment.tensor > 1 and deployment.data > 1:
        raise InputError(
            f"deployment.tensor is {deployment.tensor} and deployment.data {deployment.data}; expected 1 for one of "
            "them, as sums over some of the GPUs are not priced"
        )


def _sum(profile: KernelProfile, names: Sequence[str], sizes: np.ndarray) -> np.ndarray:
    return np.sum([profile.kernels[name].at(sizes) for name in names], axis=0)


def _dense(profile: KernelProfile, model: MoEModel, tokens: np.ndarray) -> np.ndarray:
    """Seconds of all kernels that take tokens alone."""
    names = [name for name, times in LAYER.items() for _ in range(times)]
    names += [name for name in OPTIONAL if name in profile.kernels]
    layer = model.num_layers * _sum(profile, names, tokens)
    dense = model.num_dense_layers * _sum(profile, DENSE, tokens) if model.num_dense_layers else 0.0
    return layer + dense + _sum(profile, ONCE, tokens)


def _attention(profile: KernelProfile, layers: int, skew: bool) -> list[Term]:
    """Attention between that of contexts of the mean length and that of contexts of the longest."""
    names = ("prefill", "prefill_context", "decoding")
    axes, seconds = profile.attention.axes, layers * profile.attention.values
    if not skew or profile.skew is None:
        return [Term("attention", (*names, "context"), axes, seconds)]
    part = _skew(profile.skew, axes[0], axes[2])[:, None, :, None]
    return [
        Term("attention", (*names, "context"), axes, (1 - part) * seconds),
        Term("attention of the longest", (*names, "longest"), axes, part * seconds),
    ]


def _skew(skew: Grid, chunks: np.ndarray, decoding: np.ndarray) -> np.ndarray:
    """The part at other sizes, [chunk, decoding], that of the nearest outside; without a prompt another kernel runs."""
    own, counts = skew.axes
    part = np.array([np.interp(decoding, counts, row) for row in skew.values])
    groups = [(own == 0, chunks == 0), (own > 0, chunks > 0)]
    found = np.zeros((len(chunks), len(decoding)))
    for known, asked in groups:
        if known.any():
            found[asked] = onto(own[known], part[known], np.minimum(chunks[asked], own[known].max()))
    return found


def _experts(experts: Grid, model: MoEModel, deployment: Deployment, tokens: Sizes) -> Sizes:
    """All layers' experts of a GPU, which has an equal part of all choices."""
    ranks = deployment.expert_ranks
    own = model.num_experts / ranks
    chosen = own * (1 - (1 - model.top_k / model.num_experts) ** tokens)
    sizes, active = experts.axes
    by_active = onto(sizes, experts.values, tokens / ranks)
    seconds = [onto(active, row, np.array([count]))[0] for row, count in zip(by_active, chosen, strict=True)]
    return len(model.moe_layer_ids) * np.array(seconds)


def _exchange(model: MoEModel, deployment: Deployment, collective: Collective, tokens: Sizes) -> Sizes:
    """All layers' sums of partial results, or with data-parallel attention all tokens there and back."""
    bytes_ = tokens * model.hidden_size * HIDDEN_BYTES
    if deployment.data == 1:
        return 2 * model.num_layers * collective("all_reduce", bytes_)
    both = collective("all_gather", bytes_) + collective("reduce_scatter", bytes_)
    return len(model.moe_layer_ids) * both
