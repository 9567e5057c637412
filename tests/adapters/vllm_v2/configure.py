"""vLLM's first process up to its configuration: what the entry point did there. python configure.py TARGET OUT"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

RUNNERS = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner", "specdec.adapters.vllm_v2.speculator")
OURS = "specdec.adapters.vllm.ngram"


def configured(target, model, **more):
    from vllm.engine.arg_utils import EngineArgs

    speculative = None if model is None else {"model": model, "num_speculative_tokens": 2}
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
    result["ours"] = configured(target, OURS)
    eagle = {"additional_config": {"specdec": {"model": "tiny/eagle3"}}}
    result["draft kv"] = configured(target, "specdec.adapters.vllm.eagle3", **eagle)
    result["misspelt"] = configured(target, "specdec.adapters.vllm.ngrm")
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
