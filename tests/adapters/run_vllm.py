"""vLLM engines one after the other, in this process: a line on stdin names a folder with job.json.

Written to result.json there: version, v2 (whether the V2 runner ran), outputs (token ids by batch, prompt and sample),
cached (tokens of each prompt that vLLM's prefix cache had), drafts (of `stepwise`, by batch), accepted (vLLM's own
figures of each request), reports (one per worker), metrics (vLLM's own of drafting), events (of `Witness`), verified
(what `Listener` was shown), error (None, or the text of what stopped the start or a batch). A line on stdout says that
it is written; what vLLM prints goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path


def driver_of(worker):
    """Of a worker with either model runner."""
    runner = worker.model_runner
    return (getattr(runner, "speculator", None) or runner.drafter).driver


def report(worker):
    """What a worker's driver counts, and the figures that `awaits_drafter` asks for."""
    driver = driver_of(worker)
    counted = driver.metrics
    told = getattr(driver.proposer, "metrics", dict)()
    return {
        "pid": os.getpid(),
        "proposer": counted.proposer,
        "propose_calls": counted.counts["proposer_propose_calls"],
        "errors": dict(counted.proposer_errors),
        "figures": {name.removeprefix("process_"): value for name, value in told.items()},
        **counted.acceptance.as_dict(),
    }


def is_up(worker):
    """Whether its proposer's drafter, in another process, can be asked."""
    return driver_of(worker).proposer._conversation._drafter.is_up


def warm_up(worker):
    """As vLLM does on a GPU: with requests that it makes up. Triton's interpreter fails in its kernel for top-k."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    SamplingParams.for_sampler_warmup = partial(SamplingParams, temperature=0.5)
    warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)


BEGINNINGS = {"an idle step": "execute_dummy_batch", "a warm-up": warm_up}


def drafted(llm):
    """What gives a request's drafts, by its name in vLLM and its state in the scheduler."""
    if not llm.llm_engine.vllm_config.use_v2_model_runner:
        return lambda name, request: request.spec_token_ids
    (states,) = llm.collective_rpc(lambda worker: worker.model_runner.req_states)  # V2's scheduler has -1 for each
    return lambda name, request: request.spec_token_ids and states.draft_tokens[states.req_id_to_index[name]].tolist()


def stepwise(llm, prompts, sampling):
    """The finished requests, and what vLLM drafted for each: by the number of tokens before the draft."""
    engine, drafts_of = llm.llm_engine, drafted(llm)
    scheduler = engine.engine_core.engine_core.scheduler  # in this process
    outputs, drafts = [None for _ in prompts], [{} for _ in prompts]
    names = {}
    for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        names[engine.add_request(str(number), prompt, params)] = number
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)] = output
        for name, request in scheduler.requests.items():
            if token_ids := drafts_of(name, request):
                drafts[names[name]][request.num_tokens] = [int(token_id) for token_id in token_ids]
    return outputs, drafts


def images(job, batch):
    """What goes with each prompt: an image of one colour, if the job names one for each batch."""
    if "images" not in job:
        return {}
    from PIL import Image

    return {"multi_modal_data": {"image": Image.new("RGB", job["image_size"], job["images"][batch])}}


def with_grammar(settings):
    """Sampling parameters with the structured output that they name, as vLLM takes it."""
    from vllm.sampling_params import StructuredOutputsParams

    asked = settings.get("structured_outputs")
    return settings if asked is None else settings | {"structured_outputs": StructuredOutputsParams(**asked)}


def adapters(job):
    """The LoRA adapter of every prompt, if the job names one. On a CPU vLLM 0.32 gives it to requests without, too."""
    if "lora" not in job:
        return {}
    from vllm.lora.request import LoRARequest

    return {"lora_request": LoRARequest("adapter", 1, job["lora"])}


@contextmanager
def cut_as_in_vllm():
    """Its scheduler ends drafts before the first token that a grammar refuses, as without our adapter."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.structured_output import StructuredOutputManager

    load_general_plugins()
    ours = StructuredOutputManager.validate_tokens
    StructuredOutputManager.validate_tokens = ours.__wrapped__
    yield
    StructuredOutputManager.validate_tokens = ours


def run(job, result):
    import vllm
    from vllm import LLM, SamplingParams

    result["version"] = vllm.__version__
    llm = LLM(**job["engine"])
    try:
        result["v2"] = llm.llm_engine.vllm_config.use_v2_model_runner
        if job["begins_with"]:
            llm.collective_rpc(BEGINNINGS[job["begins_with"]])
        for number, (prompts, sampling) in enumerate(zip(job["batches"], job["sampling"], strict=True)):
            while job["awaits_drafter"] and not all(llm.collective_rpc(is_up)):
                time.sleep(0.05)
            prompts = [{"prompt_token_ids": ids} | images(job, number) for ids in prompts]
            sampling = [SamplingParams(**with_grammar(each)) for each in sampling]
            if job["stepwise"]:
                outputs, drafts = stepwise(llm, prompts, sampling)
                result["drafts"].append(drafts)
            else:
                outputs = llm.generate(prompts, sampling, use_tqdm=False, **adapters(job))
            result["outputs"].append([[list(one.token_ids) for one in output.outputs] for output in outputs])
            result["cached"].append([output.num_cached_tokens for output in outputs])
            if "per_request_spec_decode_metrics" in job["engine"]:
                accepted = [[one.spec_decode_metrics.to_dict() for one in output.outputs] for output in outputs]
                result["accepted"].append(accepted)
        if "additional_config" in job["engine"]:
            result["reports"] = llm.collective_rpc(report)
        if not job["engine"]["disable_log_stats"]:
            metrics = [each for each in llm.get_metrics() if "spec_decode" in each.name]
            result["metrics"] = {each.name: getattr(each, "value", None) or each.values for each in metrics}
    finally:
        llm.llm_engine.engine_core.shutdown()


def answer(directory):
    """Run the job of this folder, and write its result there."""
    from everywhere import Witness
    from listener import Listener

    result = {"outputs": [], "cached": [], "drafts": [], "accepted": [], "reports": [], "error": None}
    Witness.events.clear()
    Listener.seen.clear()
    try:
        job = json.loads((directory / "job.json").read_text())
        with cut_as_in_vllm() if job["cuts_refused"] else nullcontext():
            run(job, result)
    except Exception:
        result["error"] = traceback.format_exc()
    gc.collect()
    shown = {"events": Witness.events, "verified": Listener.seen}
    (directory / "result.json").write_text(json.dumps(result | shown))


def main(answers):
    for line in sys.stdin:
        answer(Path(line.strip()))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(channel)
