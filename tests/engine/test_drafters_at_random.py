"""Packaged drafters in runs drawn at random: several outputs, text prompts, new weights and saved states in mid-run."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from engine_helpers import counter
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specdec import LLM, SamplingParams
from specdec.core.model.model_support import locate_model
from specdec.sdk import ConfigError

DRAFTERS = {
    "pard": {"method": "draft_model", "model": "tiny/pard"},
    "medusa": {"model": "tiny/medusa"},
    "mtp": {"method": "mtp"},
    "layer_skip": {"method": "layer_skip", "proposer_config": {"exit_layer": 6}},
    "suffix": {"method": "suffix"},
    "token_recycling": {"method": "token_recycling"},
}
WEIGHTS = {"pard": "tiny/pard", "medusa": "tiny/medusa"}  # of those that this file gives new ones
STATEFUL = {"suffix", "token_recycling"}
ABLE = {"new weights": WEIGHTS, "saved state": STATEFUL}
ACTIONS = ("new weights", "saved state", "abort")
MUST_MEET = {*DRAFTERS, *ACTIONS, "several outputs", "text prompt", "token ids", "sampled", "preempted"}


@cache
def engine_with(drafter):
    speculative = DRAFTERS[drafter] | {"num_speculative_tokens": 3}
    return LLM("tiny", speculative_config=speculative, max_model_len=128, max_num_seqs=4, num_kv_blocks=14)


@cache
def stored(path):
    return load_file(f"{locate_model(path)}/model.safetensors")


REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.integers(3, 7),
        "as_text": st.booleans(),
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 1.0]),
        "max_tokens": st.integers(1, 24),
    }
)
RUNS = st.fixed_dictionaries(
    {
        "drafter": st.sampled_from(sorted(DRAFTERS)),
        "requests": st.lists(REQUESTS, min_size=1, max_size=3),
        "actions": st.dictionaries(st.integers(1, 20), st.sampled_from(ACTIONS), max_size=6),  # after so many updates
    }
)


def act(llm, drafter, action, update, folder):
    """Between two steps. What a drafter cannot do is refused by name."""
    if action == "abort":
        llm.abort(update.request_id)
    elif action == "saved state":
        attempt(lambda: llm.save_proposer_state(folder / drafter), None if drafter in STATEFUL else ("SD-E179",))
    elif drafter in WEIGHTS:
        noise = torch.Generator().manual_seed(update.index)
        llm.update_proposer_weights(
            {
                name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
                for name, tensor in stored(WEIGHTS[drafter]).items()
                if tensor.is_floating_point() and tensor.ndim == 2
            }
        )
    else:
        attempt(lambda: llm.update_proposer_weights({"nobody": torch.zeros(1)}), ("SD-E227", "SD-E228"))


def attempt(call, codes):
    """codes: one of them is what it is refused with. None: it works."""
    with pytest.raises(ConfigError) if codes else nullcontext() as caught:
        call()
    assert not codes or caught.value.code in codes


def params_of(request):
    names = ("n", "temperature", "max_tokens")
    return SamplingParams(seed=1, ignore_eos=True, **{name: request[name] for name in names})


def nothing_is_lost(run, met, prompts, truth, tokenizer, folder):
    """Every output has its tokens once, its text and one end; greedy ones are the target's own."""
    drafter, requests = run["drafter"], run["requests"]
    llm, found = engine_with(drafter), {}
    before = counter(llm, "num_preemptions"), counter(llm, "spec_decode_num_draft_tokens")
    texts = [tokenizer.decode(prompts[request["prompt"]]) for request in requests]
    asked = [
        text if request["as_text"] else {"prompt_token_ids": prompts[request["prompt"]]}
        for request, text in zip(requests, texts, strict=True)
    ]
    for number, update in enumerate(llm.stream(asked, [params_of(request) for request in requests])):
        found.setdefault((int(update.request_id), update.index), []).append(update)
        action = run["actions"].get(number)
        if action and llm.engine.has_unfinished_requests:
            act(llm, drafter, action, update, folder)
            met[action if action == "abort" or drafter in ABLE[action] else f"{action} refused"] += 1
        llm.engine.check_integrity()
    assert not llm.engine.has_unfinished_requests
    outputs = [updates for _, updates in sorted(found.items())]
    of_each = [request for request in requests for _ in range(request["n"])]
    assert len(outputs) == len(of_each)
    for updates, request in zip(outputs, of_each, strict=True):
        token_ids = [token_id for update in updates for token_id in update.token_ids]
        (end,) = [update.finish_reason for update in updates if update.finish_reason]
        assert updates[-1].finish_reason == end
        assert (end == "length") == (len(token_ids) == request["max_tokens"])
        assert "".join(update.text for update in updates) == tokenizer.decode(token_ids, skip_special_tokens=True)
        if request["temperature"] == 0:
            assert token_ids == truth[request["prompt"]][: len(token_ids)]
    met.update(what_was_met(drafter, requests))
    met["preempted"] += counter(llm, "num_preemptions") - before[0]
    met["drafted tokens"] += counter(llm, "spec_decode_num_draft_tokens") - before[1]


def what_was_met(drafter, requests):
    yield drafter
    for request in requests:
        yield "text prompt" if request["as_text"] else "token ids"
        yield from ["several outputs"] * (request["n"] > 1) + ["sampled"] * (request["temperature"] > 0)


def fuzz(num_runs, check):
    """What was met, and how often."""
    met = Counter()

    @settings(max_examples=num_runs, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(run=RUNS)
    def every(run):
        check(run, met)

    every()
    print("\nmet", ", ".join(f"{what} {number}" for what, number in sorted(met.items())))
    return met


@pytest.fixture
def check(prompts, truth, tokenizer, tmp_path):
    return lambda run, met: nothing_is_lost(run, met, prompts, truth, tokenizer, tmp_path)


def test_runs_of_packaged_drafters_lose_nothing(check):
    assert fuzz(6, check)["drafted tokens"] > 50


@pytest.mark.full
def test_runs_of_packaged_drafters_lose_nothing_at_length_and_everything_is_met(check, record_property):
    met = fuzz(300, check)
    for what, number in met.items():
        record_property(what, number)
    assert {what for what in MUST_MEET if met[what] < 10} == set()
