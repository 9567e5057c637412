"""What the n-gram proposer costs as the context grows, and how well its choices draft.

    python -m benchmarks.ngram_lookup --output benchmarks/results/ngram_lookup.json

`lookup` compares the index with a rescan of the whole context in numpy. The two alternate step by step, so that the
rescan empties the caches as a model would; `warm_step_us` is the index alone. `step` is `observe` and `propose` on
a StepView. `drafting` replays text: how many of the tokens that follow would have been accepted. Times are medians
over the rounds. The text is the standard library's source, split where byte-pair tokenizers split before they merge,
with an id per distinct piece.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from specdec.lab.environment import environment
from specdec.plugins.ngram import NgramProposer
from specdec.plugins.ngram.index import NgramIndex
from specdec.sdk import ProposerConfig, StepView
from specdec.testing import step_view

MIN_LENGTH, MAX_LENGTH = 2, 5
NUM_DRAFT_TOKENS = 4
CONTEXTS = (1_024, 4_096, 16_384, 65_536, 131_072)
NUM_STEPS = 200


def library_files() -> list[list[int]]:
    """Token ids of the standard library's modules, one list per file, in an order that is the same everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not {"site-packages", "test"} & {*path.parts}]
    ids: dict[str, int] = {}
    files = []
    for path in paths:
        pieces = re.findall(r" ?\w+| ?[^\w\s]+|\s+", path.read_text(encoding="utf-8", errors="replace"))
        files.append([ids.setdefault(piece, len(ids)) for piece in pieces])
    return files


def rescan(tokens: np.ndarray, num_tokens: int) -> list[int]:
    """The same draft from the whole context: places after the newest token, then those that agree further back."""
    places = np.nonzero(tokens[:-1] == tokens[-1])[0] + 1
    matched = 1
    while matched < MAX_LENGTH and len(places):
        longer = places[places > matched]
        longer = longer[tokens[longer - matched - 1] == tokens[-matched - 1]]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    if not len(places) or matched < MIN_LENGTH:
        return []
    return np.resize(tokens[places[-1] :][:num_tokens], num_tokens).tolist()


def lookup_round(text: list[int], context: int) -> dict[str, float]:
    """Microseconds: building the index per token, then per step one append, one look-up and one rescan."""
    array = np.array(text[: context + NUM_STEPS], dtype=np.int32)
    index = NgramIndex(MIN_LENGTH, MAX_LENGTH)
    gc.collect()
    start = time.perf_counter()
    index.extend(text[:context])
    build = time.perf_counter() - start
    times = []
    for length in range(context + 1, context + NUM_STEPS + 1):
        start = time.perf_counter()
        index.extend(text[length - 1 : length])
        appended = time.perf_counter()
        found = index.continuation(NUM_DRAFT_TOKENS)
        looked_up = time.perf_counter()
        expected = rescan(array[:length], NUM_DRAFT_TOKENS)
        scanned = time.perf_counter()
        times.append((appended - start, looked_up - appended, scanned - looked_up))
        assert found == expected, (context, length, found, expected)
    start = time.perf_counter()
    for token in text[context + NUM_STEPS : context + 2 * NUM_STEPS]:
        index.extend((token,))
        index.continuation(NUM_DRAFT_TOKENS)
    warm = (time.perf_counter() - start) / NUM_STEPS
    append, look_up, scan = (median(column) for column in zip(*times, strict=True))
    return {
        "build_us_per_token": build / context * 1e6,
        "append_us": append * 1e6,
        "lookup_us": look_up * 1e6,
        "warm_step_us": warm * 1e6,
        "rescan_us": scan * 1e6,
        "rescan_over_index": scan / (append + look_up),
    }


def bytes_per_token(text: list[int], context: int) -> float:
    """Memory that the index of a context holds, its tokens included."""
    fresh = np.array(text[:context])
    tracemalloc.start()
    index = NgramIndex(MIN_LENGTH, MAX_LENGTH)
    index.extend(fresh.tolist())
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(index)


def measure_lookup(texts: dict[str, list[int]], rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, text in texts.items():
        measured: dict[int, list[dict[str, float]]] = {context: [] for context in CONTEXTS}
        for _ in range(rounds):
            for context in CONTEXTS:
                measured[context].append(lookup_round(text, context))
        for context, runs in measured.items():
            medians = {key: round(median(run[key] for run in runs), 2) for key in runs[0]}
            size = round(bytes_per_token(text, context))
            rows.append({"text": name, "context": context, **medians, "bytes_per_token": size})
    return rows


def decode_step(texts: list[list[int]], num_draft_tokens: int) -> StepView:
    """A step in which nothing of these texts is new."""
    return step_view(texts, num_draft_tokens, shown_from=[len(text) - 1 for text in texts])


def step_round(text: list[int], batch: int, context: int) -> float:
    """Microseconds of one `observe` and `propose` with two committed tokens per request."""
    committed = 2
    views = [decode_step([text[: context + committed * i]] * batch, NUM_DRAFT_TOKENS) for i in range(NUM_STEPS + 1)]
    proposer = NgramProposer(ProposerConfig(num_draft_tokens=NUM_DRAFT_TOKENS, options=NgramProposer.Options()))
    for request in views[0].requests:
        proposer.on_start(request)
    proposer.observe(views[0])
    start = time.perf_counter()
    for view in views[1:]:
        proposer.observe(view)
        proposer.propose(view)
    return (time.perf_counter() - start) / NUM_STEPS * 1e6


def measure_step(text: list[int], rounds: int) -> list[dict[str, object]]:
    cases = [(1, 1_024), (1, 16_384), (1, 65_536), (8, 1_024), (8, 16_384), (64, 1_024)]
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            times[case].append(step_round(text, *case))
    return [{"batch": b, "context": c, "step_us": round(median(runs), 1)} for (b, c), runs in times.items()]


class OneOccurrence:
    """The other rules: a fixed occurrence of every n-gram, and a draft that stops where the text ends."""

    def __init__(self, min_length: int, max_length: int, *, earliest: bool) -> None:
        self.lengths = range(max_length, min_length - 1, -1)
        self.earliest = earliest
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: list[int]) -> None:
        for token in token_ids:
            place = len(self.tokens)
            for ngram in (tuple(self.tokens[-length:]) for length in self.lengths if length <= place):
                if not (self.earliest and ngram in self.places):
                    self.places[ngram] = place
            self.tokens.append(token)

    def continuation(self, num_tokens: int) -> list[int]:
        suffixes = (tuple(self.tokens[-length:]) for length in self.lengths)
        place = next((self.places[suffix] for suffix in suffixes if suffix in self.places), len(self.tokens))
        return self.tokens[place : place + num_tokens]


RULES: dict[str, Callable[[int, int], NgramIndex | OneOccurrence]] = {
    "most recent, going on with itself": NgramIndex,
    "most recent": lambda low, high: OneOccurrence(low, high, earliest=False),
    "earliest": lambda low, high: OneOccurrence(low, high, earliest=True),
}


def agreement(draft: Sequence[int], follows: Sequence[int]) -> int:
    """How many drafts are right."""
    pairs = zip(draft, follows, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(draft), len(follows)))


def replay(documents: list[list[int]], start: Callable[[], Any], num_draft_tokens: int) -> dict[str, float]:
    """Decode each document after its first 200 tokens, as if the target produced exactly that text.

    start: makes what drafts, which has `extend(token_ids)` and `continuation(num_tokens)`.
    """
    prompt, steps, drafted, accepted, produced = 200, 0, 0, 0, 0
    for text in documents:
        drafter, known = start(), prompt
        drafter.extend(text[:prompt])
        while known < len(text):
            draft = drafter.continuation(num_draft_tokens)
            agreed = agreement(draft, text[known:])
            drafter.extend(text[known : known + agreed + 1])
            known += agreed + 1
            steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + agreed
        produced += len(text) - prompt
    return {
        "tokens_per_step": round(produced / steps, 3),
        "drafted_per_step": round(drafted / steps, 2),
        "accepted_over_drafted": round(accepted / drafted, 3),
    }


def measure_drafting(files: list[list[int]]) -> list[dict[str, object]]:
    long_enough = [ids[:4_000] for ids in files if len(ids) >= 1_500]
    code = long_enough[:: max(1, len(long_enough) // 60)]
    loops = [ids[:200] + (ids[200 : 201 + i % 8] * 300)[:300] for i, ids in enumerate(code)]
    texts = {"code": code, "loops of 1 to 8 tokens": loops}
    return [
        {"text": name, "lengths": list(lengths), "rule": rule}
        | replay(documents, partial(RULES[rule], *lengths), NUM_DRAFT_TOKENS)
        for name, documents in texts.items()
        for lengths in ((5, 5), (3, 5), (2, 5), (1, 5))
        for rule in RULES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = library_files()
    code = [token for ids in files for token in ids][: max(CONTEXTS) + 2 * NUM_STEPS]
    loop = (list(range(7)) * len(code))[: len(code)]
    result = {
        "environment": environment(torch.device("cpu")),
        "settings": {
            "prompt_lookup_min": MIN_LENGTH,
            "prompt_lookup_max": MAX_LENGTH,
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "rounds": arguments.rounds,
            "steps_per_round": NUM_STEPS,
        },
        "lookup": measure_lookup({"code": code, "loop of 7 tokens": loop}, arguments.rounds),
        "step": measure_step(code, arguments.rounds),
        "drafting": measure_drafting(files),
    }
    rendered = json.dumps(result, indent=2)
    print(rendered)
    if arguments.output:
        arguments.output.write_text(rendered + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
