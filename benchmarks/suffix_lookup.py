"""What the suffix proposer costs as the context grows, and how well it drafts, beside the n-gram proposer.

    python -m benchmarks.suffix_lookup --output benchmarks/results/suffix_lookup.json

Run it from the repository's root. `lookup`: microseconds of one committed token and of one draft after it, both
indexes in turn, medians over the rounds; text as in `ngram_lookup.py`. `replay`: source files decoded after their
first 200 tokens as if the target produced exactly that text. `first_draft`: the first draft after a prompt against
what the tiny target goes on with (greedy, fp32), for chunks of 128 tokens of held-out files and for the shipped
prompts; no later rounds, for greedy loops would flatter every look-up method. `shared_corpus`: the shipped prompts
decoded twice by one engine, so that the second pass finds the outputs of the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from statistics import median

import torch
from scripts.corpus import load_corpus
from scripts.drafters.first_round import PROMPT_LENGTH, held_out_prompts
from scripts.drafters.target import FrozenTarget
from transformers import AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.lab.datasets import load_dataset
from specdec.lab.environment import environment
from specdec.plugins.ngram import NgramProposer
from specdec.plugins.suffix import SuffixProposer
from specdec.sdk import ProposerConfig
from specdec.sdk.packaged import packaged

from .ngram_lookup import CONTEXTS, agreement, decode_step, library_files, replay

K = 7
NUM_STEPS = 200
NUM_HELD_OUT = 512
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}


def option(name: str, value: float) -> dict[str, float]:
    return {f"suffix_decoding_{name}": value}


SETTINGS: dict[str, tuple[type, dict[str, float]]] = {
    "ngram 2-5": (NgramProposer, NGRAM),
    "ngram 1-5": (NgramProposer, {"prompt_lookup_min": 1, "prompt_lookup_max": 5}),
    "suffix": (SuffixProposer, {}),
    "suffix, vLLM's defaults": (SuffixProposer, option("max_tree_depth", 24) | option("max_spec_factor", 1.0)),
    "suffix, depth 24": (SuffixProposer, option("max_tree_depth", 24)),
    "suffix, factor 2": (SuffixProposer, option("max_spec_factor", 2.0)),
    "suffix, factor 4": (SuffixProposer, option("max_spec_factor", 4.0)),
    "suffix, probability 0": (SuffixProposer, option("min_token_prob", 0.0)),
    "suffix, probability 0.3": (SuffixProposer, option("min_token_prob", 0.3)),
}


class Lookup:
    """One proposer on one request, through the methods that the engine calls."""

    def __init__(self, setting: str) -> None:
        cls, options = SETTINGS[setting]
        self.proposer = cls(ProposerConfig(num_draft_tokens=K, options=cls.Options(**options)))
        self.proposer.on_start(decode_step([[0]], K).requests[0])
        self.text: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self.text += token_ids
        self.proposer.observe(decode_step([self.text], K))

    def continuation(self, num_tokens: int) -> list[int]:
        draft = self.proposer.propose(decode_step([self.text], num_tokens))
        return draft.token_ids[0, : int(draft.lengths[0])].tolist()


def lookup_round(setting: str, text: list[int], context: int) -> dict[str, float]:
    lookup = Lookup(setting)
    gc.collect()
    start = time.perf_counter()
    lookup.extend(text[:context])
    build = time.perf_counter() - start
    views = [decode_step([text[: context + step]], K) for step in range(1, NUM_STEPS + 1)]
    commits, drafts = [], []
    for view in views:
        start = time.perf_counter()
        lookup.proposer.observe(view)
        committed = time.perf_counter()
        lookup.proposer.propose(view)
        drafts.append(time.perf_counter() - committed)
        commits.append(committed - start)
    return {
        "build_us_per_token": build / context * 1e6,
        "observe_us": median(commits) * 1e6,
        "propose_us": median(drafts) * 1e6,
    }


def bytes_per_token(setting: str, text: list[int], context: int) -> int:
    lookup = Lookup(setting)
    tracemalloc.start()
    lookup.extend(text[:context])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(held / context)


def measure_lookup(texts: dict[str, list[int]], rounds: int) -> list[dict[str, object]]:
    settings = ("ngram 2-5", "suffix", "suffix, depth 24")
    cases = [(name, context, setting) for name in texts for context in CONTEXTS for setting in settings]
    measured: dict[tuple[str, int, str], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for name, context, setting in cases:
            measured[name, context, setting].append(lookup_round(setting, texts[name], context))
    return [
        {"text": name, "context": context, "proposer": setting}
        | {key: round(median(run[key] for run in runs), 2) for key in runs[0]}
        | {"bytes_per_token": bytes_per_token(setting, texts[name], context)}
        for (name, context, setting), runs in measured.items()
    ]


def prompts_and_continuations() -> dict[str, list[tuple[list[int], list[int]]]]:
    """Each prompt with the K + 1 tokens that the tiny target goes on with."""
    target = FrozenTarget(packaged("tiny"), torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(packaged("tiny"))
    held_out = held_out_prompts(tokenizer, load_corpus().held_out, NUM_HELD_OUT)
    greedy = torch.cat([target.continue_greedily(part, K + 1) for part in held_out.split(64)])
    shipped = [tokenizer(row.prompt)["input_ids"] for row in load_dataset("packaged", None)]
    return {
        f"{NUM_HELD_OUT} chunks of {PROMPT_LENGTH} held-out tokens": list(
            zip(held_out.tolist(), greedy.tolist(), strict=True)
        ),
        f"{len(shipped)} shipped prompts": [
            (ids, target.continue_greedily(torch.tensor([ids]), K + 1)[0].tolist()) for ids in shipped
        ],
    }


def first_drafts(setting: str, cases: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    accepted, drafted = 0, 0
    for prompt, (first, *follows) in cases:
        lookup = Lookup(setting)
        lookup.extend([*prompt, first])
        draft = lookup.continuation(K)
        accepted, drafted = accepted + agreement(draft, follows), drafted + len(draft)
    return {
        "tokens_per_verify": round(1 + accepted / len(cases), 3),
        "drafted_per_verify": round(drafted / len(cases), 2),
    }


def measure_corpus() -> list[dict[str, object]]:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [row.prompt for row in load_dataset("packaged", None)]
    rows: list[dict[str, object]] = []
    for cached in (0, 10_000):
        config = {"method": "suffix", "num_speculative_tokens": K, **option("max_cached_requests", cached)}
        llm = LLM("tiny", speculative_config=config, max_model_len=1024, max_num_seqs=8)
        for number in (1, 2):
            before = copy(llm.engine.metrics.acceptance)
            llm.generate(prompts, params)
            after = llm.engine.metrics.acceptance
            steps, committed = (
                after.num_steps - before.num_steps,
                after.num_committed_tokens - before.num_committed_tokens,
            )
            rows.append({"max_cached_requests": cached, "pass": number, "tokens_per_step": round(committed / steps, 3)})
        llm.close()
    return rows


def for_each(settings: Sequence[str], measure: Callable[[str], dict[str, float]]) -> list[dict[str, object]]:
    return [{"proposer": setting, **measure(setting)} for setting in settings]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = library_files()
    code = [token for ids in files for token in ids][: max(CONTEXTS) + NUM_STEPS]
    loop = (list(range(7)) * len(code))[: len(code)]
    long_enough = [ids[:2_500] for ids in files if len(ids) >= 1_500]
    documents = long_enough[:: max(1, len(long_enough) // 40)]
    cases = prompts_and_continuations()
    result = {
        "environment": environment(torch.device("cpu")),
        "settings": {"num_draft_tokens": K, "rounds": arguments.rounds, "steps_per_round": NUM_STEPS},
        "lookup": measure_lookup({"code": code, "loop of 7 tokens": loop}, arguments.rounds),
        "replay": for_each(list(SETTINGS), lambda setting: replay(documents, partial(Lookup, setting), K)),
        "first_draft": {
            name: for_each(list(SETTINGS), lambda setting, part=part: first_drafts(setting, part))
            for name, part in cases.items()
        },
        "shared_corpus": measure_corpus(),
    }
    rendered = json.dumps(result, indent=2)
    print(rendered)
    if arguments.output:
        arguments.output.write_text(rendered + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
