"""Our engine as a contender."""

from __future__ import annotations

from typing import Any

from specdec import LLM, SamplingParams

from .contender import Batch, Contender, Generate, NotOfferedError, Task

PRECISIONS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8_weight_only"},
    "bfloat16-compiled": {"dtype": "bfloat16", "torch_compile": True},
    "float32-compiled": {"dtype": "float32", "torch_compile": True},
    "int8-compiled": {"dtype": "float32", "quantization": "int8_weight_only", "torch_compile": True},
}


def configuration(contender: Contender, task: Task) -> dict[str, Any]:
    """The arguments of `LLM`."""
    settings = PRECISIONS[contender.precision] | {
        "max_model_len": task.max_model_len,
        "max_num_seqs": task.max_batch,
        "enable_prefix_caching": False,  # rounds repeat the prompts, and other engines have none either
        "speculative_config": _speculative(contender.method, task),
    }
    return {"model": task.target.path} | settings


def _speculative(method: str, task: Task) -> dict[str, Any] | None:
    k = {"num_speculative_tokens": task.k}
    if method == "plain":
        return None
    if method == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5} | k
    if method == "synthetic":
        return {
            "method": "benchmarks.peers.successors:Successors",
            "proposer_config": {"acceptance": task.acceptance},
        } | k
    if method == "mtp":
        return {"method": "mtp"} | k
    if method == "medusa":
        return {"model": task.target.drafters["medusa"], "num_speculative_tokens": 3}  # it has three heads
    if method in task.target.drafters:
        return {"model": task.target.drafters[method]} | k
    raise NotOfferedError(f"no {method} checkpoint for {task.target.name}")


def build(contender: Contender, task: Task) -> Generate:
    """Load the engine."""
    llm = LLM(**configuration(contender, task))
    params = SamplingParams(temperature=0, max_tokens=task.output_len, ignore_eos=True, detokenize=False)

    def generate(prompts: Batch) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate
