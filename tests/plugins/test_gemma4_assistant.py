"""Gemma 4 assistants: recognised, and their drafts those of transformers' own modelling code, token for token."""

from __future__ import annotations

import json

import gemma4_checkpoints as made
import pytest
from inside import info_of, proposer_of

from specdec import LLM, SamplingParams
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.registry import PluginSettings, Registry
from specdec.core.registry.hooks import load_hooks
from specdec.plugins.gemma4_assistant.checkpoint import _heads
from specdec.plugins.gemma4_assistant.proposer import Gemma4AssistantProposer
from specdec.plugins.gemma4_assistant.recognise import is_assistant
from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError
from specdec.sdk.extensions import TargetKV

K, LENGTH = 3, 24
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


class Recorded(Gemma4AssistantProposer):
    """Keeps what it drafted at which length, and how much of it was accepted."""

    def __init__(self, config):
        super().__init__(config)
        self.drafts, self.accepted = {}, {}

    def propose(self, step):
        draft = super().propose(step)
        for b, name in enumerate(step.request_ids):
            length = int(step.committed_length[b])
            self.drafts[name, length] = draft.token_ids[b, : int(draft.lengths[b])].tolist()
            self.accepted[name, length] = int(step.num_accepted[b])
        return draft


@pytest.fixture(scope="module")
def target():
    return made.make_target()


@pytest.fixture(scope="module")
def texts(target):
    return [made.generate(target, prompt, LENGTH) for prompt in made.PROMPTS]


@pytest.fixture(scope="module")
def pairs(target, texts, tmp_path_factory):
    """Directories of the target and of an assistant for it, and the assistant in transformers: by its head."""
    found = {}
    for name in ("plain", "ordered"):
        folder = tmp_path_factory.mktemp(name)
        assistant = made.make_assistant(target, texts, ordered=name == "ordered")
        target.save_pretrained(folder / "target")
        assistant.save_pretrained(folder / "assistant")
        found[name] = folder / "target", folder / "assistant", assistant
    return found


@pytest.fixture
def pair(pairs):
    return pairs["plain"]


def served(pair, **settings):
    config = {"method": "test_gemma4_assistant:Recorded", "model": str(pair[1]), "num_speculative_tokens": K}
    return LLM(str(pair[0]), speculative_config=config | settings.pop("config", {}), **settings)


def run(llm, params=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in made.PROMPTS], params)
    return {output.request_id: [*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs}


@pytest.mark.parametrize(("head", "position", "ahead"), [("plain", "last", 1), ("ordered", "newest", 0)])
def test_drafts_and_accepted_counts_are_those_of_transformers(pairs, target, texts, head, position, ahead):
    pair = pairs[head]
    llm = served(pair, config={"proposer_config": {"rotary_position": position}}, max_num_batched_tokens=11)
    found = run(llm)
    assert list(found.values()) == texts
    recorded, num_accepted = proposer_of(llm), 0
    for (name, length), drafted in recorded.drafts.items():
        text = found[name]
        assert drafted == made.drafts(target, pair[2], text[:length], len(drafted), ahead)
        right = [one == other for one, other in zip(drafted, text[length:], strict=False)]
        accepted = ([*right, False]).index(False)
        following = recorded.accepted.get((name, length + accepted + 1))
        assert following in (None, accepted)
        num_accepted += accepted
    assert num_accepted > 8


def test_layers_that_share_keys_are_read_at_their_owner(tmp_path, texts):
    target = made.make_target(num_shared=2)
    assistant = made.make_assistant(target, texts[:1], ordered=False)
    target.save_pretrained(tmp_path / "target")
    assistant.save_pretrained(tmp_path / "assistant")
    llm = served((tmp_path / "target", tmp_path / "assistant"))
    found = run(llm)
    needs = proposer_of(llm).needs(proposer_of(llm).config, info_of(llm))
    assert needs.extension(TargetKV) == TargetKV(layers=(0, 1))
    for (name, length), drafted in proposer_of(llm).drafts.items():
        assert drafted == made.drafts(target, assistant, found[name][:length], len(drafted))


def test_sampled_drafts_report_their_distribution(pairs):
    params = SamplingParams(temperature=1, seed=3, max_tokens=LENGTH, ignore_eos=True)
    llm = served(pairs["ordered"], config={"draft_sample_method": "probabilistic"})
    run(llm, params)
    assert llm.engine.metrics.acceptance.num_draft_tokens > 0
    llm.engine.check_integrity()


def test_the_checkpoint_alone_says_which_proposer_it_is_for(pair):
    registry = Registry.discover(PluginSettings(), load_hooks(PluginSettings()))
    config = SpeculativeConfig(model=str(pair[1]), num_speculative_tokens=2)
    assert registry.resolve(config).plugin.name == "gemma4_assistant"
    assert not is_assistant(Checkpoint.open(pair[0]))


def changed(pair, folder, **values):
    """A copy of the assistant's directory with another config.json."""
    for file in pair[1].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for path, value in values.items():
        section = config["text_config"] if path in config["text_config"] else config
        section[path] = value
    (folder / "config.json").write_text(json.dumps(config))
    return pair[0], folder


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"backbone_hidden_size": 48}, "hidden size is 48, and this target's is 32"),
        ({"vocab_size": 128}, "vocabulary is 128, and this target's is 64"),
        ({"head_dim": 16}, "head size is 16, and this target's is 8"),
        ({"layer_types": ["sliding_attention", "linear_attention"]}, "linear_attention"),
        ({"num_attention_heads": 5}, "5 heads, which cannot share the 2"),
    ],
)
def test_an_assistant_of_another_target_is_refused_before_weights_load(pair, tmp_path, values, said):
    with pytest.raises(Refusal, match=said):
        served(changed(pair, tmp_path, **values))


def test_clusters_that_do_not_divide_the_vocabulary_are_refused(pair, tmp_path):
    with pytest.raises(CheckpointError, match="clusters"):
        served(changed(pair, tmp_path, use_ordered_embeddings=True, num_centroids=7))


def test_a_target_of_another_family_is_refused(pair):
    with pytest.raises(Refusal, match="hidden size is 32"):
        LLM("tiny", speculative_config={"model": str(pair[1]), "num_speculative_tokens": 2})


def test_published_keys_for_heads_are_read_too(pair, tmp_path):
    target, folder = changed(pair, tmp_path, per_layer_config=None)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["global_head_dim"] = 16
    del config["text_config"]["per_layer_config"]
    (folder / "config.json").write_text(json.dumps(config))
    llm = served((target, folder))
    run(llm)
    assert proposer_of(llm).drafts


def test_heads_are_found_whatever_width_the_numbers_of_layers_are_written_with():
    config = {"per_layer_config": {"05": {"head_dim": 16}}, "head_dim": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert [_heads(config, [], layer).size for layer in (4, 5)] == [8, 16]
