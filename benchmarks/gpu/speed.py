"""Tokens per second of the engine, of its speculation and of transformers, beside the bandwidth of the memory.

A decoding step at batch 1 has to read every weight but the embedding table once, so no engine makes more than
bandwidth / weight bytes tokens per second; the bandwidth is that of a copy, bytes read and bytes written counted.
Speculation is measured at a stated acceptance: its drafts are successors, spoiled at random, and cost nothing. Greedy,
prefill included; every contender once to warm up, then in turn, medians over the rounds. transformers' `generate` is
run as it comes: a dynamic cache, sdpa, no compilation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from specdec import LLM
from specdec.core.host import parts_of

from ..peers.successors import Spoiled
from . import figures
from .run import Run, weight_bytes

ROUNDS = 3
NUM_DRAFT_TOKENS = 5
ACCEPTANCE = 0.8
SUCCESSORS = "benchmarks.peers.successors:Successors"


def of_1b(run: Run) -> None:
    """Of the small model: whether anything is wrong, before the large one takes its minutes."""
    _speed(run, "1B", rounds=2)


def of_8b(run: Run) -> None:
    """Of the model that the goals are about."""
    of_floor, of_theirs = _speed(run, "8B", rounds=2 if run.smoke else ROUNDS)
    run.figures.put(figures.PLAIN_OF_FLOOR, of_floor)
    if of_theirs is not None:
        run.figures.put(figures.PLAIN_OF_TRANSFORMERS, of_theirs)


def _speed(run: Run, name: str, rounds: int) -> tuple[float, float | None]:
    """The shares of the floor and of transformers at batch 1; None where time was short."""
    floor = run.bandwidth() / weight_bytes(run.checkpoint(name))
    run.figures.put(f"{name}, batch 1: floor of the weights, tokens/s", floor)
    options = {"proposer_config": {"acceptance": ACCEPTANCE}, "num_speculative_tokens": NUM_DRAFT_TOKENS}
    found: dict[tuple[str, int], float] = {}
    for contender, speculation in (("plain", None), ("speculative", {"method": SUCCESSORS, **options})):
        with run.engine(name, speculative_config=speculation) as llm:
            for batch in run.shape(name).batch_sizes:
                found[contender, batch] = _put(
                    run, name, contender, batch, partial(_generate, run, name, llm, batch), rounds
                )
            if speculation is None:
                _overhead(run, name, llm)
        del llm  # before the next one is made
    found |= _of_transformers(run, name, rounds)
    plain, theirs = found["plain", 1], found.get(("transformers", 1))
    return plain / floor, None if theirs is None else plain / theirs


def _of_transformers(run: Run, name: str, rounds: int) -> dict[tuple[str, int], float]:
    run.free()
    model = LlamaForCausalLM.from_pretrained(run.checkpoint(name), dtype=run.dtype).to(run.device).eval()
    model.generation_config.eos_token_id = None
    found = {}
    for batch in run.shape(name).batch_sizes:
        ids = torch.tensor([prompt["prompt_token_ids"] for prompt in run.prompts(name, batch)], device=run.device)
        if run.is_late():
            break
        generate = partial(_generate_there, model, ids, run.shape(name).output_len)
        found["transformers", batch] = _put(run, name, "transformers", batch, generate, rounds)
    return found


def _put(run: Run, name: str, contender: str, batch: int, work: Callable[[], Any], rounds: int) -> float:
    """Median tokens per second over the rounds that there is time for."""
    work()
    count, taken = batch * run.shape(name).output_len, []
    while len(taken) < rounds and not (taken and run.is_late()):
        taken.append(count / run.seconds(work))
    run.figures.put(f"{name}, batch {batch}: {contender}, tokens/s", statistics.median(taken))
    return statistics.median(taken)


def _generate(run: Run, name: str, llm: LLM, batch: int) -> None:
    prompts, length = run.prompts(name, batch), run.shape(name).output_len
    for prompt, output in zip(prompts, llm.generate(prompts, run.params(name)), strict=True):
        expected = Spoiled(acceptance=1).after(prompt["prompt_token_ids"][-1], length)
        assert list(output.outputs[0].token_ids) == expected, "a token has a wrong successor"


def _generate_there(model: LlamaForCausalLM, ids: torch.Tensor, length: int) -> None:
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)


def _overhead(run: Run, name: str, llm: LLM) -> None:
    """What a step at batch 1 takes beyond the target's pass, and how much longer the slowest is than the median."""
    runner = parts_of(llm.engine).runner
    target = runner._target
    runner._target = timed = TimedTarget(run, target)
    steps = run.steps(llm, name, 1)
    runner._target = target
    beyond = [step - forward for step, forward in zip(steps, timed.seconds()[-len(steps) :], strict=True)]
    large = name == "8B"
    run.figures.put(
        figures.STEP_OVERHEAD if large else f"{name}, batch 1: step beyond the forward pass, us",
        1e6 * statistics.median(beyond),
    )
    slowest = max(steps) / statistics.median(steps)
    run.figures.put(figures.SLOWEST_STEP if large else f"{name}, batch 1: slowest step over the median", slowest)


class TimedTarget:
    """A target whose forward passes are timed where they run."""

    def __init__(self, run: Run, target: Any) -> None:
        self._run, self._target = run, target
        self._spans: list[Any] = []  # seconds, or the events around a pass

    def forward(self, inputs: Any) -> Any:
        """As the target does."""
        if self._run.device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            output = self._target.forward(inputs)
            events[1].record()
            self._spans.append(events)
            return output
        started = time.perf_counter()
        output = self._target.forward(inputs)
        self._spans.append(time.perf_counter() - started)
        return output

    def seconds(self) -> list[float]:
        """Of each pass, once the device has finished them."""
        self._run.wait()
        return [span if isinstance(span, float) else span[0].elapsed_time(span[1]) / 1e3 for span in self._spans]
