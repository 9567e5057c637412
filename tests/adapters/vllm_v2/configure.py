"""vLLM's first process up to its configuration: what the entry point did there. python configure.py TARGET OUT"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

RUNNERS = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner", "specdec.adapters.vllm_v2.speculator")
OURS = "specdec.adapters.vllm.ngram"


IGNORED = {
    "prompt_lookup_max": 4,
    "quantization": "fp8",
    "max_model_len": 64,
    "draft_tensor_parallel_size": 2,
    "kv_cache_dtype": "fp8",
    "suffix_decoding_max_cached_requests": 0,
    "parallel_drafting": True,
}  # keys of vLLM's own speculative_config, with a value that is not the default


def asks_for_memory(device):
    raise AssertionError("memory is a matter of the workers")


def configured(target, model, keys=None, **more):
    from vllm.engine.arg_utils import EngineArgs

    speculative = None if model is None else {"model": model, "num_speculative_tokens": 2} | (keys or {})
    settings = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True, "block_size": 32} | more
    try:
        config = EngineArgs(model=target, speculative_config=speculative, **settings).create_engine_config()
    except Exception as error:
        return {"error": str(error)}
    facts = {"v2": config.use_v2_model_runner, "lookahead": config.num_lookahead_tokens}
    return facts | {"asynchronous": config.scheduler_config.async_scheduling}


def main(target, out):
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.envs

    from specdec.adapters.vllm_v2 import plugin

    result = {"plain": configured(target, None), "other": configured(target, "some.Proposer")}
    result["host imports"] = [name for name in sys.modules if name.startswith("specdec.core")]
    from specdec.core import device_memory

    device_memory.free_memory = asks_for_memory  # it would initialise CUDA in this process
    result["ours"] = configured(target, OURS)
    eagle = {"additional_config": {"specdec": {"model": "tiny/eagle3"}}}
    result["draft kv"] = configured(target, "specdec.adapters.vllm.eagle3", **eagle)
    result["lora"] = configured(target, OURS, enable_lora=True)
    result["misspelt"] = configured(target, "specdec.adapters.vllm.ngrm")
    result["method beside"] = configured(target, OURS, {"method": "ngram"})
    result["another module"] = configured(target, "specdec.plugins.ngram.NgramProposer")
    result["ignored"] = {key: configured(target, OURS, {key: value}) for key, value in IGNORED.items()}
    result["already so"] = configured(target, OURS, {"draft_tensor_parallel_size": 1, "method": "custom_class"})
    result["vLLM's own"] = configured(target, "ngram", {"method": "ngram", "prompt_lookup_max": 4})
    result["runners"] = [name for name in RUNNERS if name in sys.modules]
    plugin.v2_differences = lambda: ("propose is gone",)
    result["unknown vLLM"] = configured(target, OURS)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if hasattr(vllm.envs, "disable_envs_cache"):
        vllm.envs.disable_envs_cache()
    result["unknown vLLM, V2 forced"] = configured(target, OURS)
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
