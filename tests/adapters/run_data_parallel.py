"""A vLLM server's engine with two data-parallel ranks: python run_data_parallel.py FOLDER

job.json there names the engine's settings and the prompts. Written to result.json: outputs (token ids by prompt),
accepted (drafts of each rank, by its number), v2 (whether the V2 runner ran), version.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


async def generate(engine, number, token_ids, sampling):
    """The output tokens of one prompt."""
    async for output in engine.generate({"prompt_token_ids": token_ids}, sampling, str(number)):
        found = output
    return list(found.outputs[0].token_ids)


async def run(job):
    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))
    try:
        sampling = SamplingParams(**job["sampling"], output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = await asyncio.gather(*(generate(engine, i, ids, sampling) for i, ids in enumerate(job["prompts"])))
        counted = [each for each in get_metrics_snapshot() if each.name == ACCEPTED]
        return {
            "outputs": outputs,
            "accepted": {each.labels["engine"]: each.value for each in counted},
            "v2": engine.vllm_config.use_v2_model_runner,
            "version": vllm.__version__,
        }
    finally:
        engine.shutdown()


def main(directory):
    job = json.loads((directory / "job.json").read_text())
    (directory / "result.json").write_text(json.dumps(asyncio.run(run(job))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
