"""Run one SGLang engine: a job as JSON on standard input, its result in the file that is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path


async def leave(engine, request_id, prompt):
    """A client that goes away after the first piece of a long answer."""
    params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    pieces = await engine.async_generate(prompt, params, rid=request_id, stream=True)
    reasons = []
    async for piece in pieces:
        engine.tokenizer_manager.abort_request(request_id)
        reasons.append(piece["meta_info"]["finish_reason"])
    return reasons[-1]["type"]


def main():
    import sglang

    job = json.load(sys.stdin)
    engine = sglang.Engine(**job["engine"])
    result = {}
    if job["leaves"]:
        result["left"] = engine.loop.run_until_complete(leave(engine, "left", job["prompts"][0]))
    names = [f"request-{i}" for i in range(len(job["prompts"]))]
    answers = engine.generate(job["prompts"], job["sampling"], rid=names)
    result["texts"] = [[answer["text"], answer["meta_info"]["finish_reason"]] for answer in answers]
    result["retractions"] = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    result["report"] = engine.get_server_info()["internal_states"][0].get("specdec")
    Path(sys.argv[1]).write_text(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes that import this file again
    main()
