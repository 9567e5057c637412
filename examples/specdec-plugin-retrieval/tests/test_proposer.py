"""What it drafts, what it refuses, and that it gains something on real text."""

import sysconfig
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from specdec import LLM, SamplingParams
from specdec.sdk import ConfigError, ProposerConfig, Refusal
from specdec.testing import FakeServices, fake_target_info

from specdec_plugin_retrieval import RetrievalProposer
from specdec_plugin_retrieval.files import open_index

STDLIB = Path(sysconfig.get_path("stdlib"))


class Words:
    """A tokenizer of words, as far as an index needs one."""

    def __init__(self, words="the cat sat down and slept on mats"):
        self.ids = {word: i for i, word in enumerate(words.split())}

    def get_vocab(self):
        return self.ids

    def __call__(self, texts, **options):
        return {"input_ids": [[self.ids[word] for word in text.split()] for text in texts]}


def proposer(tmp_path, tokenizer, **options):
    options = RetrievalProposer.Options(**{"index": tmp_path / "index", **options})
    made = RetrievalProposer(ProposerConfig(num_draft_tokens=8, options=options))
    made.bind(fake_target_info(), FakeServices(tokenizer=tokenizer))
    return made


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(["the cat sat down", "the cat sat down and slept", "a cat sat on mats"]):
        (folder / f"{number}.txt").write_text(text.removeprefix("a "))
    return folder


def drafted(made, tokenizer, text, k=8):
    words = list(tokenizer.ids)
    return " ".join(words[i] for i in made.draft([tokenizer.ids[word] for word in text.split()], k))


def test_what_follows_most_often_is_drafted_until_it_is_unlikely(tmp_path, corpus):
    tokenizer = Words()
    made = proposer(tmp_path, tokenizer, corpus=corpus, min_probability=0.2)
    assert drafted(made, tokenizer, "cat") == "sat down"  # 3 of 3 + 1, then 2 of 3 + 1; then the text ends as often
    assert drafted(made, tokenizer, "cat", k=1) == "sat"
    assert drafted(made, tokenizer, "slept cat sat on") == "mats"  # the longest match has one place
    assert drafted(proposer(tmp_path, tokenizer, min_probability=0.6), tokenizer, "cat") == "sat"


def test_no_match_or_no_budget_is_no_draft(tmp_path, corpus):
    tokenizer = Words()
    made = proposer(tmp_path, tokenizer, corpus=corpus, min_match=2)
    assert drafted(made, tokenizer, "mats cat") == ""
    assert made.draft([1], 0) == []


def test_index_is_built_once_and_then_opened(tmp_path, corpus):
    proposer(tmp_path, Words(), corpus=corpus)
    written = (tmp_path / "index").stat().st_mtime_ns
    proposer(tmp_path, Words(), corpus=corpus)
    proposer(tmp_path, Words())
    assert (tmp_path / "index").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["index"]


def test_places_are_mapped_and_not_copied(tmp_path, corpus):
    proposer(tmp_path, Words(), corpus=corpus)
    index = open_index(tmp_path / "index", Words())
    assert not index.places.flags.owndata
    assert not index.tokens.flags.owndata


@pytest.mark.parametrize(
    ("options", "tokenizer", "because"),
    [
        ({}, Words("other words of another model"), "tokenizer"),
        ({"index": "nowhere"}, Words(), "there is no index 'nowhere'"),
        ({"index": "new", "corpus": "empty"}, Words(), "no text below 'empty' matches"),
        ({}, None, "no tokenizer"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path, corpus, monkeypatch, options, tokenizer, because):
    proposer(tmp_path, Words(), corpus=corpus)
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(Refusal, match=because):
        proposer(tmp_path, tokenizer, **options)


@pytest.mark.parametrize(("key", "value"), [("version", "0"), ("format", "another")])
def test_a_file_of_another_format_or_version_is_refused_by_name(tmp_path, corpus, key, value):
    proposer(tmp_path, Words(), corpus=corpus)
    file = tmp_path / "index"
    header = {"format": "specdec-plugin-retrieval", "version": "1", "tokenizer": "", "depth": "16"}
    save_file(load_file(file), file, metadata=header | {key: value})
    with pytest.raises(Refusal, match=rf"index' has {key} '{value}'"):
        proposer(tmp_path, Words())


@pytest.mark.parametrize("damage", [lambda raw: raw[:-8], lambda raw: b"", lambda raw: b"#" * 4096])
def test_a_damaged_file_is_refused_by_name(tmp_path, corpus, damage):
    proposer(tmp_path, Words(), corpus=corpus)
    file = tmp_path / "index"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Refusal, match=r"index' is damaged or no index"):
        proposer(tmp_path, Words())


def test_files_that_are_no_text_are_left_out(tmp_path, corpus):
    (corpus / "picture.txt").write_bytes(b"\xff\xfe\x00")
    assert drafted(proposer(tmp_path, Words(), corpus=corpus), Words(), "on") == "mats"


@pytest.mark.parametrize("options", [{}, {"index": "i", "min_match": 0}, {"index": "i", "window": 3}])
def test_unusable_options_are_refused_before_anything_is_opened(options):
    with pytest.raises(ConfigError):
        RetrievalProposer.Options(**options)


def test_gains_on_code_with_a_corpus_of_code(tmp_path):
    prompts = [
        "def read_lines(path):\n",
        "class Stack:\n    def __init__(self, items=None):\n",
        "import os\nimport sys\n\n\ndef main(argv):\n",
        "    def close(self):\n        if self._closed:\n",
    ]
    params = SamplingParams(temperature=0, max_tokens=48)
    plain = LLM("tiny").generate(prompts, params)
    options = {"index": str(tmp_path / "index"), "corpus": str(STDLIB), "pattern": "*.py", "min_probability": 0.15}
    llm = LLM("tiny", speculative_config={"method": "specdec_plugin_retrieval:RetrievalProposer"} | options)
    found = llm.generate(prompts, params)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    num_steps = sum(each.outputs[0].spec_decode_metrics["num_target_steps"] for each in found)
    assert num_steps < 0.88 * sum(len(each.outputs[0].token_ids) for each in found)
