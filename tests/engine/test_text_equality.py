"""Which promise of the same text holds where, that it is said once, and what attention in PyTorch does for it."""

from __future__ import annotations

import logging

import pytest
import torch
from engine_helpers import make_llm
from inside import text_equality_of

from specdec.core.engine.device import profile_of
from specdec.core.kernels.attention import Span, SpanBatch, attend_in_torch
from specdec.core.kernels.attention_spec import AttentionSpec

has_amx = bool(torch.cpu.get_capabilities().get("amx_bf16"))
BY_SETTINGS = {
    ("float32", "auto"): "bits",
    ("bfloat16", "auto"): "distribution" if has_amx else "bits",
    ("float16", "auto"): "distribution",
    ("float32", "torch"): "ties",
    ("bfloat16", "torch"): "distribution",
    ("float16", "torch"): "distribution",
}


@pytest.mark.parametrize(("dtype", "kernels"), BY_SETTINGS)
def test_the_promise_follows_from_dtype_and_kernels(dtype, kernels):
    llm = make_llm(dtype=dtype, cpu_kernels=kernels)
    assert text_equality_of(llm).level == BY_SETTINGS[dtype, kernels]


def test_layers_that_are_not_ours_promise_less():
    found = text_equality_of(make_llm(quantization="int8_weight_only"))
    assert found.level == "distribution"
    assert "Int8Linear" in found.because


def test_nothing_is_promised_token_for_token_on_a_gpu():
    found = profile_of(torch.device("cuda")).text_equality(torch.float32)
    assert (found.level, found.fix) == ("distribution", None)


def test_less_than_the_same_text_is_said_once_where_there_are_drafts(caplog):
    with caplog.at_level(logging.INFO, logger="specdec"):
        llm = make_llm("ngram", dtype="float16")
        llm.generate([[5, 6, 7], [8, 9]])
    (told,) = (record for record in caplog.records if "SD-W305" in record.message)
    assert told.levelno == logging.WARNING
    assert "float16" in told.message


@pytest.mark.parametrize(
    ("proposer", "settings", "promises"),
    [
        ("ngram", {}, 1),
        (None, {}, 0),
        ("ngram", {"speculative": {"rejection_sample_method": "typical"}}, 0),
    ],
    ids=["drafts", "plain", "lossy"],
)
def test_the_same_text_is_promised_without_a_warning(proposer, settings, promises, caplog):
    with caplog.at_level(logging.INFO, logger="specdec"):
        make_llm(proposer, **settings)
    assert "SD-W305" not in caplog.text
    assert caplog.text.count("is plain decoding's token for token") == promises


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", ["adjacent", "apart"])
def test_drafts_do_not_change_what_attention_in_torch_gives_before_them(dtype, slots):
    num_keys, num_queries = 77, 6
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    query, keys, values = (
        torch.randn(rows, heads, 64, generator=generator).to(dtype)
        for rows, heads in ((num_queries, 4), (num_keys, 2), (num_keys, 2))
    )
    places = torch.randperm(num_keys, generator=generator) if slots == "apart" else torch.arange(num_keys)
    at = places if slots == "apart" else slice(0, num_keys)

    def attend(first: int, count: int) -> torch.Tensor:
        stored = [torch.zeros_like(each).index_copy_(0, places, each) for each in (keys, values)]
        stop = num_keys - num_queries + first + count
        own = slice(0, stop) if isinstance(at, slice) else at[:stop]
        batch = SpanBatch((Span(0, count, stop, own, cpu),))
        new = keys[stop - count : stop], values[stop - count : stop]
        return attend_in_torch(query[first : first + count], *new, *stored, batch, AttentionSpec(0.125))

    alone = torch.cat([attend(index, 1) for index in range(num_queries)])
    assert torch.equal(attend(0, num_queries), alone)
