"""Draft models with another tokenizer: they draft what a fresh pass of transformers does, and no text changes."""

from __future__ import annotations

import json
import logging
from typing import ClassVar

import pytest
import torch
from inside import proposer_of
from other_tokenizers import fewer_tokens, random_model, sentencepiece_like
from plugin_helpers import GREEDY, TINY, drafted_by_engine
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.plugins.draft_model.proposer import DraftModelProposer
from specdec.plugins.draft_model.reencode import SPARE_ROWS
from specdec.sdk import DistributionKind, Refusal

pytestmark = pytest.mark.slow

K = 4
SIZE = 4096
WAYS = ["intersection", "reencode"]


@pytest.fixture(scope="module")
def texts():
    return [json.loads(line)["prompt"] for line in (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "target")


@pytest.fixture(scope="module")
def prompts(texts, tokenizer):
    return [tokenizer.encode(text) for text in texts[:6]]


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of trained draft models with 2,000 tokens of the target's, by way; one has some of its own as well."""
    models = tmp_path_factory.mktemp("models")
    return {
        "intersection": fewer_tokens(models / "foreign", 2000, num_foreign=64),
        "reencode": fewer_tokens(models / "fewer", 2000),
    }


def loaded(folder):
    """The model and its tokenizer, as transformers has them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def llm_with(folder, way, **settings):
    asked = {"vocabulary": way} | settings.pop("speculative", {})
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": K, **asked}
    return LLM("tiny", device="cpu", dtype="float32", speculative_config=config, **{"max_model_len": 512} | settings)


def outputs(llm, prompts, params=GREEDY):
    return [
        list(each.outputs[0].token_ids) for each in llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    ]


@pytest.fixture(scope="module")
def plain(prompts):
    return outputs(LLM("tiny", device="cpu", dtype="float32", max_model_len=512), prompts)


@torch.no_grad()
def likeliest(model, ids, num_tokens, allowed=None):
    """Greedy tokens from passes over the whole text, among `allowed` ids."""
    ids, drawn = list(ids), []
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        if allowed is not None:
            logits = torch.full_like(logits, -torch.inf).index_copy(0, allowed, logits[allowed])
        drawn.append(int(logits.argmax()))
        ids.append(drawn[-1])
    return drawn


def agreement(draft, truth):
    return [*(ours == theirs for ours, theirs in zip(draft, truth, strict=True)), False].index(False)


class ByTokens:
    """Both tokenizers are byte-level, so that tokens are the same where their names are."""

    def __init__(self, model, own, target):
        self.model, self.own, self.target = model, own, target
        ours, theirs = own.get_vocab(), target.get_vocab()
        self.to_own = {theirs[name]: ours[name] for name in ours.keys() & theirs.keys()}
        self.to_target = {own_id: target_id for target_id, own_id in self.to_own.items()}
        self.allowed = torch.tensor(sorted(self.to_target))

    def read(self, token_id):
        if token_id in self.to_own:
            return self.to_own[token_id]
        return self.own.encode(self.target.decode([token_id]), add_special_tokens=False)[-1]

    def drafts(self, committed, num_tokens):
        drawn = likeliest(self.model, map(self.read, committed), num_tokens, self.allowed)
        return [self.to_target[each] for each in drawn]


class AsText(ByTokens):
    """From the beginning, with the whole text."""

    def drafts(self, committed, num_tokens):
        text = self.target.decode(committed)
        context = self.own.encode(text)
        drawn = likeliest(self.model, context, num_tokens)
        more = self.own.decode([*context, *drawn])
        assert more.startswith(text)
        before, after = self.target.encode(text), self.target.encode(more)
        if before != after[: len(before)]:  # they merge
            return None
        return after[len(before) :][:num_tokens]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "replay"), [("intersection", ByTokens), ("reencode", AsText)])
def test_replay_gives_the_same_drafts_and_the_same_acceptance(way, replay, folders, target, tokenizer, prompts):
    replayed = replay(*loaded(folders[way]), tokenizer)
    with llm_with(folders[way], way) as llm:
        seen = [each for prompt in prompts[:2] for each in drafted_by_engine(llm, prompt)[:8]]
    num_accepted, num_compared = set(), 0
    for each in seen:
        expected = replayed.drafts(each.committed, K)
        if expected is not None and len(each.draft) == K:
            assert each.draft == expected[: len(each.draft)]
            num_compared += 1
        assert each.num_accepted == agreement(each.draft, truth_after(target, each))
        num_accepted.add(each.num_accepted)
    assert num_compared >= 6
    assert len(num_accepted) > 1


@torch.no_grad()
def truth_after(target, each):
    """What the target finds likeliest after each part of a draft."""
    logits = target(torch.tensor([[*each.committed, *each.draft]]), use_cache=False).logits[0]
    return logits[len(each.committed) - 1 : -1].argmax(-1).tolist()


def test_tokens_that_the_target_lacks_would_be_said(folders, tokenizer, prompts):
    model, own = loaded(folders["intersection"])
    replayed = ByTokens(model, own, tokenizer)
    context = [replayed.read(each) for each in prompts[0]]
    foreign = own.get_vocab().keys() - tokenizer.get_vocab().keys()
    said = {own.convert_ids_to_tokens(likeliest(model, context[:length], 1)[0]) for length in range(4, len(context), 4)}
    assert said & foreign


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 32},
        {"num_kv_blocks": 30, "max_num_batched_tokens": 48},
        pytest.param({"max_num_seqs": 2}, marks=pytest.mark.full),
    ],
    ids=["batch", "chunks", "preemption", "rows-reused"],
)
def test_greedy_text_is_the_plain_one(way, settings, folders, prompts, plain):
    with llm_with(folders[way], way, **settings) as llm:
        assert outputs(llm, prompts) == plain
        metrics = llm.engine.metrics
        assert metrics.acceptance.num_accepted_tokens > 50
        assert ("num_kv_blocks" in settings) == (metrics.counts["num_preemptions"] > 0)


def test_sampled_text_is_the_plain_one_where_drafts_cross_over_as_text(folders, prompts):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    plain = outputs(LLM("tiny", device="cpu", dtype="float32", max_model_len=512), prompts[:3], params)
    with llm_with(folders["reencode"], "reencode") as llm:
        assert outputs(llm, prompts[:3], params) == plain
        assert llm.engine.metrics.acceptance.num_accepted_tokens > 0


class Recording(DraftModelProposer):
    """Keeps what was drafted; named by class path."""

    seen: ClassVar[list] = []

    def propose(self, step):
        draft = super().propose(step)
        self.seen.append((step.budget.tolist(), draft, [step.random.uniform(i) for i in range(K)]))
        return draft


@pytest.mark.parametrize("form", ["sparse", "dense"])
@torch.no_grad()
def test_the_reported_distribution_is_the_softmax_over_tokens_that_both_have(form, folders, tokenizer, prompts):
    folder = folders["intersection"]
    replayed = ByTokens(*loaded(folder), tokenizer)
    Recording.seen = []
    config = {"method": f"{__name__}:Recording", "draft_sample_method": "probabilistic", "draft_distribution": form}
    params = SamplingParams(temperature=0.9, max_tokens=12, seed=3, ignore_eos=True)
    num_checked, committed = 0, list(prompts[2])
    with llm_with(folder, "intersection", speculative=config | {"sparse_top_m": 4000}) as llm:
        for update in llm.stream([{"prompt_token_ids": prompts[2]}], params):
            committed += update.token_ids
            if len(Recording.seen) > num_checked:
                num_checked = len(Recording.seen)
                check_drawn(replayed, committed, *Recording.seen[-1])
    assert num_checked > 3


def check_drawn(replayed, committed, budget, draft, uniforms):
    """Row 0: each token lies where its uniform says in the distribution that a fresh pass gives."""
    drawn = draft.token_ids[0, : budget[0]].tolist()
    context = [replayed.read(each) for each in [*committed, *drawn]]
    logits = replayed.model(torch.tensor([context]), use_cache=False).logits[0, len(committed) - 1 :]
    for index, token_id in enumerate(drawn):
        probs = (logits[index, replayed.allowed].double() / 0.9).softmax(-1)
        ids = [replayed.to_target[each] for each in replayed.allowed.tolist()]
        expected = torch.zeros(SIZE, dtype=torch.float64).index_copy(0, torch.tensor(ids), probs)
        assert torch.allclose(reported(draft.distribution, index), expected, atol=2e-5)
        assert expected[token_id] > 0


def reported(distribution, index):
    """Of row 0 at one draft position: float64 [V]."""
    if DistributionKind(int(distribution.kind[0])) is DistributionKind.DENSE_LOGITS:
        return distribution.logits[0, index].double().softmax(-1)
    ids, probs = distribution.sparse_ids[0, index], distribution.sparse_probs[0, index].double()
    whole = torch.zeros(SIZE, dtype=torch.float64)
    return whole.index_add(0, ids.clamp(min=0), torch.where(ids >= 0, probs, 0.0))


def test_a_text_that_has_no_room_loses_its_beginning(tokenizer, prompts, tmp_path):
    """A tokenizer of hardly more than bytes needs more tokens than the target's blocks have room for."""
    model = fewer_tokens(tmp_path / "bytes", 420)
    prompt = [*prompts[0], *prompts[1], *prompts[2]]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    (plain,) = outputs(LLM("tiny", device="cpu", dtype="float32", max_model_len=512), [prompt], params)
    replayed, committed, first, num_compared = AsText(*loaded(model), tokenizer), list(prompt), 0, 0
    with llm_with(model, "reencode") as llm:
        for update in llm.stream([{"prompt_token_ids": prompt}], params):
            if update.draft_token_ids and num_compared < 3:
                expected = replayed.drafts(committed[first:], K)
                if expected is not None:
                    assert list(update.draft_token_ids) == expected[: len(update.draft_token_ids)]
                    num_compared += 1
            committed += update.token_ids
            (text,) = proposer_of(llm)._by_text._texts.values()
            first = text.first
            assert first > 0
            assert len(text.ids) <= len(committed) + SPARE_ROWS + K
    assert committed[len(prompt) :] == plain
    assert num_compared == 3


def test_a_sentencepiece_draft_model_of_random_weights_changes_nothing(texts, prompts, plain, tmp_path, caplog):
    folder = random_model(tmp_path / "draft", sentencepiece_like(texts))
    with caplog.at_level(logging.WARNING), llm_with(folder, "auto") as llm:
        assert outputs(llm, prompts[:3]) == plain[:3]
        assert llm.engine.metrics.acceptance.num_draft_tokens > 0
    assert "has another tokenizer: the target has 4096 tokens, it has 600" in caplog.text
    assert "vocabulary: reencode" in caplog.text


def test_another_vocabulary_is_refused_where_the_same_is_asked_for(folders):
    with pytest.raises(Refusal, match=r"has 2016 tokens and the target's 4096(.|\n)*\"vocabulary\": \"auto\""):
        llm_with(folders["reencode"], "same")
