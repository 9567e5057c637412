"""One vLLM engine in a process of its own: what to run is read from job.json, what came out is written to result.json.

result: version, outputs (token ids by batch, prompt and sample), reports (one per worker), events (of `Witness`), error
(None, or the text of what stopped the start or a batch).
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path


def report(worker):
    return worker.model_runner.drafter.driver.report()


def run(job, result):
    import vllm
    from vllm import LLM, SamplingParams

    result["version"] = vllm.__version__
    llm = LLM(**job["engine"])
    for prompts in job["batches"]:
        params = SamplingParams(**job["sampling"])
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        result["outputs"].append([[list(one.token_ids) for one in output.outputs] for output in outputs])
    if "speculative_config" in job["engine"]:
        result["reports"] = llm.collective_rpc(report)


def main(directory):
    job = json.loads((directory / "job.json").read_text())
    result = {"outputs": [], "reports": [], "error": None}
    try:
        run(job, result)
    except Exception:
        result["error"] = traceback.format_exc()
    from everywhere import Witness

    result["events"] = Witness.events
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
