"""What trains drafters of blocks computes what drafting computes: PARD's rows of the mask, and DSpark's slots."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec
from specdec import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
TINY = (Path(specdec.__file__).parent / "assets" / "tiny").resolve()
MASK_TOKEN_ID, VOCAB_SIZE = 4084, 4096


@pytest.fixture(scope="module")
def scripts():
    """The modules of `scripts`, which is not part of the installed package."""
    names = ("dspark", "pard", "run", "target")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield SimpleNamespace(**{name: importlib.import_module(f"scripts.drafters.{name}") for name in names})


@pytest.fixture(scope="module")
def ids():
    """Two texts of 30 tokens."""
    return torch.randint(0, 4000, (2, 30), generator=torch.Generator().manual_seed(0))


def test_rows_of_the_mask_in_training_are_those_of_a_draft(scripts, ids):
    """Blocks of several lengths behind several anchors do not see each other."""
    pard = scripts.pard
    model = AutoModelForCausalLM.from_pretrained(TINY / "draft", dtype=torch.float32, local_files_only=True).eval()
    torch.manual_seed(0)
    rows = pard.drop_deeper(torch.tensor([20, 7, 12, 13]))
    with torch.no_grad():
        own, masked = pard.logits_with_blocks(model, ids, MASK_TOKEN_ID, rows)
        torch.testing.assert_close(own, model(ids).logits, rtol=1e-4, atol=1e-4)
    drafts = {anchor: pard.draft_in_parallel(model, ids[:, : anchor + 1], MASK_TOKEN_ID) for anchor in (20, 7, 12, 13)}
    for place, (anchor, depth) in enumerate(zip(rows.anchors.tolist(), rows.depths.tolist(), strict=True)):
        assert torch.equal(masked[:, place].argmax(-1), drafts[anchor][:, 1 + depth])


def test_deeper_rows_are_dropped_and_never_one_before_another(scripts):
    torch.manual_seed(0)
    rows = scripts.pard.drop_deeper(torch.arange(2000))
    shares = torch.bincount(rows.depths) / 2000
    torch.testing.assert_close(shares, torch.tensor([1, 0.7, 0.49, 0.343, 0.24, 0.2]), rtol=0, atol=0.03)
    longest = torch.zeros(2000).scatter_reduce(0, rows.blocks, rows.depths.float(), "amax")
    assert torch.equal(torch.bincount(rows.blocks).float(), longest + 1)


def test_the_engine_drafts_what_the_trained_module_drafts(scripts, ids, tmp_path):
    """An untrained DSpark head in the file that its trainer writes."""
    dspark, target = scripts.dspark, scripts.target.FrozenTarget(TINY / "target", torch.float32)
    torch.manual_seed(0)
    head = dspark.DSpark(target.embedding, target.unembedding, MASK_TOKEN_ID).bfloat16().float()
    torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    head.markov_head.markov_w2.weight.data = head.markov_head.markov_w2.weight.bfloat16().float()
    config = dspark.config(VOCAB_SIZE, MASK_TOKEN_ID)
    scripts.run.write_checkpoint(tmp_path / "dspark", head.state_dict(), config)
    llm = LLM("tiny", speculative_config={"model": str(tmp_path / "dspark")}, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for text in ids.tolist():
        first, second, *_ = llm.stream([{"prompt_token_ids": text}], params)
        features = head.features(target.observe(torch.tensor([text])))
        drafted = head.draft(features, torch.tensor(first.token_ids))
        assert list(second.draft_token_ids) == drafted[0].tolist()


def test_slots_are_guessed_from_the_tokens_before_theirs(scripts, ids):
    """Training gives a slot the text's token where drafting gives it the one that was drafted."""
    dspark, target = scripts.dspark, scripts.target.FrozenTarget(TINY / "target", torch.float32)
    torch.manual_seed(0)
    head = dspark.DSpark(target.embedding, target.unembedding, MASK_TOKEN_ID)
    torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    features, anchor = head.features(target.observe(ids)), 20
    drafted = head.draft(features[:, :anchor], ids[:, anchor])
    before = torch.cat([ids[:, anchor, None], drafted[:, :-1]], dim=1)
    with torch.no_grad():
        outputs = head.outputs(features, ids[:, [9, anchor]], torch.tensor([9, anchor]))
        logits, told = head.guess(outputs[:, 1], before)
    assert torch.equal(logits.argmax(-1), drafted)
    assert told.shape == drafted.shape
