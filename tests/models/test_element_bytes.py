"""Bytes of an element by data type and quantisation, as publishers write them."""

import pytest

from jaxmoe.models import ElementBytes
from jaxmoe.models.element_bytes import QuantisationError, bytes_of_dtype, quantised

GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
NVFP4 = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}

# A quantisation, and bytes of weights of experts, of dense layers, of attention.
METHODS = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (1, 1, 1)),
    # 4 bits, and for each 128 weights a scale of 16 bits and a zero point of 4.
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, ((4 + 20 / 128) / 8,) * 3),
    "gptq of 8 bits, no groups": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, (1, 1, 1)),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, (1, 1, 1)),
    "of a vendor": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ((4 + 8 / 16) / 8,) * 3),
    "float by channels": ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, (1, 1, 1)),
    "float of 4 bits": ({"quant_method": "compressed-tensors", "config_groups": NVFP4}, ((4 + 8 / 16) / 8,) * 3),
    "experts alone": ({"quant_method": "mxfp4"}, (4.25 / 8, 2, 2)),
    "experts named as targets": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"targets": ["re:.*experts\\.\\d+.*"], "weights": {"num_bits": 4}}},
        },
        (0.5, 2, 2),
    ),
    "groups of different widths, attention first": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "a": {"targets": ["self_attn"], "weights": {"num_bits": 8, "type": "float"}},
                "b": {
                    "targets": ["re:.*experts\\.\\d+.*"],
                    "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                },
            },
        },
        ((4 + 8 / 16) / 8, 2, 1),
    ),
    "attention left out by a part of the path": (
        {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "lm_head"]},
        (1, 1, 2),
    ),
    "left out in this layer": (
        {"quant_method": "fp8", "ignored_layers": ["model.layers.7.self_attn.q_proj"]},
        (1, 1, 2),
    ),
    "left out in another layer": (
        {"quant_method": "fp8", "ignored_layers": ["model.layers.0", "layers.70"]},
        (1, 1, 1),
    ),
    "the gate is no gate projection": ({"quant_method": "fp8", "modules_to_not_convert": ["gate", "up"]}, (1, 1, 1)),
}


@pytest.mark.parametrize("case", METHODS)
def test_weights(case):
    quantisation, expected = METHODS[case]
    found = quantised(2.0, quantisation, layer=7)
    assert (found.experts, found.dense, found.attention) == pytest.approx(expected)
    assert (found.activations, found.kv) == (2, 2)


@pytest.mark.parametrize(
    "cache", [{"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}]
)
def test_a_cache_may_be_quantised_on_its_own(cache):
    assert quantised(2.0, {"quant_method": "fp8", **cache}, layer=0) == ElementBytes(1.0, 1.0, 1.0, 2.0, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "torch.bfloat16", "float16", "float8_e4m3fn", "complex64"])
def test_types(dtype):
    known = {"float32": 4, "torch.bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
    assert bytes_of_dtype(dtype) == known.get(dtype)


@pytest.mark.parametrize("quantisation", [{"quant_method": "magic"}, {}, {"quant_method": "awq", "bits": "four"}])
def test_a_method_that_is_not_known_is_named(quantisation):
    with pytest.raises(QuantisationError, match=r"quantization_config\.quant_method is '"):
        quantised(2.0, quantisation, layer=0)


def test_a_pattern_that_is_none_is_told():
    quantisation = {"quant_method": "fp8", "ignored_layers": ["re:(experts"]}
    with pytest.raises(QuantisationError, match=r"re:\(experts.*no regular expression"):
        quantised(2.0, quantisation, layer=0)
