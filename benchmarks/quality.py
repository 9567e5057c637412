"""A task scored with and without speculation: `python -m benchmarks.quality`.

The task is completion: given 128 tokens of a held-out source file, write its next tokens. Scores are the share of
tokens that are the file's own, and the share of completions that are right to the end of the line. Speculation must
not change an answer, so scores must be equal, greedy and sampled (with seeds and a one-hot drafter), and answers too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scripts.corpus import load_corpus
from scripts.drafters.first_round import PROMPT_LENGTH, held_out_prompts
from transformers import AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.sdk.packaged import packaged

from .drafters import DRAFTERS

RESULT = Path(__file__).parent / "results" / "quality.json"
PROMPT, ANSWER = PROMPT_LENGTH * 3 // 4, PROMPT_LENGTH // 4  # the chunk's own end is the answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--only", nargs="*", choices=DRAFTERS, help="these drafters")
    parser.add_argument("--save", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(packaged("tiny"))
    chunks = held_out_prompts(tokenizer, load_corpus().held_out, args.tasks).tolist()
    plain: dict[str, list[tuple[int, ...]]] = {}
    scores: dict[str, dict[str, Any]] = {}
    for name in args.only or DRAFTERS:
        model, config = DRAFTERS[name]
        if model not in plain:
            plain[model] = answers(model, None, chunks, args.temperature)
            scores[f"plain decoding ({model})"] = score(plain[model], chunks, tokenizer)
        found = answers(model, {"num_speculative_tokens": 5} | config, chunks, args.temperature)
        same = sum(left == right for left, right in zip(found, plain[model], strict=True))
        scores[name] = score(found, chunks, tokenizer) | {"answers_equal_to_plain": same / len(found)}
        print(f"{name}: {scores[name]}", file=sys.stderr)
    args.save.write_text(
        json.dumps({"tasks": args.tasks, "temperature": args.temperature, "scores": scores}, indent=1) + "\n"
    )
    if any(row.get("answers_equal_to_plain", 1) < 1 for row in scores.values()) and args.temperature == 0:
        sys.exit("speculation changed an answer")


def answers(
    model: str, config: dict[str, Any] | None, chunks: Sequence[Sequence[int]], temperature: float
) -> list[tuple[int, ...]]:
    """The completion of every chunk's beginning, 16 requests at a time."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
        for seed in range(len(chunks))
    ]
    with LLM(model, speculative_config=config, max_model_len=256, max_num_seqs=16) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(chunk[:PROMPT])} for chunk in chunks], params)
    return [output.outputs[0].token_ids for output in outputs]


def score(found: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, float]:
    """Tokens that are the file's own, and completions that are right to the end of the line."""
    truths = [list(chunk[PROMPT:]) for chunk in chunks]
    right = sum(
        mine == true
        for answer, truth in zip(found, truths, strict=True)
        for mine, true in zip(answer, truth, strict=True)
    )
    lines = [
        tuple(tokenizer.decode(ids).partition("\n")[0] for ids in pair) for pair in zip(found, truths, strict=True)
    ]
    return {
        "tokens_right": right / (len(truths) * ANSWER),
        "lines_right": sum(mine == true for mine, true in lines) / len(lines),
    }


if __name__ == "__main__":
    main()
