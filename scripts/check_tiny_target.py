"""Measure the tiny target on the shipped prompts: `python -m scripts.check_tiny_target`.

For every prompt: the greedy continuation in fp32, its smallest gap between the two largest logits (a near-tie
would make greedy comparisons between backends a matter of luck), and what transformers' prompt lookup gains, greedy
and sampled. A small model's greedy text runs into loops, which flatter every proposer; its sampled text does not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

NUM_LOOKUP_TOKENS = 5
TEMPERATURE = 0.8
NUM_SAMPLES = 4
SMALLEST_MARGIN = 1e-3


@dataclass(frozen=True)
class Lookup:
    """One generation with prompt lookup."""

    sequence: Tensor  # [N], prompt included
    num_tokens: int
    num_steps: int  # target forwards
    num_drafted_steps: int  # of them, those that verified at least one draft token


@dataclass(frozen=True)
class Measurement:
    prompt_id: str
    category: str
    smallest_margin: float
    greedy_tokens_per_step: float
    greedy_acceptance_length: float  # 1 + accepted / drafts
    sampled_tokens_per_step: float
    continuation: str


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: dict[str, str], max_new_tokens: int
) -> Measurement:
    """One prompt, with and without prompt lookup; raises ValueError if lookup changes the greedy text."""
    inputs = tokenizer(prompt["prompt"], return_tensors="pt", return_token_type_ids=False)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    plain = model.generate(**inputs, **options, output_scores=True, return_dict_in_generate=True)
    greedy = lookup(model, inputs, options)
    if not torch.equal(plain.sequences[0], greedy.sequence):
        raise ValueError(f"{prompt['prompt_id']}: prompt lookup changed the greedy continuation")
    options = {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
    sampled = [lookup(model, inputs, options, seed) for seed in range(NUM_SAMPLES)]
    accepted = greedy.num_tokens - greedy.num_steps
    return Measurement(
        prompt_id=prompt["prompt_id"],
        category=prompt["category"],
        smallest_margin=_smallest_margin(plain.scores),
        greedy_tokens_per_step=greedy.num_tokens / greedy.num_steps,
        greedy_acceptance_length=1 + accepted / max(greedy.num_drafted_steps, 1),
        sampled_tokens_per_step=sum(run.num_tokens for run in sampled) / sum(run.num_steps for run in sampled),
        continuation=tokenizer.decode(greedy.sequence[-greedy.num_tokens :]),
    )


def lookup(model: PreTrainedModel, inputs: Any, options: dict[str, Any], seed: int = 0) -> Lookup:
    """Generate with prompt lookup and count the target's forwards by their widths."""
    widths: list[int] = []  # tokens per forward

    def record(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    torch.manual_seed(seed)
    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    sequence = model.generate(**inputs, **options, prompt_lookup_num_tokens=NUM_LOOKUP_TOKENS)[0]
    handle.remove()
    num_prompt_tokens = inputs["input_ids"].shape[1]
    drafted = [widths[0] - num_prompt_tokens, *(width - 1 for width in widths[1:])]
    return Lookup(
        sequence=sequence,
        num_tokens=len(sequence) - num_prompt_tokens,
        num_steps=len(widths),
        num_drafted_steps=sum(width > 0 for width in drafted),
    )


def _smallest_margin(scores: Sequence[Tensor]) -> float:
    """The smallest difference of the two largest logits over all steps; `scores` holds [1, V] per step."""
    first, second = torch.cat(list(scores)).topk(2, dim=-1).values.unbind(-1)
    return (first - second).min().item()


def by_category(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """Per category: the mean of each figure over its prompts, and the smallest margin."""
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.category, []).append(measurement)
    return {
        category: {
            "smallest_margin": min(m.smallest_margin for m in group),
            "greedy_tokens_per_step": mean(m.greedy_tokens_per_step for m in group),
            "greedy_acceptance_length": mean(m.greedy_acceptance_length for m in group),
            "sampled_tokens_per_step": mean(m.sampled_tokens_per_step for m in group),
        }
        for category, group in groups.items()
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("assets/tiny"))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--show", action="store_true", help="print the continuations")
    parser.add_argument("--record", action="store_true", help="write the figures into training.json")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.assets / "target")
    model = AutoModelForCausalLM.from_pretrained(arguments.assets / "target", dtype=torch.float32)
    lines = (arguments.assets / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    measurements = [measure(model, tokenizer, prompt, arguments.max_new_tokens) for prompt in prompts]
    for m in measurements:
        warning = "  NEAR-TIE" if m.smallest_margin < SMALLEST_MARGIN else ""
        print(
            f"{m.prompt_id:26} greedy: {m.greedy_tokens_per_step:.2f} tokens per step, "
            f"acceptance length {m.greedy_acceptance_length:.2f}  sampled: {m.sampled_tokens_per_step:.2f}  "
            f"margin {m.smallest_margin:.5f}{warning}"
        )
        if arguments.show:
            print(m.continuation, "\n", "-" * 80)
    summary = by_category(measurements)
    print(json.dumps(summary, indent=2))
    if arguments.record:
        path = arguments.assets / "training.json"
        rows = [asdict(measurement) for measurement in measurements]
        record = json.loads(path.read_text()) | {"prompts": {"by_category": summary, "rows": rows}}
        path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
