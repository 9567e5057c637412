"""The tokens that stand for forced text: those that the tokenizer writes behind what is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import LLM, SamplingParams
from specdec.plugins.forced import ForcedProposer
from specdec.sdk.packaged import packaged
from specdec.testing import step_view


def drafted(tokenizer, tail: list[int], forced: str, k: int = 50) -> list[int]:
    """What it drafts where `forced` must follow `tail`."""
    proposer = ForcedProposer(SimpleNamespace())
    proposer.bind(None, SimpleNamespace(tokenizer=tokenizer, forced=lambda request_id: forced))
    draft = proposer.propose(step_view([tail], k))
    return draft.token_ids[0, : draft.lengths[0]].tolist()


@pytest.fixture(scope="module")
def tiny():
    return PreTrainedTokenizerFast.from_pretrained(packaged("tiny"))


@pytest.fixture(scope="module")
def words():
    """A tokenizer that writes a space in front of every text, as those of SentencePiece do."""
    pieces = ["<unk>", "▁a", "▁b", "▁", *'ab":{}']
    inner = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "b")]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.mark.parametrize("text", ['{"name', '{"name": "', "x = 1\n\n{", '{"a": 12'])
@pytest.mark.parametrize("forced", ['", "age": ', ": ", '"}', "}"])
def test_they_write_the_forced_text(tiny, text, forced) -> None:
    for tail in (tiny.encode(text), [token for each in text for token in tiny.encode(each)]):
        assert tiny.decode([*tail, *drafted(tiny, tail, forced)]) == text + forced


def test_behind_text_in_its_own_tokens_they_are_those_of_the_whole(tiny) -> None:
    text, forced = '{"name', '": "search'
    whole, tail = tiny.encode(text + forced), tiny.encode(text)
    assert [*tail, *drafted(tiny, tail, forced)] == whole


def test_no_space_is_put_before_them(words) -> None:
    for tail in (words.encode('a{"b'), [words.convert_tokens_to_ids(each) for each in ("▁a", "{", '"', "b")]):
        written = drafted(words, tail, '":b')
        assert words.convert_ids_to_tokens(written) == ['"', ":", "b"]


def test_of_text_in_other_tokens_none_is_drafted_again(words) -> None:
    apart = [words.convert_tokens_to_ids(each) for each in ("▁", "a", "{")]
    assert words.convert_ids_to_tokens(drafted(words, apart, '"b"')) == ['"', "b", '"']


def test_they_end_with_the_budget_and_nothing_follows_where_nothing_is_forced(tiny) -> None:
    tail = tiny.encode('{"name')
    assert drafted(tiny, tail, '": "search', 2) == drafted(tiny, tail, '": "search')[:2]
    assert drafted(tiny, tail, "") == []


def test_of_long_forced_text_no_more_is_encoded_than_a_draft_holds(tiny) -> None:
    encoded: list[int] = []
    tokenizer = SimpleNamespace(
        decode=tiny.decode, encode=lambda text, **settings: encoded.append(len(text)) or tiny.encode(text, **settings)
    )
    tail, forced = tiny.encode("x"), '"name": '
    assert drafted(tokenizer, tail, forced * 100_000, 8) == drafted(tiny, tail, forced * 20, 8)
    assert max(encoded) < 1000


def test_endless_forced_text_is_drafted_up_to_the_end_of_the_request() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    params = SamplingParams(max_tokens=40, structured_outputs={"json": schema, "disable_any_whitespace": True})
    with LLM("tiny", speculative_config={"method": "forced", "num_speculative_tokens": 8}, max_model_len=128) as llm:
        [output] = llm.generate("x", params)[0].outputs
        num_steps = llm.engine.metrics.counts["num_steps"]
    assert output.finish_reason == "length"
    assert ('{"next":' * 40).startswith(output.text)
    assert num_steps < 40, "drafts are accepted"
