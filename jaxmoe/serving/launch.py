"""The command that starts an engine with the deployment that was timed, by the flags of the engines' documentation."""

import shlex

from jaxmoe.serving.deployment import Deployment

CACHE = {"sglang": ("--kv-cache-dtype", "fp8_e4m3"), "vllm": ("--kv-cache-dtype", "fp8")}


def launch_line(deployment: Deployment, weights: str, concurrency: int) -> str:
    """The shell command for `weights`, the path or name of the model on Hugging Face.

    SGLang counts data-parallel attention within its tensor parallelism, vLLM beside it.
    """
    match deployment.backend:
        case "sglang":
            words = ["python", "-m", "sglang.launch_server", "--model-path", weights, "--tp", str(deployment.devices)]
            if deployment.data > 1:
                words += ["--dp", str(deployment.data), "--enable-dp-attention"]
            if deployment.expert_ranks > 1:
                words += ["--ep-size", str(deployment.expert_ranks)]
            words += ["--max-running-requests", str(concurrency)]
        case "vllm":
            words = ["vllm", "serve", weights, "--tensor-parallel-size", str(deployment.tensor)]
            if deployment.data > 1:
                words += ["--data-parallel-size", str(deployment.data)]
            if deployment.expert_ranks > 1:
                words.append("--enable-expert-parallel")
            words += ["--max-num-seqs", str(-(-concurrency // deployment.data))]
        case _:
            words = ["trtllm-serve", weights, "--tp_size", str(deployment.devices)]
            words += ["--ep_size", str(deployment.expert_ranks)]
            words += ["--max_batch_size", str(-(-concurrency // deployment.data))]
    if deployment.cache == "fp8":
        words += CACHE.get(deployment.backend, ())
    return shlex.join(words)
