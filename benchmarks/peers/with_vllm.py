"""vLLM on a CPU as a contender: in the process that asks, compiled unless asked otherwise, no prefix cache."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from .contender import Batch, Contender, Generate, NotOfferedError, Task

REASONS = {
    "eagle": "the packaged checkpoint is measured against EAGLE-3 only",
    "medusa": "vLLM's CPU runner has no Medusa",
    "mtp": "vLLM has MTP only for models that declare its layers",
}
KV_BLOCK = 128  # tokens, vLLM's choice for a CPU
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def configuration(contender: Contender, task: Task) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`."""
    if find_spec("vllm") is None:
        raise NotOfferedError("vLLM is not installed")
    if contender.precision == "int8":
        raise NotOfferedError("vLLM takes int8 on a CPU from quantized checkpoints only")
    if contender.method in REASONS:
        raise NotOfferedError(REASONS[contender.method])
    return {
        "model": task.target.path,
        "dtype": contender.precision,
        "max_model_len": task.max_model_len,
        "max_num_seqs": task.max_batch,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": _kv_bytes(task),
        "distributed_executor_backend": "uni",
        "enforce_eager": task.vllm_eager,
        "additional_config": {"acceptance": task.acceptance},
        "speculative_config": _speculative(contender.method, task),
    }


def _kv_bytes(task: Task) -> int:
    """Room for every request in fp32, of the target and of a drafter that needs as much."""
    config = AutoConfig.from_pretrained(task.target.path)
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    per_request = (-(-task.max_model_len // KV_BLOCK) + 1) * KV_BLOCK
    return 2 * (task.max_batch * per_request + KV_BLOCK) * per_token


def _speculative(method: str, task: Task) -> dict[str, Any] | None:
    if method == "plain":
        return None
    k = {"num_speculative_tokens": task.k}
    if method == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5} | k
    if method == "synthetic":
        return {"model": "benchmarks.peers.successors.VllmSuccessors"} | k
    return {"method": method, "model": task.target.drafters[method]} | k


def link_for_vllm(checkpoint: Path, folder: Path) -> None:
    """All files of a checkpoint but the module's beside it: vLLM takes every safetensors file for the target's."""
    for file in checkpoint.iterdir():
        if file.name != "mtp.safetensors":
            (folder / file.name).symlink_to(file.resolve())


def build(contender: Contender, task: Task) -> Generate:
    """Start the engine."""
    settings = configuration(contender, task)
    os.environ |= ENVIRONMENT
    os.environ["NUMBA_NUM_THREADS"] = str(task.num_threads)  # n-gram's; it resets what OpenMP uses everywhere
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        link_for_vllm(Path(task.target.path), Path(folder))
        llm = vllm.LLM(**settings | {"model": folder})
    params = vllm.SamplingParams(temperature=0, max_tokens=task.output_len, ignore_eos=True, detokenize=False)

    def generate(prompts: Batch) -> list[list[int]]:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(requests, params, use_tqdm=False)]

    return generate
