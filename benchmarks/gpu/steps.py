"""Decoding steps of the large model, looked at: their kernels, what recording and compiling are worth, and prompts that
come beside them.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from specdec import LLM

from . import figures
from .run import Run

NAME = "8B"
MOST_NAMES = 12


def one_step(run: Run) -> None:
    """A profiler's trace of one step, and steps with and without graphs."""
    with run.engine(NAME) as llm:
        _put_steps(run, llm, "graphs where the device has them")
        _trace(run, llm, "captured")
    del llm  # before the next one is made
    with run.engine(NAME, cuda_graphs=False) as llm:
        _put_steps(run, llm, "no graphs")


def mixed(run: Run) -> None:
    """A new prompt for each request that ends: most steps read a part of one beside the rows that decode."""
    for most in (512, 2048):
        with run.engine(NAME, max_num_batched_tokens=16 if run.smoke else most) as llm:
            for round_name in ("the first time", "again"):
                spent, num_tokens, steps = _serve(run, llm)
                what = f"{NAME}, prompts beside decoding, {most} tokens a step, {round_name}"
                run.figures.put(f"{what}: tokens/s", num_tokens / spent)
                run.figures.put(f"{what}: a step, us", 1e6 * statistics.median(steps))
        del llm  # before the next one is made


def _serve(run: Run, llm: LLM) -> tuple[float, int, list[float]]:
    """Two requests for each place, of different lengths. Seconds, tokens generated, seconds of each step."""
    shape, engine = run.shape(NAME), llm.engine
    count = 2 * max(shape.batch_sizes)
    lengths = [shape.output_len * (4 + i % 5) // 8 for i in range(count)]
    for prompt, length in zip(run.prompts(NAME, count), lengths, strict=True):
        engine.add_request(prompt, run.params(NAME, max_tokens=length))
    steps = []
    while engine.has_unfinished_requests:
        steps.append(run.seconds(engine.step))
    return sum(steps), sum(lengths), steps


def compiled(run: Run) -> None:
    """The same with `torch_compile`."""
    with run.engine(NAME, torch_compile=True) as llm:
        _put_steps(run, llm, "compiled")
        number = _trace(run, llm, "compiled")
        run.figures.put(figures.LAYER_KERNELS, number / run.shape(NAME).config["num_hidden_layers"])


def _put_steps(run: Run, llm: LLM, how: str) -> None:
    for batch in run.shape(NAME).batch_sizes:
        taken = run.steps(llm, NAME, batch)
        run.figures.put(f"{NAME}, batch {batch}: a step, {how}, us", 1e6 * statistics.median(taken))


def _trace(run: Run, llm: LLM, how: str) -> int:
    """Of the last of some steps at batch 1. Returns how many kernels it ran."""
    llm.engine.add_request(run.prompts(NAME, 1)[0], run.params(NAME))
    for _ in range(4):
        llm.engine.step()
    activities = [ProfilerActivity.CPU, *([] if run.smoke else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as seen:
        taken = run.seconds(llm.engine.step)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    kernels = _kernels(seen, on_device=not run.smoke)
    number = sum(count for count, _ in kernels.values())
    run.figures.put(f"{NAME}, batch 1, {how}: a step under the profiler, us", 1e6 * taken)
    run.figures.put(f"{NAME}, batch 1, {how}: kernels of a step", number)
    run.figures.put(f"{NAME}, batch 1, {how}: time in kernels, us", sum(spent for _, spent in kernels.values()))
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:MOST_NAMES]
    for name, (count, spent) in longest:
        run.figures.put(f"{how}: kernel {name[:80]}", f"{count} times, {spent:.1f} us")
    return number


def _kernels(seen: profile, *, on_device: bool) -> dict[str, tuple[int, float]]:
    """How often each ran, and its microseconds. On a CPU, operators stand in."""
    kind = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events() or ():
        if event.device_type == kind and not event.name.startswith(("Memcpy", "Memset")):
            count, spent = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, spent + _microseconds(event, on_device=on_device)
    return found


def _microseconds(event: Any, *, on_device: bool) -> float:
    return float(event.self_device_time_total if on_device else event.self_cpu_time_total)
