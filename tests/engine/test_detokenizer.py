"""The text of any tokens is what the tokenizer makes of them, whatever kind it is of; what was shown stays."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import LLM, SamplingParams
from specdec.cli._token_view import Mark, StepPieces
from specdec.core.request.request import Detokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁a", "▁the", "a", "b", "ing", "A", "あ", "\ufffd", ".", "\n", "n't", "x▁y"]
SPECIALS = ["<s>", "</s>"]


def byte_level_pieces():
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = ["the", " the", "あ", "é", " 😀", "\ufffd", "\n\n"]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole = ["".join(piece for piece, _ in split.pre_tokenize_str(text)) for text in texts]
    halves = [piece[:-1] for piece in whole] + [piece[1:] for piece in whole]
    return list(dict.fromkeys([*signs, *whole, *halves]))


def tokenizer_of(pieces, model, decoder):
    pieces = list(dict.fromkeys(["[UNK]", *pieces]))
    tokenizer = Tokenizer(model({piece: number for number, piece in enumerate(pieces)}))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("日本", special=False), "  "])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def bpe(vocabulary):
    return models.BPE(vocabulary, [], byte_fallback=True)


def words(vocabulary):
    return models.WordLevel(vocabulary, unk_token="[UNK]")


def wordpiece(vocabulary):
    return models.WordPiece(vocabulary, unk_token="[UNK]")


def llama(*ends):
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends],
    )


KINDS = {
    "byte fallback": tokenizer_of(BYTES + WORDS, bpe, llama(decoders.Strip(" ", 1, 0))),
    "byte fallback, no strip": tokenizer_of(BYTES + WORDS, bpe, llama()),
    "byte fallback, metaspace": tokenizer_of(
        BYTES + WORDS, bpe, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "byte level": tokenizer_of(byte_level_pieces(), bpe, decoders.ByteLevel()),
    "metaspace": tokenizer_of(WORDS, words, decoders.Metaspace()),
    "metaspace, never": tokenizer_of(WORDS, words, decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": tokenizer_of(
        ["the", "a", "##ing", "##s", ".", "n't", "'s", "##", "do"], wordpiece, decoders.WordPiece()
    ),
    "word ends": tokenizer_of(["the</w>", "a", "ing</w>", "</w>", "."], bpe, decoders.BPEDecoder()),
    "no decoder": tokenizer_of([*WORDS, *BYTES], words, None),
}


def shown(tokenizer, ids, *, skip=True, stop=(), every=1):
    """The texts shown after every so many tokens; that in the end; the stop text and the number of tokens until it."""
    detokenizer, texts = Detokenizer(tokenizer, stop, skip), []
    for count, token_id in enumerate(ids, start=1):
        found = detokenizer.append(token_id)
        if found is not None:
            return texts, detokenizer.text(finished=True), (found, count)
        if count % every == 0:
            texts.append(detokenizer.text(finished=False))
    return texts, detokenizer.text(finished=True), None


IDS = st.lists(st.integers(0, 700), max_size=24)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(IDS, st.booleans(), st.integers(1, 30))
def test_the_text_is_the_decoded_tokens_and_grows(kind, ids, skip, every):
    tokenizer = KINDS[kind]
    ids = [each % (len(tokenizer) + 2) for each in ids]
    texts, text, _ = shown(tokenizer, ids, skip=skip, every=every)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    for earlier, later in itertools.pairwise([*texts, text]):
        assert later.startswith(earlier), "what was shown stays"


def ids_of(tokenizer, *pieces):
    return tokenizer.convert_tokens_to_ids(list(pieces))


@pytest.mark.parametrize(
    "pieces",
    [
        ("<0x41>", "<0xE3>", "a"),
        ("<0x41>", "<s>", "<0xE3>", "a"),
        ("▁the", "<0xE3>", "<0x81>", "<0x82>", "<0xE3>"),
        ("<s>", "▁a", "▁the", "</s>"),
    ],
)
def test_bytes_that_are_no_text_are_shown_as_the_tokenizer_shows_them(pieces):
    tokenizer = KINDS["byte fallback"]
    ids = ids_of(tokenizer, *pieces)
    assert shown(tokenizer, ids)[1] == tokenizer.decode(ids, skip_special_tokens=True)


def test_whole_tokens_are_shown_at_once():
    tokenizer = KINDS["byte fallback"]
    ids = ids_of(tokenizer, "▁the", "▁a", "ing", "<0x0A>", "<s>", "▁a", ".")
    assert shown(tokenizer, ids)[0] == [
        "the",
        "the a",
        "the aing",
        "the aing",
        "the aing",
        "the aing\n a",
        "the aing\n a.",
    ]


class Watched:
    """A tokenizer that keeps how many tokens each call decodes."""

    def __init__(self, tokenizer):
        self.backend_tokenizer, self._backend, self.lengths = self, tokenizer.backend_tokenizer, []
        self.id_to_token = self._backend.id_to_token

    def decode(self, token_ids, skip_special_tokens):
        self.lengths.append(len(token_ids))
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_row_are_not_decoded_over_and_over(kind):
    tokenizer = KINDS[kind]
    a, end = ids_of(tokenizer, "a", "</s>")
    watched, ids = Watched(tokenizer), [a, *[end] * 40, a]
    assert shown(watched, ids, stop=("\0never",))[1] == tokenizer.decode(ids, skip_special_tokens=True)
    assert max(watched.lengths) < 5


def test_a_stop_text_of_byte_tokens_is_found_at_its_last_byte():
    tokenizer = KINDS["byte fallback"]
    ids = ids_of(tokenizer, "▁the", "<0xE3>", "<0x81>", "<0x82>", "<0x0A>", "▁a")
    assert shown(tokenizer, ids, stop=("あ",))[1:] == ("the", ("あ", 4))
    assert shown(tokenizer, ids, stop=("\n",))[1:] == ("theあ", ("\n", 5))
    assert shown(tokenizer, ids, stop=("あ\n a",))[1:] == ("the", ("あ\n a", 6))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(IDS, st.integers(0, 40), st.integers(1, 6), st.booleans())
def test_a_stop_text_ends_it_and_is_never_shown(kind, ids, start, width, skip):
    tokenizer = KINDS[kind]
    ids = [each % (len(tokenizer) + 2) for each in ids]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    stop = whole[start : start + width]
    if not stop or "\ufffd" in stop:
        return
    texts, text, found = shown(tokenizer, ids, skip=skip, stop=(stop, "\0never"))
    assert found is not None
    assert found[0] == stop
    assert stop not in text
    assert all(text.startswith(each) for each in texts)
    assert tokenizer.decode(ids[: found[1]], skip_special_tokens=skip).startswith(text + stop)


@pytest.mark.parametrize("kind", ["byte fallback", "wordpiece"])
def test_random_tokens_of_an_engine_are_text_in_every_view(kind, tmp_path):
    tokenizer = KINDS[kind]
    tokenizer.save_pretrained(tmp_path)
    params = SamplingParams(temperature=100.0, max_tokens=40, seed=1, n=8, ignore_eos=True)
    with LLM("tiny", tokenizer=str(tmp_path), max_model_len=128) as llm:
        prompt = {"prompt_token_ids": [1, 2, 3]}
        (output,) = llm.generate([prompt], params)
        updates = list(llm.stream([prompt], params))
    for each in output.outputs:
        assert each.text == tokenizer.decode(each.token_ids, skip_special_tokens=True)
        mine, pieces = [update for update in updates if update.index == each.index], StepPieces(tokenizer)
        assert "".join(update.text for update in mine) == each.text
        for update in mine:
            assert "".join(piece.text for piece in pieces.of(update) if piece.mark is not Mark.REJECTED) == update.text
