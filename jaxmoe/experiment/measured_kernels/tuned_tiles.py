"""For which products Triton's fused MoE kernel in bfloat16 ships tuned tiles, by GPU: elsewhere it takes usual ones.

Pairs of experts on a rank and intermediate size on it, from the names of files in SGLang 0.5.14 (Apache-2.0), most of
which vLLM has as well. Usual tiles reach a third of the rate of tuned ones at many tokens.
"""

import numpy as np

KERNELS = ("sglang_fused_moe_triton", "vllm_unquantizedfusedmoe_triton_tritonexperts")
TUNED: dict[str, dict[int, tuple[int, ...]]] = {
    "H100": {
        1: (3072,),
        8: (1792, 2048, 3584, 4096, 7168),
        16: (1024, 1344, 1856, 2048, 2688),
        20: (2048,),
        24: (1024,),
        32: (224, 448, 896, 928, 1792, 1856),
        64: (192, 320, 384, 464, 640, 768, 928, 1280, 1536, 1856, 2688),
        65: (1536,),
        128: (192, 232, 352, 384, 464, 512, 704, 768, 928, 1344, 1856, 2688),
        144: (512,),
        256: (672, 1344, 2688),
        512: (64, 128, 336, 672, 1344, 2688),
    },
    "H200": {
        8: (1792, 2048, 3584, 4096, 7168, 14336),
        16: (1024,),
        20: (1536,),
        64: (320, 640, 1280, 2560),
        128: (192, 384, 704, 768),
        129: (384,),
        161: (192,),
        512: (64, 128, 256),
    },
    "B200": {
        16: (1024, 1856, 2048),
        32: (224, 448, 896, 928, 1792, 1856),
        64: (192, 384, 464, 768, 928, 1536, 1856, 2688),
        128: (232, 352, 464, 704, 928, 1344, 1856, 2688),
        256: (256, 512, 672, 1344, 2688),
        512: (128, 256, 336, 672, 1344, 2688),
    },
}


def tiles_of(columns: dict[str, np.ndarray]) -> np.ndarray:
    """`tuned`, `usual`, or nothing where it makes no difference, for each row of a table of fused MoE kernels."""
    experts = columns["num_experts"] // columns["moe_ep_size"]
    inner = columns["inter_size"] // columns["moe_tp_size"]
    device = str(columns["device"][0]) if "device" in columns else ""
    known = next((pairs for name, pairs in TUNED.items() if f" {name}" in f" {device}"), {})
    tuned = np.zeros(len(experts), bool)
    for count, sizes in known.items():
        tuned |= (experts == count) & np.isin(inner, sizes)
    asked = np.isin(columns["kernel_source"], KERNELS) & (columns["moe_dtype"] == "bfloat16")
    return np.where(asked, np.where(tuned, "tuned", "usual"), "")
