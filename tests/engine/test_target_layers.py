"""A proposer that declares layers of the target runs them over the target's cache, and the text stays the target's."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from device_steps import address_by_table
from engine_helpers import GREEDY, counter, make_llm, tokens
from inside import proposer_of
from torch import nn

from specdec import LLM
from specdec.core.model.partial_target import with_modules
from specdec.sdk import ProposerError, Refusal
from specdec.sdk.extensions import Graphs, Networks, TargetLayers
from specdec.sdk.model_proposer import CachedTargetProposer, LowRank, ModelOptions

ALL = tuple(range(8))
K = 3


class Drafting(CachedTargetProposer):
    """Drafts with the layers that it is told, and keeps what it drafted at which text."""

    class Options(ModelOptions):
        layers: tuple[int, ...] = ALL

    @classmethod
    def needs(cls, config, target):
        run = TargetLayers(layers=config.options.layers, lookahead=config.num_draft_tokens)
        return cls.shared_needs(config, target, run, history=True)

    def build(self):
        self.layers, self.found = self.services.target_layers(self.config.options.layers), []

    def advance(self, index, rows, lengths, token_ids, *states):
        places = torch.arange(len(rows) + 1)
        return (self.layers.logits(token_ids, rows, lengths + index, places, places[:-1]),)

    def propose(self, step):
        draft = super().propose(step)
        for b, ids in enumerate(draft.token_ids):
            self.found.append((step.history.token_ids(b), [each for each in ids.tolist() if each >= 0]))
        return draft


ADAPTED, LEFT_OUT = "model.layers.1.mlp.up_proj", "model.layers.7.mlp.up_proj"


def term():
    """What is added to the outputs of a layer with 256 inputs and 640 outputs."""
    generator = torch.Generator().manual_seed(0)
    return LowRank(*(torch.randn(*shape, generator=generator) / 4 for shape in ((4, 256), (640, 4))))


class Adapted(Drafting):
    """Adds to one of the layers that run, and to one that does not."""

    def build(self):
        adapter = {ADAPTED: term(), LEFT_OUT: term()}
        self.layers, self.found = self.services.target_layers(self.config.options.layers, adapter), []


class OnDevice(Drafting):
    @classmethod
    def needs(cls, config, target):
        return super().needs(config, target).replace(placement="device")


class Early(Drafting):
    """Begins before the newest token."""

    def advance(self, index, rows, lengths, token_ids, *states):
        return super().advance(index, rows, lengths - 1, token_ids, *states)


class EarlyOnDevice(OnDevice, Early):
    pass


class Undeclared(Drafting):
    @classmethod
    def needs(cls, config, target):
        return super().needs(config, target).replace(extensions=(Networks(), Graphs(), TargetLayers(layers=(0,))))


@pytest.fixture(scope="module")
def asked(prompts):
    return [{"prompt_token_ids": prompt[:30]} for prompt in prompts[:4]]


@pytest.fixture(scope="module")
def plain(asked):
    return tokens(make_llm().generate(asked, GREEDY))


def run(llm, asked):
    found = tokens(llm.generate(asked, GREEDY))
    llm.engine.check_integrity()
    return found


SCARCE = {"num_kv_blocks": 13, "block_size": 16, "max_num_batched_tokens": 60}


@pytest.mark.parametrize("settings", [{}, SCARCE], ids=["roomy", "scarce"])
def test_all_layers_draft_what_the_target_then_writes(asked, plain, settings):
    llm = make_llm("test_target_layers:Drafting", k=K, **settings)
    assert run(llm, asked) == plain
    assert llm.engine.metrics.acceptance.draft_acceptance_rate == 1
    assert (counter(llm, "num_preemptions") > 0) == bool(settings)


def test_a_block_table_addresses_them_as_lists_do(asked, plain, monkeypatch):
    address_by_table(monkeypatch)
    llm = make_llm("test_target_layers:OnDevice", k=K)
    assert run(llm, asked) == plain
    assert llm.engine.metrics.acceptance.draft_acceptance_rate == 1


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 4), (0, 1, 3, 6, 7)], ids=["first", "some"])
def test_fewer_layers_draft_as_a_model_without_the_others_does(asked, plain, reference_model, layers):
    llm = make_llm("test_target_layers:Drafting", k=K, options={"layers": layers})
    assert run(llm, asked) == plain
    assert_exact(llm, reference_model, layers)


@pytest.mark.slow
def test_an_adapter_changes_the_drafts_and_nothing_else(asked, plain, reference_model):
    layers, added = (0, 1, 2, 3, 4), term()
    llm = make_llm("test_target_layers:Adapted", k=K, options={"layers": layers})
    assert run(llm, asked) == plain
    under = partial(with_hook, reference_model.get_submodule(ADAPTED), lambda _, args, out: out + added(args[0]))
    assert_exact(llm, reference_model, layers, under)
    with pytest.raises(AssertionError):
        assert_exact(llm, reference_model, layers)


@contextmanager
def with_hook(module, hook):
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def assert_exact(llm, model, layers, under=nullcontext):
    drafted = [each for each in proposer_of(llm).found if each[1]]
    assert drafted
    for text, ids in drafted[:12]:
        assert ids == exact_drafts(model, layers, text, len(ids), under)


@torch.inference_mode()
def exact_drafts(model, layers, text, count, under):
    """Of cached keys and values that all layers computed, and of the newest tokens that only some do.

    under: in which these are computed.
    """
    cache, whole = model(torch.tensor([text[:-1]]), use_cache=True).past_key_values, model.model.layers
    ids, token = [], text[-1]
    for index in range(count):
        position = torch.tensor([[len(text) - 1 + index]])
        states = model.model.embed_tokens(torch.tensor([[token]]))
        rotation = model.model.rotary_emb(states, position)
        with under():
            for layer in layers:
                states = whole[layer](states, position_embeddings=rotation, past_key_values=cache, attention_mask=None)
        token = int(model.lm_head(model.model.norm(states))[0, -1].argmax())
        ids.append(token)
    return ids


def test_a_pass_over_what_the_target_computed_is_refused(asked):
    llm = make_llm("test_target_layers:Early", k=K)
    with pytest.raises(Exception, match="SD-E276"):
        llm.generate(asked[:1], GREEDY)


@pytest.mark.slow
def test_with_a_block_table_it_is_refused_a_step_later_and_changes_no_text(asked, plain, monkeypatch):
    address_by_table(monkeypatch)
    with pytest.raises(ProposerError, match=r"(?s)SD-E276.*1 positions before in row 0.*the text is right"):
        make_llm("test_target_layers:EarlyOnDevice", k=K).generate(asked[:1], GREEDY)
    llm = make_llm("test_target_layers:EarlyOnDevice", k=K, speculative={"on_proposer_error": "skip_step"})
    assert run(llm, asked) == plain
    assert llm.engine.metrics.proposer_errors["SD-E276"] > 1


def test_undeclared_layers_and_targets_without_keys_are_refused():
    with pytest.raises(Refusal, match=r"\[1, 2, 3, 4, 5, 6, 7\] of Services.target_layers belongs to target_layers@1"):
        make_llm("test_target_layers:Undeclared", k=K)
    config = {"method": "test_target_layers:Drafting", "num_speculative_tokens": K}
    with pytest.raises(Refusal, match="layer 0, 1, 2, 4, 5, 6, which stores none"):
        LLM("tiny/hybrid", speculative_config=config)
    with pytest.raises(Refusal, match=r"(?s)layer 4, 5, 6, 7 of tiny/moe.*0 \.\. 3"):
        LLM("tiny/moe", speculative_config=config)


def test_a_copy_shares_everything_but_what_was_replaced():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    twin = with_modules(model, {"0.1": nn.Identity()})
    assert twin[0][0] is model[0][0]
    assert twin[1] is model[1]
    assert isinstance(model[0][1], nn.ReLU)
    assert isinstance(twin[0][1], nn.Identity)
