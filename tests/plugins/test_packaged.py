"""The drafters that ship with the package: each found by its checkpoint alone, each lossless, each of some use."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from inside import host_of
from plugin_helpers import TINY
from sweeps import pairs
from transformers import AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.registry import PluginSettings, Registry
from specdec.core.registry.hooks import load_hooks
from specdec.plugins.draft_model.proposer import DraftModelProposer
from specdec.plugins.eagle.proposer import Eagle3Proposer
from specdec.sdk import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
DRAFTERS = {
    "draft": ("tiny", "draft_model", 2.0),
    "pard": ("tiny", "draft_model", 1.6),
    "eagle": ("tiny", "eagle", 1.6),
    "eagle3": ("tiny", "eagle3", 2.0),
    "dflash": ("tiny", "dflash", 1.6),
    "dspark": ("tiny", "dspark", 1.6),
    "medusa": ("tiny", "medusa", 1.3),
    "moe_draft": ("tiny/moe", "draft_model", 1.3),
}
MIXED = [1, 7, 12, 30, 61]
BATCHES = {
    "one by one": {"max_num_seqs": 1},
    "sixteen": {"max_num_seqs": 16},
    "scarce": {"num_kv_blocks": 24, "max_num_seqs": 8},
}


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    token_ids = [tokenizer(row["prompt"])["input_ids"] for row in rows[:16]]
    return [ids[: MIXED[i % len(MIXED)]] for i, ids in enumerate(token_ids)]


@pytest.fixture(scope="module")
def plain(prompts):
    """Plain decoding's outputs of each target."""
    return {target: outputs(LLM(target, max_model_len=256), prompts) for target in ("tiny", "tiny/moe")}


def outputs(llm, prompts, params=GREEDY):
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in found]


def llm_with(name, k, **settings):
    target = DRAFTERS[name][0] if name in DRAFTERS else "tiny"
    config = {"model": f"tiny/{name}"} if name in DRAFTERS else {"method": name}
    return LLM(target, speculative_config=config | {"num_speculative_tokens": k}, max_model_len=256, **settings)


@pytest.mark.parametrize(
    ("config", "k"),
    [
        ({"model": "tiny/eagle3"}, 5),  # the checkpoint says
        ({"model": "tiny/dflash"}, 7),
        ({"model": "tiny/dspark"}, 7),
        ({"model": "tiny/medusa"}, 3),  # a draft for every head
        ({"method": "mtp"}, 1),
        ({"method": "suffix"}, 24),
    ],
    ids=lambda value: value.get("method") or value["model"] if isinstance(value, dict) else None,
)
def test_draft_length_may_be_left_out(config, k):
    llm = LLM("tiny", speculative_config=config, max_model_len=64)
    assert host_of(llm).width == k


def test_draft_length_of_a_draft_model_must_be_given():
    with pytest.raises(ConfigError, match='add "num_speculative_tokens"'):
        LLM("tiny", speculative_config={"model": "tiny/draft"})


@pytest.mark.parametrize("name", DRAFTERS)
def test_checkpoint_alone_says_which_proposer_it_is_for(name):
    registry = Registry.discover(PluginSettings(), load_hooks(PluginSettings()))
    config = SpeculativeConfig(model=f"tiny/{name}", num_speculative_tokens=2)
    assert registry.resolve(config).plugin.name == DRAFTERS[name][1]


@pytest.mark.parametrize("name", [*DRAFTERS, "mtp"])
def test_text_is_plain_decodings_and_drafts_are_accepted(name, prompts, plain):
    target, _, fewest = DRAFTERS.get(name, ("tiny", "mtp", 1.3))
    llm = llm_with(name, 3, max_num_seqs=4, max_num_batched_tokens=40)
    assert outputs(llm, prompts) == plain[target]
    assert llm.engine.metrics.acceptance.mean_acceptance_length >= fewest
    llm.engine.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize(("name", "k", "batch"), pairs([*DRAFTERS, "mtp"], [1, 3, 5, 7], list(BATCHES)))
def test_text_is_plain_decodings_at_every_length_and_batch(name, k, batch, prompts, plain):
    if name == "medusa" and k > 3:
        pytest.skip("three heads")
    llm = llm_with(name, k, **BATCHES[batch])
    assert outputs(llm, prompts) == plain[DRAFTERS.get(name, ("tiny",))[0]]
    llm.engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "base"), [("draft", DraftModelProposer), ("eagle3", Eagle3Proposer)])
def test_probabilities_raise_acceptance_at_temperature_1(name, base, prompts, monkeypatch):
    """Of the same sampled drafts: verified with their probability, or as if each had been the only choice."""
    params = [SamplingParams(temperature=1, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(prompts))]
    config = {"model": f"tiny/{name}", "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}

    def rate():
        llm = LLM("tiny", speculative_config=config, max_model_len=256)
        outputs(llm, prompts, params)
        return llm.engine.metrics.acceptance.draft_acceptance_rate

    with_distribution, propose = rate(), base.propose
    monkeypatch.setattr(base, "propose", lambda self, step: replace(propose(self, step), distribution=None))
    assert with_distribution > 2 * rate()
