"""vLLM engines one after the other, in this process: a line on stdin names a folder with job.json.

Written to result.json there: version, v2 (whether the V2 runner ran), outputs (token ids by batch, prompt and sample),
drafts and steps (of `stepwise`), reports (one per worker), metrics (vLLM's own of drafting), events (of `Witness`),
error (None, or the text of what stopped the start or a batch). A line on stdout says that it is written; what vLLM
prints goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path


def report(worker):
    """Of a worker with either model runner."""
    runner = worker.model_runner
    return (getattr(runner, "speculator", None) or runner.drafter).driver.report()


def stepwise(llm, prompts, sampling):
    """Of each request its text, what vLLM drafted, and how many tokens each step gave it: by the number before it."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler  # in this process
    texts, drafts, steps = [[[]] for _ in prompts], [{} for _ in prompts], [{} for _ in prompts]  # of one sample each
    names = {}
    for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        names[engine.add_request(str(number), prompt, params)] = number
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, text = int(output.request_id), list(output.outputs[0].token_ids)
            before = len(texts[number][0])
            steps[number][len(prompts[number]["prompt_token_ids"]) + before] = len(text) - before
            texts[number] = [text]
        for name, request in scheduler.requests.items():
            if request.spec_token_ids:
                drafts[names[name]][request.num_tokens] = [int(token_id) for token_id in request.spec_token_ids]
    return texts, drafts, steps


def images(job):
    """What goes with each prompt: an image of one colour, if the job names one."""
    if "image" not in job:
        return {}
    from PIL import Image

    return {"multi_modal_data": {"image": Image.new("RGB", (28, 28), job["image"])}}


def run(job, result):
    import vllm
    from vllm import LLM, SamplingParams

    result["version"] = vllm.__version__
    llm = LLM(**job["engine"])
    try:
        result["v2"] = llm.llm_engine.vllm_config.use_v2_model_runner
        for prompts, sampling in zip(job["batches"], job["sampling"], strict=True):
            prompts = [{"prompt_token_ids": ids} | images(job) for ids in prompts]
            sampling = [SamplingParams(**each) for each in sampling]
            if job.get("stepwise"):
                result["outputs"], result["drafts"], result["steps"] = stepwise(llm, prompts, sampling)
                continue
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            result["outputs"].append([[list(one.token_ids) for one in output.outputs] for output in outputs])
            result["cached"].append([output.num_cached_tokens for output in outputs])
        if "additional_config" in job["engine"]:
            result["reports"] = llm.collective_rpc(report)
        if not job["engine"]["disable_log_stats"]:
            metrics = [each for each in llm.get_metrics() if "spec_decode" in each.name]
            result["metrics"] = {each.name: getattr(each, "value", None) or each.values for each in metrics}
    finally:
        llm.llm_engine.engine_core.shutdown()


def main(answers):
    from everywhere import Witness

    for line in sys.stdin:
        directory = Path(line.strip())
        result = {"outputs": [], "cached": [], "reports": [], "error": None}
        Witness.events.clear()
        try:
            run(json.loads((directory / "job.json").read_text()), result)
        except Exception:
            result["error"] = traceback.format_exc()
        gc.collect()
        (directory / "result.json").write_text(json.dumps(result | {"events": Witness.events}))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(channel)
