"""Who takes part: an engine, a method and a precision; and what each of them is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Batch = Sequence[Sequence[int]]  # token ids of prompts that run at the same time
Generate = Callable[[Batch], list[list[int]]]  # their outputs


class Contender(NamedTuple):
    """One row of the comparison."""

    engine: str  # "ours", "transformers" or "vllm"
    method: str  # "plain", or how tokens are drafted
    precision: str  # "float32", "bfloat16", or "int8": int8 weights, fp32 elsewhere; "-compiled": by torch.compile

    def __str__(self) -> str:
        return f"{self.engine} {self.method} {self.precision}"


@dataclass(frozen=True)
class Target:
    """A model, with the draft checkpoints that belong to it by method."""

    name: str
    path: str
    drafters: Mapping[str, str]
    methods: tuple[str, ...]  # that make sense for it


@dataclass(frozen=True)
class Task:
    """What every contender does with the target. Greedy, to the full length."""

    target: Target
    k: int  # drafts per step, at most
    acceptance: float  # probability that a synthetic draft token is right
    output_len: int
    max_batch: int
    max_model_len: int  # of the longest prompt, its output and drafts
    num_threads: int
    vllm_eager: bool  # without torch.compile


class NotOfferedError(Exception):
    """An engine does not have this method or precision; says why."""
