"""How layers that keep a state are found, checked and run for few tokens."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import make_llm
from inside import target_of
from scripts.small_models import small_config, small_model
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.qwen3_5 import modeling_qwen3_5

from specdec.core.model import few_tokens
from specdec.core.model.find_mixers import checked_mixers, watched_mixers
from specdec.core.model.mixers import Mixer, Mixers
from specdec.core.model.model_support import refuse_unsupported
from specdec.sdk.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def mixers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small_model(small_config("qwen3_5_text")).save_pretrained(folder)
    return target_of(make_llm(model=folder, max_model_len=64)).mixers.each


def test_the_layout_is_what_transformers_caches(mixers):
    (mixer,) = mixers  # of two layers, one attends
    assert isinstance(DynamicCache(config=small_config("qwen3_5_text")).layers[mixer.layer], LinearAttentionLayer)
    assert [each.kind for each in mixer.layout.tensors] == ["conv", "recurrent"]
    assert [each.shape for each in mixer.layout.tensors] == [(64, 4), (4, 8, 8)]


def test_few_tokens_are_computed_by_the_kernel_and_the_modelling_file_is_left_alone(mixers, monkeypatch):
    (mixer,) = mixers
    called = []
    chunked = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def kernel(query, *others, **named):
        called.append(query.shape[1])
        return chunked(query, *others, **named)

    forward = few_tokens.for_few_tokens(mixer.module, {"gated_delta_rule": kernel})
    for length in (1, few_tokens.FEW, few_tokens.FEW + 1):
        forward(torch.randn(1, length, 32))
    assert called == [1, few_tokens.FEW]
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is chunked


def test_a_kernel_that_computes_something_else_is_not_taken(mixers):
    (mixer,) = mixers
    before = mixer._inner
    mixer.exchange({"gated_delta_rule": lambda query, key, value, **named: (0 * value, torch.zeros(1, 4, 8, 8))})
    assert mixer._inner is before


def test_a_kernel_that_cannot_be_called_is_not_taken_and_said_once_for_a_class(mixers, caplog):
    (mixer,) = mixers
    before = mixer._inner

    def kernel(query, key, value, **named):
        raise RuntimeError("heads do not fit together")

    Mixers([mixer, mixer]).exchange({"gated_delta_rule": kernel})
    assert mixer._inner is before
    (warned,) = caplog.messages
    assert "SD-W307" in warned
    assert "Qwen3_5GatedDeltaNet" in warned
    assert "RuntimeError: heads do not fit together" in warned


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h"])
def test_layers_with_a_state_or_nothing_are_refused_where_none_is_served(model_type):
    config = small_config(model_type)
    refuse_unsupported(config, with_states=True)
    with pytest.raises(UnsupportedModelError, match="SD-E262"):
        refuse_unsupported(config)


class Forgetful(nn.Module):
    """Returns a running sum, and begins anew in every call."""

    def __init__(self):
        super().__init__()
        self.layer_idx = 0
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, hidden_states, cache_params=None):
        total = hidden_states.cumsum(1) * self.scale
        if cache_params is not None:
            cache_params.update_recurrent_state(total[:, -1], self.layer_idx)
        return total


class Remembering(Forgetful):
    """Goes on from its sum, but for one token only."""

    def forward(self, hidden_states, cache_params=None):
        goes_on = cache_params is not None and cache_params.has_previous_state(0)
        state = cache_params.layers[0].recurrent_states[0] if goes_on and hidden_states.shape[1] == 1 else 0
        if cache_params is None:
            return hidden_states.cumsum(1) * self.scale
        total = hidden_states.cumsum(1) + state
        cache_params.update_recurrent_state(total[:, -1], 0)
        return total * self.scale


def mixer_of(module):
    mixer = Mixer(module, "cache_params", LinearAttentionLayer())
    mixer.watch((torch.ones(1, 2, 4),), {})
    return mixer


def test_a_module_that_does_not_go_on_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"SD-E260 (.|\n)*Forgetful(.|\n)*does not go on"):
        checked_mixers("any", [mixer_of(Forgetful())])


def test_a_module_that_goes_on_for_one_token_is_run_token_by_token():
    mixer = mixer_of(Remembering())
    checked_mixers("any", [mixer])
    assert mixer.by_token


class OfTwoForms(Remembering):
    """Its form for single tokens is not the one for several, as in Nemotron-H."""

    def forward(self, hidden_states, cache_params=None):
        output = super().forward(hidden_states, cache_params)
        return output if hidden_states.shape[1] > 1 else 2 * output


@pytest.mark.parametrize("module", [OfTwoForms, "nemotron_h"])
def test_drafts_are_computed_as_plain_decoding_computes_single_tokens(module):
    mixer = first_mixer(module) if isinstance(module, str) else mixer_of(module())
    size, device = mixer.layout.input_size, torch.device("cpu")
    given = 4 * torch.randn(1, 5, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = mixer.new_states(1, device)
        mixer.advance(given, before, mixer.others, is_fresh=True)

        def outputs(parts, **named):
            states = [state.clone() for state in before]
            return torch.cat([mixer.advance(part, states, mixer.others, **named) for part in parts], dim=1)

        plain = outputs(given.split(1, dim=1))
        assert torch.equal(outputs([given], decodes=True), plain)
        assert not torch.allclose(outputs([given]), plain, rtol=1e-3), "the forms differ"


def first_mixer(model_type):
    model = small_model(small_config(model_type))
    with torch.inference_mode(), watched_mixers(model, model.config) as found:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    return found[0]
