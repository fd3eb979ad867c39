"""config.json of models that are in no paper here, as published: what bears on sizes, and some of the rest.

`counted` are parameters of the parts that a description has: the publisher's number where these are all parts or where
the rest is known, else the sum of the matrices by hand. `left_out` are words that name the rest.
"""

from dataclasses import dataclass, field
from typing import Any

from published import CONFIGS, DEEPSEEK_V3, FP8


@dataclass(frozen=True)
class Published:
    config: dict[str, Any]
    counted: float
    bytes: tuple[float, float, float, float, float]  # experts, dense, attention, activations, KV
    left_out: tuple[str, ...] = field(default=())


GLM_45 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 151552,
}

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "quantization_config": FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    "rotary_dim": 64,
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "vocab_size": 200064,
}

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
# Of a layer with linear attention: projections in and out, the gates', the convolution. Of one with full attention: the
# half of its query projection that makes the gate of its output.
QWEN3_NEXT_LINEAR = 36 * (2048 * (2 * 16 * 128 + 2 * 32 * 128) + 4096 * 2048 + 2048 * 64 + 8192 * 4)
QWEN3_NEXT_GATE = 12 * 2048 * 16 * 256

KIMI_INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"},
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
}

GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}

ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "moe_capacity": [64, 64, 64],
    "moe_intermediate_size": 3584,
    "moe_k": 8,
    "moe_layer_end_index": 53,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 3,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 0,
    "num_attention_heads": 64,
    "num_hidden_layers": 54,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 103424,
}

HUNYUAN = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "kv_lora_rank": None,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_mixed_mlp_moe": True,
    "use_mla": False,
    "vocab_size": 128167,
}

GRANITE = {
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "embedding_multiplier": 12.0,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49155,
}

JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
# Of a Mamba layer: projections in and out, those of its step and states, the convolution, and the states' decay.
JAMBA_MAMBA = 28 * (4096 * 16384 + 8192 * 4096 + 8192 * (256 + 2 * 16) + 256 * 8192 + 8192 * 4 + 8192 * 16)

# No model of anyone. 24 layers, 4 of them dense; 48 experts, 6 of them chosen, 1 shared.
INVENTED = {
    "model_type": "hydra",
    "model_width": 1024,
    "number_of_decoder_blocks": 24,
    "first_dense_blocks": 4,
    "total_experts": 48,
    "experts_chosen_per_token": 6,
    "expert_inner_width": 640,
    "shared_experts_count": 1,
    "dense_inner_width": 4096,
    "attention_heads": 16,
    "kv_heads": 4,
    "head_width": 64,
    "vocabulary_tokens": 50000,
    "memory_slots_dim": 128,
    "dtype": "float32",
}

BF16 = (2, 2, 2, 2, 2)
ALL_FP8 = (1, 1, 1, 2, 2)

NEWER = {
    # The card's 355B have a part of the layer that predicts a token more. By hand: gate, up and down of 160 routed and
    # one shared expert and a router in 89 layers, 3 dense layers, 96 query and 8 KV heads in 92, both embeddings.
    "glm-4.5": Published(
        GLM_45,
        89 * (161 * 3 * 5120 * 1536 + 160 * 5120)
        + 3 * 3 * 5120 * 12288
        + 92 * (2 * 5120 * 96 * 128 + 2 * 5120 * 8 * 128)
        + 2 * 151552 * 5120,
        BF16,
        ("predicts further tokens (num_nextn_predict_layers)",),
    ),
    # All tensors of the checkpoint, which has no further layers.
    "minimax-m2": Published(MINIMAX_M2, 228_703_644_928, ALL_FP8, ("3 x what predicts further tokens",)),
    # All tensors of the checkpoint but for further layers, without what is left out.
    "qwen3-next-80b-a3b": Published(
        QWEN3_NEXT,
        79_674_391_296 - QWEN3_NEXT_LINEAR - QWEN3_NEXT_GATE,
        BF16,
        ("linear_attention in 36 of 48 layers (full_attention_interval)", "output gate of the attention"),
    ),
    "kimi-k2": Published(CONFIGS["kimi-k2"], 1026e9, ALL_FP8),  # its page
    # 4 bits, and two bytes of scale for each 32 weights.
    "kimi-k2-thinking": Published(
        CONFIGS["kimi-k2"] | {"quantization_config": KIMI_INT4}, 1026e9, (4.5 / 8, 2, 2, 2, 2)
    ),
    # The model card's table 1 has MLP, attention and embeddings. 4 bits, and one byte for each 32 weights.
    "gpt-oss-120b": Published(GPT_OSS_120B, (114.71 + 0.96 + 1.16) * 1e9, (4.25 / 8, 2, 2, 2, 2), ()),
    "llama-4-maverick": Published(CONFIGS["llama-4-maverick"], 400e9, BF16, ("the part that vision_config describes",)),
    "deepseek-v3.1": Published(
        DEEPSEEK_V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
        671e9,
        ALL_FP8,
        ("1 x what predicts further tokens (num_nextn_predict_layers)",),
    ),
    "ernie-4.5-300b-a47b": Published(ERNIE, 300e9, BF16),
    "hunyuan-a13b": Published(HUNYUAN, 80.4e9, BF16),
    "granite-3.1-3b-a800m": Published(GRANITE, 3.3e9, BF16),
    # The page has 51.6B of all.
    "jamba-1.5-mini": Published(JAMBA, 51.6e9 - JAMBA_MAMBA, BF16, ("mamba in 28 of 32 layers (attn_layer_period)",)),
    "invented": Published(
        INVENTED,
        20 * (49 * 3 * 1024 * 640 + 48 * 1024) + 4 * 3 * 1024 * 4096 + 24 * 2 * 1024 * (16 + 4) * 64 + 2 * 50000 * 1024,
        (4, 4, 4, 4, 4),
        ("memory_slots_dim",),
    ),
}
