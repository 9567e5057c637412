"""Time to the first token behind a common prefix, and in a second turn, with and without shared blocks.

    python -m benchmarks.prefix_caching [--model tiny] [--prefix 1000] [--rounds 5] [--save FILE]

Eight requests have a common prefix of random tokens and ten tokens of their own. "later": the seven others come when
the first one has its first token. "at once": all eight come together. "second turn": the conversation goes on behind
the reply to the whole prefix. Engines take turns within a round; medians over the rounds, with the whole range. The
text of both engines is compared, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from specdec import LLM, SamplingParams

from .peers.report import spread

NUM_REQUESTS, OWN, REPLY = 8, 10, 16
PARAMS = SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True, detokenize=False)
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "eagle3": {"model": "tiny/eagle3", "num_speculative_tokens": 3},
}


def random_texts(count: int, length: int, seed: int) -> list[list[int]]:
    """Rows of token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 900, (count, length), generator=generator).tolist()


def first_tokens(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[list[float], list[list[int]]]:
    """Seconds from now to the first token of each of these, and all their tokens."""
    start = time.perf_counter()
    seconds: dict[str, float] = {}
    texts: dict[str, list[int]] = {}
    for update in llm.stream([{"prompt_token_ids": list(each)} for each in prompts], PARAMS):
        seconds.setdefault(update.request_id, time.perf_counter() - start)
        texts.setdefault(update.request_id, []).extend(update.token_ids)
    return list(seconds.values()), list(texts.values())


def one_round(llm: LLM, prefix: list[int], tails: list[list[int]]) -> tuple[dict[str, float], list[Any]]:
    """Seconds of each part, and every token."""
    prompts = [[*prefix, *tail] for tail in tails]
    found: dict[str, float] = {}
    llm.reset_prefix_cache()
    together, texts = first_tokens(llm, prompts)
    found["at once"] = mean(together[1:])
    llm.reset_prefix_cache()
    (found["first"],), [reply] = first_tokens(llm, prompts[:1])
    later, texts_later = first_tokens(llm, prompts[1:])
    found["later"] = mean(later)
    (found["second turn"],), turn = first_tokens(llm, [[*prompts[0], *reply, *tails[1]]])
    return found, [texts, reply, texts_later, turn]


def compare(model: str, drafter: str, length: int, num_rounds: int) -> dict[str, Any]:
    """Milliseconds without and with shared blocks, and the ratio of each round."""
    longest = length + 2 * (OWN + REPLY)
    settings = {"max_model_len": longest, "max_num_seqs": NUM_REQUESTS, "speculative_config": DRAFTERS[drafter]}
    engines = [LLM(model, enable_prefix_caching=cached, **settings) for cached in (False, True)]
    rounds, equal = [], True
    for number in range(num_rounds + 1):
        [prefix] = random_texts(1, length, number)
        tails = random_texts(NUM_REQUESTS, OWN, 1000 + number)
        order = engines if number % 2 else engines[::-1]
        outcome = {id(llm): one_round(llm, prefix, tails) for llm in order}
        (without, texts), (shared, same) = (outcome[id(llm)] for llm in engines)
        equal = equal and texts == same
        rounds.append((without, shared))
    for llm in engines:
        llm.close()
    rounds = rounds[1:]  # the first one warms up
    parts = {
        part: {
            "without_ms": [1000 * without[part] for without, _ in rounds],
            "shared_ms": [1000 * shared[part] for _, shared in rounds],
            "ratio": [without[part] / shared[part] for without, shared in rounds],
        }
        for part in rounds[0][0]
    }
    return {"drafter": drafter, "same_text": equal, "parts": parts}


def main() -> None:
    """Measure, print, and save where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafters", nargs="+", choices=[*DRAFTERS], default=[*DRAFTERS])
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    results = [compare(args.model, drafter, args.prefix, args.rounds) for drafter in args.drafters]
    for result in results:
        print(f"{result['drafter']}: {'the same text' if result['same_text'] else 'ANOTHER TEXT'}")
        for part, values in result["parts"].items():
            columns = (spread(values[key], ".1f") for key in ("without_ms", "shared_ms", "ratio"))
            print(f"  {part:12} ms without, with, ratio: {'  '.join(columns)}")
    if args.save:
        facts = {"model": args.model, "prefix": args.prefix, "threads": torch.get_num_threads()}
        args.save.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
