"""A drafter that nobody here has heard of: its own network, draft KV and probabilities, in a package of its own."""

from __future__ import annotations

import sys
import textwrap

import pytest
from inside import plugin_of
from plugin_helpers import GREEDY, TINY

from specdec import LLM, SamplingParams

STRANGER = '''
import torch
from torch import nn

from specdec.sdk import Needs, ProposerConfig, TargetInfo
from specdec.sdk.model_proposer import AutoregressiveProposer, DraftInputs, ModelOptions, TargetHead


class Options(ModelOptions):
    num_layers: int = 1
    placement: str = "host"


class Stranger(AutoregressiveProposer):
    """Two of the target's hidden states and the next token, through a layer that was never trained."""

    INPUTS_ARE_SHIFTED = True
    Options = Options

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        kv = cls.draft_kv(config, cls.layer_config(target, config.options.num_layers))
        placement = config.options.placement
        return cls.shared_needs(config, target, kv, hidden_states=(3, "final"), placement=placement)

    @classmethod
    def layer_config(cls, target, num_layers=1):
        return {
            "model_type": "llama", "hidden_size": target.hidden_size, "intermediate_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": num_layers,
            "max_position_embeddings": target.max_model_len,
        }

    def build(self) -> None:
        torch.manual_seed(0)
        layer_config = self.layer_config(self.target, self.options.num_layers)
        self.decoder = self.services.build_decoder(layer_config, self.settings)
        self.decoder.embed_tokens = None
        self.mix = nn.Linear(2 * self.target.hidden_size, self.target.hidden_size)
        with torch.no_grad():
            self.mix.weight.mul_(0.05)
            self.mix.weight[:, self.target.hidden_size :] += torch.eye(self.target.hidden_size)
        self.services.finish(self.decoder, self.settings)
        self.services.finish(self.mix, self.settings)
        self.head = TargetHead(self.services)

    def first(self, inputs: DraftInputs):
        return self.run(inputs, self.mix(inputs.hidden))

    def advance(self, inputs: DraftInputs, states):
        return self.run(inputs, states)

    def run(self, inputs: DraftInputs, states):
        hidden = (states + 0.1 * self.services.embed(inputs.token_ids))[None]
        position_embeddings = self.decoder.rotary_emb(hidden, inputs.positions[None])
        for layer in self.decoder.layers:
            hidden = layer(hidden, position_embeddings=position_embeddings, attention_mask=None, **inputs.attention)
        return hidden[0][inputs.last]

    def logits(self, states):
        return self.head(states)
'''


@pytest.fixture(scope="module")
def method(tmp_path_factory):
    """A distribution on the import path that offers the stranger under a name."""
    site = tmp_path_factory.mktemp("site")
    (site / "stranger_plugin.py").write_text(textwrap.dedent(STRANGER))
    metadata = site / "specdec_plugin_stranger-0.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec-plugin-stranger\nVersion: 0.3\n")
    (metadata / "entry_points.txt").write_text("[specdec.proposers]\nstranger = stranger_plugin:Stranger\n")
    sys.path.insert(0, str(site))
    yield "stranger"
    sys.path.remove(str(site))
    sys.modules.pop("stranger_plugin", None)


def llm_with(method, **settings):
    config = {"method": method, "num_speculative_tokens": 4} | settings.pop("speculative", {})
    return LLM(TINY / "target", speculative_config=config, max_model_len=256, **settings)


def outputs(llm, prompts, params):
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in found]


PROMPTS = [[(7 * i + j) % 4000 for i in range(12 + 9 * j)] for j in range(6)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 16}, {"num_kv_blocks": 10, "max_num_seqs": 4}, {"speculative": {"num_layers": 2}}],
    ids=["roomy", "chunked", "scarce", "two layers"],
)
def test_greedy_text_is_that_of_plain_decoding(method, settings):
    plain = outputs(LLM(TINY / "target", max_model_len=256), PROMPTS, GREEDY)
    llm = llm_with(method, **settings)
    assert outputs(llm, PROMPTS, GREEDY) == plain
    assert llm.engine.metrics.counts["proposer_propose_calls"] > 5
    assert (llm.engine.metrics.counts["num_preemptions"] > 0) == ("num_kv_blocks" in settings)
    llm.engine.check_integrity()


def test_device_form_drafts_the_same_while_requests_end_at_different_times(method):
    """Rows of requests that ended, and rejected rows, lie between those that go on."""
    params = [GREEDY.replace(max_tokens=4 + 5 * (5 - i)) for i in range(6)]
    counts = []
    for placement in ("host", "device"):
        llm = llm_with(method, speculative={"placement": placement})
        counts.append((outputs(llm, PROMPTS, params), llm.engine.metrics.acceptance.as_dict()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("distribution", ["sparse", "dense"])
def test_its_probabilities_reach_verification(method, distribution):
    speculative = {"draft_sample_method": "probabilistic", "draft_distribution": distribution}
    llm = llm_with(method, speculative=speculative, max_num_seqs=4)
    params = [SamplingParams(temperature=0.8 if i % 2 else 0, seed=i, max_tokens=24, ignore_eos=True) for i in range(6)]
    sampled = outputs(llm, PROMPTS, params)
    greedy_again = [sampled[i] for i in range(0, 6, 2)]
    assert greedy_again == outputs(LLM(TINY / "target", max_model_len=256), PROMPTS[::2], params[0])
    assert llm.engine.metrics.counts["proposer_propose_calls"] > 5


def test_it_is_named_with_its_distribution(method):
    assert str(plugin_of(llm_with(method))) == "specdec-plugin-stranger:stranger 0.3"
