"""Engines with every first-party proposer on the emulated device, and requests that come, go and are preempted."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import specdec
from specdec import LLM, SamplingParams

TINY = (Path(specdec.__file__).parent / "assets" / "tiny").resolve()
K = 3
HOST = {"ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}}
DEVICE = {
    "eagle": {"method": "eagle", "model": str(TINY / "eagle")},
    "eagle3": {"method": "eagle3", "model": str(TINY / "eagle3")},
    "dflash": {"method": "dflash", "model": str(TINY / "dflash")},
    "medusa": {"method": "medusa", "model": str(TINY / "medusa")},
    "mtp": {"method": "mtp"},
    "draft_model": {"method": "draft_model", "model": str(TINY / "draft")},
}
FORMS = ("greedy", "sparse", "dense")
CASES = [
    ("plain", "greedy"),
    *((name, "greedy") for name in HOST),
    *((name, form) for name in DEVICE for form in FORMS),
]
"""Proposers, and what their drafts report."""
TREES_OF_HOST = HOST | {"token_recycling": {"method": "token_recycling"}}
TREES_OF_DEVICE = [
    *((name, form) for name in ("eagle3", "medusa", "dflash", "draft_model") for form in ("tree", "drawn")),
    ("medusa", "static"),
]
"""Trees of likeliest nodes, of drawn ones, and of choices that a user gave."""
TREE_CASES = [*((name, "tree") for name in TREES_OF_HOST), *TREES_OF_DEVICE]
FEW_TOKENS = {"max_num_batched_tokens": 72}
"""Of a step: prompts of three requests, and fewer shapes to capture than by default."""
NUM_NODES = 6
"""Of a tree of depth K."""
TREE_FORMS = {
    "tree": {},
    "drawn": {"draft_sample_method": "probabilistic"},
    "static": {"proposer_config": {"medusa_choices": [[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 0]]}},
}
HYBRID_CASES = [(f"hybrid-{name}", "greedy") for name in ("plain", "ngram", "mtp")]
"""On the packaged target of which some layers keep a state."""
PROMPTS = [json.loads(line)["prompt"] for line in (TINY / "prompts.jsonl").read_text().splitlines()][::3]


def speculation(name: str, form: str) -> dict | None:
    """The settings of a case; None for plain decoding."""
    if name == "plain":
        return None
    settings = (TREES_OF_HOST | DEVICE)[name] | {"num_speculative_tokens": K}
    if form == "greedy":
        return settings
    if form in TREE_FORMS:
        return settings | {"max_nodes": NUM_NODES} | TREE_FORMS[form]
    return settings | {"draft_sample_method": "probabilistic", "proposer_config": {"draft_distribution": form}}


def make_mtp_target(folder: Path) -> Path:
    """The tiny target with a module of random weights that drafts."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
    try:
        made = importlib.import_module("mtp_checkpoints")
    finally:
        sys.path.pop(0)
    tensors = made.tiny_module().tensors(made.QWEN, 0)
    return made.tiny_target(folder / "target", tensors, mtp_num_hidden_layers=1)


def engine(name: str, form: str, mtp_target: Path, **settings) -> LLM:
    """In fp32, so that nearly equal logits are rare."""
    model = str(mtp_target) if name == "mtp" else "tiny"
    if name.startswith("hybrid-"):
        model, name = str(TINY / "hybrid"), name.removeprefix("hybrid-")
    settings = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 3} | FEW_TOKENS | settings
    return LLM(model, speculative_config=speculation(name, form), **settings)


def prompt(llm: LLM, index: int) -> list[int]:
    """Token ids of one of the shipped prompts."""
    return llm.engine.encode(PROMPTS[index % len(PROMPTS)])[:20]


def churn(
    llm: LLM, num_requests: int, seed: int = 0, temperatures: Sequence[float] = (0, 0.8)
) -> tuple[dict[str, list[int]], tuple[int, int]]:
    """Serve requests that come at any step, greedy and sampled ones, and abort some. Tokens by id, and acceptance.

    The first three are long, and none is aborted before they have grown: they do not fit into 6 blocks of 16 tokens.
    """
    rng, serving, requests = random.Random(seed), llm.engine, {}
    for step in count():
        if len(requests) < num_requests and step % 4 == 0:
            for _ in range(rng.choice([1, 1, 2, 4]) if step else 3):
                most = rng.choice([4, 20, 20]) if step else 20
                params = SamplingParams(
                    temperature=rng.choice(temperatures), max_tokens=most, seed=step + len(requests), ignore_eos=True
                )
                name = serving.add_request(prompt(llm, rng.randrange(9)), params)
                requests[name] = serving.get_request(name)
        if step % 15 == 14:
            serving.abort(rng.choice(list(requests)))
        if not serving.has_unfinished_requests and len(requests) >= num_requests:
            break
        serving.step()
        serving.check_integrity()
    acceptance = llm.engine.metrics.acceptance
    tokens = {name: list(request.output_token_ids) for name, request in requests.items()}
    return tokens, (acceptance.num_accepted_tokens, acceptance.num_draft_tokens)
