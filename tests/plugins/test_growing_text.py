"""A text that grows is encoded at its end only, and has the ids of one that is encoded at once."""

from __future__ import annotations

import json
from itertools import accumulate
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_tokenizers import sentencepiece_like
from plugin_helpers import TINY
from sweeps import slow_unless
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.plugins.draft_model import as_text
from specdec.plugins.draft_model.as_text import Crossing, Settled

LINES = [json.loads(line)["prompt"] for line in (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
PARTS = st.one_of(
    st.sampled_from([line[:200] for line in LINES[:60]]),
    st.text(alphabet=" \n\tab1.é語́€🙂", min_size=1, max_size=12),
    st.sampled_from(["word " * 40, "0123456789 " * 20, "a" * 70, "語彙" * 30, "\n \n  \t", "return x\n    if y:"]),
)
TEXTS = st.lists(PARTS, min_size=3, max_size=9).map("".join)
GROWTH = st.lists(st.integers(1, 40), min_size=4, max_size=12)


def byte_level(*, parts_words: bool) -> PreTrainedTokenizerFast:
    """parts_words: whether merges stay inside words, as in GPT-2's. Otherwise they join whole phrases."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=parts_words)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([line[:300] for line in LINES], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=None)


MADE = {
    "packaged": lambda: AutoTokenizer.from_pretrained(TINY / "draft"),
    "words": lambda: byte_level(parts_words=True),
    "phrases": lambda: byte_level(parts_words=False),
    "bpe": lambda: sentencepiece_like(LINES),
    "unigram": lambda: sentencepiece_like(LINES, "unigram"),
}


@pytest.fixture(scope="module")
def target():
    return AutoTokenizer.from_pretrained(TINY / "target")


@pytest.fixture(scope="module", params=slow_unless("words", MADE))
def crossing(request, target):
    own = MADE[request.param]()
    return Crossing(own, target, len(own), len(target))


def test_growing_texts_have_the_ids_of_whole_ones(crossing, target):
    num_settled = []

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(text=TEXTS, growth=GROWTH, place=st.integers(0, 400))
    def holds(text, growth, place):
        ids, settled = target.encode(text * 2), Settled()
        for length in accumulate([place + 1, *growth]):
            assert crossing.context(ids[:length], settled) == crossing.context(ids[:length])
        num_settled.append(settled.count)

    holds()
    assert sum(each > 0 for each in num_settled) > 5


def test_what_is_encoded_does_not_grow_with_the_text(crossing, target, monkeypatch):
    """How much it is at a place depends on the words there, most for a tokenizer that joins phrases."""
    ids, settled, encoded = target.encode(" ".join(LINES * 3))[:6000], Settled(), []
    encode = as_text._encode
    monkeypatch.setattr(
        as_text, "_encode", lambda tokenizer, text: encoded.append(len(text)) or encode(tokenizer, text)
    )
    costs = []
    for length in range(300, 6000, 7):
        encoded.clear()
        crossing.context(ids[:length], settled)
        costs.append(sum(encoded))
    third = len(costs) // 3
    beginning, end = mean(costs[:third]), mean(costs[-third:])
    assert end < 1.3 * beginning
    assert end < 3000, "characters, of a text of more than 20000"
