"""The command that starts an engine with the deployment that was timed, by the flags of the engines' documentation."""

import json
import shlex

from jaxmoe.serving.deployment import Deployment

CACHE = {"sglang": ("--kv-cache-dtype", "fp8_e4m3"), "vllm": ("--kv-cache-dtype", "fp8")}


def launch_line(deployment: Deployment, weights: str, concurrency: int) -> str:
    """The shell command for `weights`, the path or name of the model on Hugging Face.

    SGLang counts data-parallel attention within its tensor parallelism, vLLM beside it. TensorRT-LLM takes that, the
    precision of its cache and drafts of tokens from a file, whose text is `engine_options`. Tokens are drafted by the
    model's own layer (MTP).
    """
    seats = -(-concurrency // deployment.data)
    match deployment.backend:
        case "sglang":
            words = ["python", "-m", "sglang.launch_server", "--model-path", weights, "--tp", str(deployment.devices)]
            if deployment.data > 1:
                words += ["--dp", str(deployment.data), "--enable-dp-attention"]
            if deployment.expert_ranks > 1:
                words += ["--ep-size", str(deployment.expert_ranks)]
            words += _sglang_exchange(deployment)
            if drafted := deployment.drafted:
                words += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(drafted)]
                words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(drafted + 1)]
            words += ["--max-running-requests", str(seats * deployment.data)]
        case "vllm":
            words = ["vllm", "serve", weights, "--tensor-parallel-size", str(deployment.tensor)]
            if deployment.data > 1:
                words += ["--data-parallel-size", str(deployment.data)]
            if deployment.expert_ranks > 1:
                words.append("--enable-expert-parallel")
            words += _vllm_exchange(deployment)
            if deployment.drafted:
                drafts = {"method": "mtp", "num_speculative_tokens": deployment.drafted}
                words += ["--speculative-config", json.dumps(drafts)]
            words += ["--max-num-seqs", str(seats)]
        case _:
            words = ["trtllm-serve", weights, "--tp_size", str(deployment.devices)]
            words += ["--ep_size", str(deployment.expert_ranks), "--max_batch_size", str(seats)]
            words += ["--enable_chunked_prefill"]
            if engine_options(deployment):
                words += ["--extra_llm_api_options", "options.yaml"]
    if deployment.cache == "fp8":
        words += CACHE.get(deployment.backend, ())
    return shlex.join(words)


def _sglang_exchange(deployment: Deployment) -> list[str]:
    words: list[str] = []
    if deployment.exchange != "collectives":
        words += ["--moe-a2a-backend", "deepep", "--deepep-mode", deployment.exchange.removeprefix("deepep_")]
    if deployment.overlap == "two_batches":
        words.append("--enable-two-batch-overlap")
    if deployment.redundant:
        words += ["--enable-eplb", "--ep-num-redundant-experts", str(deployment.redundant)]
    return words


def _vllm_exchange(deployment: Deployment) -> list[str]:
    backends = {"deepep_normal": "deepep_high_throughput", "deepep_low_latency": "deepep_low_latency"}
    words = ["--all2all-backend", backends[deployment.exchange]] if deployment.exchange in backends else []
    if deployment.overlap == "two_batches":
        words.append("--enable-dbo")
    if deployment.redundant:
        words += ["--enable-eplb", "--eplb-config", json.dumps({"num_redundant_experts": deployment.redundant})]
    return words


def engine_options(deployment: Deployment) -> str:
    """The YAML of the file `options.yaml` that the line of TensorRT-LLM names; empty where it names none."""
    if deployment.backend != "trtllm":
        return ""
    drafts = f"speculative_config: {{decoding_type: MTP, num_nextn_predict_layers: {deployment.drafted}}}"
    lines = {
        "enable_attention_dp: true": deployment.data > 1,
        "kv_cache_config: {dtype: fp8}": deployment.cache == "fp8",
        drafts: deployment.drafted > 0,
    }
    return "\n".join(line for line, needed in lines.items() if needed)
