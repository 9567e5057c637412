"""What the engine provides to a model-based proposer: embedding, head, checkpoint files, and draft KV without holes."""

from __future__ import annotations

import pytest
import torch
from inside import kv_capacity_of

from specdec import LLM, SamplingParams
from specdec.sdk import ConfigError, Draft, Needs, NetworkSettings, ProposerConfig, ProposerError, Refusal
from specdec.sdk.extensions import DraftKV, Networks


class KvKeeper:
    """Writes each kept token's id as its draft KV, reads all of it back, and drafts what it read first."""

    needs = Needs(
        history=True,
        extensions=(DraftKV(num_layers=2, num_heads=1, head_dim=1, dtype="float32"), Networks()),
    )
    last: KvKeeper

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config
        self.num_checked = 0
        type(self).last = self

    def bind(self, target, services) -> None:
        self.services = services
        self.store = services.draft_kv()

    def observe(self, step) -> None:
        kept = step.kept
        assert len(kept.token_ids) == int(kept.num_kept.sum())
        rows = step.slots.repeat_interleave(kept.num_kept)
        values = kept.token_ids.float().view(-1, 1, 1)
        for layer in range(2):
            self.store.write(layer, rows, kept.positions, values + layer, -values)

    def propose(self, step) -> Draft:
        drafts = []
        for row, length, budget in zip(
            step.slots.tolist(), step.committed_length.tolist(), step.budget.tolist(), strict=True
        ):
            num_stored = int(step.kept.kept_start[len(drafts)] + step.kept.num_kept[len(drafts)])
            history = step.history.of(len(drafts))[:num_stored].float()
            for layer in range(2):
                keys, values = self.store.read(layer, row, num_stored)
                assert torch.equal(keys.flatten(), history + layer)
                assert torch.equal(values.flatten(), -history)
            assert budget == 0 or num_stored == length - 1
            self.num_checked += 1
            drafts.append([int(token) for token in history[:budget]])
        return Draft.from_lists(drafts, step.width)


def speculate(cls: type, **settings) -> LLM:
    config = {"model": f"{cls.__module__}:{cls.__qualname__}", "num_speculative_tokens": 3}
    return LLM("tiny", speculative_config=config, max_model_len=256, **settings)


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 16}, {"num_kv_blocks": 18, "max_num_seqs": 6, "block_size": 16}],
    ids=["roomy", "chunked", "scarce"],
)
def test_draft_kv_holds_every_kept_token_whatever_the_scheduler_does(prompts, settings):
    llm = speculate(KvKeeper, **settings)
    llm.generate([prompt[:40] for prompt in prompts[:6]], GREEDY)
    assert KvKeeper.last.num_checked > 50
    if "num_kv_blocks" in settings:
        assert llm.engine.metrics.counts["num_preemptions"] > 0


def test_embedding_and_head_are_the_targets(reference_model):
    llm = speculate(KvKeeper)
    services = KvKeeper.last.services
    ids = torch.tensor([[3, 5, 7]])
    with torch.inference_mode():
        assert torch.equal(services.embed(ids), reference_model.get_input_embeddings()(ids))
        hidden = reference_model.model(ids).last_hidden_state
        assert torch.allclose(services.lm_head(hidden), reference_model(ids).logits, atol=1e-5)
    assert services.logit_scale == 1
    assert services.tokenizer is llm.get_tokenizer()
    assert (services.dtype, services.device.type) == (torch.float32, "cpu")


@pytest.mark.slow
def test_checkpoint_files_load_as_tensors_and_as_a_model(target_path, tmp_path):
    speculate(KvKeeper)
    services = KvKeeper.last.services
    assert services.target.checkpoint_dir.samefile(target_path)
    tensors = services.load_tensors(services.target.checkpoint_dir)
    model = services.load_causal_lm(target_path, NetworkSettings())
    embedding = model.get_input_embeddings().weight
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"].float())
    with pytest.raises(ConfigError, match="SD-E146"):
        services.load_tensors(tmp_path)
    with pytest.raises(ConfigError, match="SD-E140"):
        services.load_causal_lm(tmp_path, NetworkSettings())


class ShortSighted(KvKeeper):
    """Declares one position past the newest token, and attends 32 further."""

    def propose(self, step) -> Draft:
        bounds = 34 * torch.arange(len(step) + 1)
        passed = self.store.attention(step.slots, step.committed_length - 1, bounds)
        raise AssertionError(passed)


@pytest.mark.parametrize("prompt_tokens", [4, 24], ids=["one block", "blocks"])
def test_a_pass_past_the_blocks_of_its_request_is_an_error_that_names_the_declaration(prompt_tokens):
    llm = speculate(ShortSighted, block_size=16)
    prompt = {"prompt_token_ids": [5] * prompt_tokens}
    with pytest.raises(ProposerError, match="declare a longer lookahead"):
        llm.generate(prompt, GREEDY)


class Undeclared(KvKeeper):
    needs = Needs(history=True)


@pytest.mark.slow
def test_draft_kv_that_was_not_declared_is_refused_at_bind():
    with pytest.raises(Refusal, match="draft_kv belongs to draft_kv@1") as refused:
        speculate(Undeclared)
    assert "Undeclared" in str(refused.value).partition("\n")[0]


@pytest.mark.slow
def test_draft_kv_counts_against_the_cache_budget():
    budget = {"kv_cache_memory_gib": 0.01}
    plain = kv_capacity_of(LLM("tiny", max_model_len=256, **budget))
    assert kv_capacity_of(speculate(KvKeeper, **budget)) < plain
