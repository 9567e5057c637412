"""Two tokenizers: which tokens stand for the same bytes, and how text crosses from one to the other."""

from __future__ import annotations

import json

import pytest
from other_tokenizers import fewer_tokens, random_model, sentencepiece_like
from plugin_helpers import TINY
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.plugins.draft_model.as_text import Crossing
from specdec.plugins.draft_model.vocabularies import Vocabularies, byte_signs, draft_ids_of_target, shared_tokens
from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint
from specdec.testing import fake_target_info

SIZE = 4096


@pytest.fixture(scope="module")
def target():
    return AutoTokenizer.from_pretrained(TINY / "target")


@pytest.fixture(scope="module")
def texts():
    return [json.loads(line)["prompt"] for line in (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def pieces(request, texts):
    return sentencepiece_like(texts, request.param)


def of_pieces(vocabulary, specials=(), decoder=None):
    """A tokenizer with these ids."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoder
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    whole.add_special_tokens({"additional_special_tokens": list(specials)})
    return whole


BYTE_LEVEL = decoders.ByteLevel()
METASPACE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def pairs(own, other, own_size=SIZE, other_size=SIZE):
    found = shared_tokens(own, other, own_size, other_size)
    return [(own.convert_ids_to_tokens(a), other.convert_ids_to_tokens(b)) for a, b in found]


def test_tokenizers_of_the_same_files_are_not_loaded(tmp_path):
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("whoever loads this one fails")
        (tmp_path / name / "config.json").write_text("{}")
    checkpoint, told = Checkpoint.open(tmp_path / "draft"), fake_target_info(checkpoint_dir=tmp_path / "target")
    assert Vocabularies.choose(checkpoint, SIZE, told, "auto").way == "same"
    (tmp_path / "draft" / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    with pytest.raises(Exception, match="expected value"):
        Vocabularies.choose(checkpoint, SIZE, told, "auto")


def test_a_targets_tokenizer_with_code_of_its_own_is_not_loaded_and_nobody_is_asked(tmp_path, monkeypatch):
    config = json.loads((TINY / "target" / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text((TINY / "target" / "tokenizer.json").read_text())
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    info = fake_target_info(checkpoint_dir=tmp_path)
    chosen = Vocabularies.choose(Checkpoint.open(TINY / "draft"), info.vocab_size, info, "auto")
    assert (chosen.way, asked) == ("same", [])


def test_signs_for_spaces_and_bytes_are_looked_through():
    ours = of_pieces({"▁foo": 0, "bar": 1, "<0x0A>": 2, "▁": 3, "only": 4}, decoder=METASPACE)
    theirs = of_pieces({"bar": 0, "Ġfoo": 1, "foo": 2, "Ċ": 3, "Ġ": 4}, decoder=BYTE_LEVEL)
    assert pairs(ours, theirs) == [("▁foo", "Ġfoo"), ("bar", "bar"), ("<0x0A>", "Ċ"), ("▁", "Ġ")]


def test_signs_that_are_no_signs_in_a_tokenizer_stand_for_themselves():
    ours = of_pieces({"Ġfoo": 0, "<0x0A>": 1}, decoder=METASPACE)
    theirs = of_pieces({"Ġfoo": 0, "Ċ": 1}, decoder=BYTE_LEVEL)
    assert pairs(ours, theirs) == [("<0x0A>", "Ċ")]
    assert pairs(ours, of_pieces({"▁foo": 0, "<0x0A>": 1}, decoder=decoders.Metaspace())) == []


def test_special_tokens_meet_special_tokens_only():
    ours = of_pieces({"<s>": 0, "a": 1}, decoder=METASPACE)
    theirs = of_pieces({"a": 0}, specials=["<s>"], decoder=BYTE_LEVEL)
    assert pairs(ours, theirs) == [("a", "a")]
    assert ("<s>", "<s>") in pairs(of_pieces({"a": 0}, specials=["<s>"], decoder=METASPACE), theirs)


def test_the_first_of_several_ids_counts_and_those_beyond_a_table_do_not():
    ours = of_pieces({"b": 0, "\n": 1, "<0x0A>": 2, "a": 3}, decoder=METASPACE)
    theirs = of_pieces({"a": 0, "Ċ": 1, "b": 2}, decoder=BYTE_LEVEL)
    assert shared_tokens(ours, theirs, 4, 3) == [(0, 2), (1, 1), (3, 0)]
    assert shared_tokens(ours, theirs, 3, 2) == [(1, 1)]


def test_byte_signs_are_those_of_byte_level_tokenizers(target):
    assert [target.backend_tokenizer.decoder.decode([sign]) for sign in byte_signs()[:128]] == list(
        map(chr, range(128))
    )


def test_what_both_have_is_the_same_text(pieces, target):
    shared = shared_tokens(pieces, target, len(pieces), SIZE)
    assert len(shared) > 300
    for own, theirs in shared:
        text = target.decode([theirs])
        assert "\ufffd" in text or pieces.decode([own]) in (text, text.removeprefix(" ")), "a first space is stripped"


def test_a_token_that_the_draft_model_lacks_is_read_as_the_end_of_its_text(target, pieces):
    shared = tuple(shared_tokens(pieces, target, len(pieces), SIZE))
    vocabularies = Vocabularies("intersection", pieces, target, shared)
    ids = draft_ids_of_target(vocabularies, len(pieces), SIZE)
    assert all(ids[theirs] == own for own, theirs in shared)
    missing = next(i for i in range(300, SIZE) if i not in dict(map(reversed, shared)) and target.decode([i]).isalpha())
    assert ids[missing] == pieces.encode(target.decode([missing]), add_special_tokens=False)[-1]
    assert ids[target.convert_tokens_to_ids("<|im_start|>")] == pieces.unk_token_id


@pytest.mark.parametrize("text", ["for x in range(3):\n    print(x)", "naïve café, 12 €", "  two  spaces ", "a\n\n\nb"])
def test_text_crosses_and_comes_back(target, pieces, text):
    crossing = Crossing(pieces, target, len(pieces), SIZE)
    lead = "def f(a, b):\n"
    before = target.encode(lead)
    context = crossing.context(before)
    known = pieces.unk_token_id not in pieces.encode(text, add_special_tokens=False)
    assert pieces.decode(context, skip_special_tokens=True) == lead
    if known:  # the Unigram model has no tokens for some signs
        drawn = pieces.encode(lead + text, add_special_tokens=False)[len(context) :]
        assert target.decode(crossing.draft(context, drawn, before)) == text


def test_a_beginning_of_text_is_put_where_the_tokenizer_puts_it(target, texts):
    pieces = sentencepiece_like(texts)
    without = Crossing(pieces, target, len(pieces), SIZE).context(target.encode("x"))
    begin = pieces.bos_token_id
    pieces.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    assert Crossing(pieces, target, len(pieces), SIZE).context(target.encode("x")) == [begin, *without]


def test_special_tokens_do_not_cross_but_the_end_does(target, pieces):
    crossing = Crossing(pieces, target, len(pieces), SIZE)
    marked = target.encode("<|im_start|>user\n")
    assert crossing.context(marked) == crossing.context(target.encode("user\n"))
    context = crossing.context(marked)
    drawn = [*pieces.encode("user\nab", add_special_tokens=False)[len(context) :], pieces.eos_token_id, 300]
    assert crossing.draft(context, drawn, marked) == [*target.encode("ab"), target.eos_token_id]


def test_a_draft_ends_before_a_sign_that_is_not_complete(target, texts):
    pieces = sentencepiece_like(texts)
    crossing = Crossing(pieces, target, len(pieces), SIZE)
    context = crossing.context(target.encode("def f(a"))
    drawn = [pieces.convert_tokens_to_ids(each) for each in (",", "<0xE2>", "<0x82>")]  # two of three bytes of a euro
    assert crossing.draft(context, drawn, target.encode("def f(a")) == target.encode(",")


def test_words_that_would_merge_with_the_token_before_are_offered_alone(target, texts):
    pieces = sentencepiece_like(texts)
    crossing = Crossing(pieces, target, len(pieces), SIZE)
    before = target.encode("ret")
    assert target.encode("return")[: len(before)] != before, "the target has a token for the whole"
    context = crossing.context(before)
    drawn = [pieces.convert_tokens_to_ids(each) for each in "urn"]
    assert target.decode(crossing.draft(context, drawn, before)) == "urn"


@pytest.mark.parametrize(("num_kept", "way"), [(3000, "intersection"), (1500, "reencode")])
def test_what_the_tokenizers_share_decides(num_kept, way, tmp_path):
    checkpoint = Checkpoint.open(fewer_tokens(tmp_path / "draft", num_kept))
    facts = fake_target_info(vocab_size=SIZE, checkpoint_dir=TINY / "target")
    size = checkpoint.config["vocab_size"]
    assert Vocabularies.choose(checkpoint, size, facts, "auto").way == way
    assert Vocabularies.choose(checkpoint, size, facts, "same").way == "same"


@pytest.mark.parametrize("size", [SIZE, SIZE + 128])
def test_padded_tables_are_the_same_vocabulary(size):
    facts = fake_target_info(vocab_size=size, checkpoint_dir=TINY / "target")
    assert Vocabularies.choose(Checkpoint.open(TINY / "draft"), SIZE, facts, "auto").way == "same"


def test_a_way_that_cannot_be_gone_is_refused(tmp_path, texts):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    facts = fake_target_info(vocab_size=SIZE, checkpoint_dir=TINY / "target")
    with pytest.raises(Refusal, match="one of the checkpoints has none"):
        Vocabularies.choose(Checkpoint.open(tmp_path / "bare"), SIZE, facts, "reencode")
    strange = of_pieces({"ж": 0}, decoder=METASPACE)
    folder = random_model(tmp_path / "strange", strange)
    with pytest.raises(Refusal, match=r"no token in common(.|\n)*reencode"):
        Vocabularies.choose(Checkpoint.open(folder), 1, facts, "intersection")
