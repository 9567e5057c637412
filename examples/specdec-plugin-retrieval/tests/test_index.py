"""The index against the definition: every place is looked at."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_plugin_retrieval import CorpusIndex

DEPTH = 4
documents = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=5)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def ending_places(docs, text, length):
    """What follows each occurrence of the last `length` tokens of `text`, by looking everywhere."""
    ending = text[len(text) - length :]
    return Counter(
        doc[end] for doc in docs for end in range(length, len(doc)) if list(doc[end - length : end]) == list(ending)
    )


@given(documents, texts)
def test_finds_every_occurrence_of_the_longest_ending(docs, text):
    index = CorpusIndex.build(docs, DEPTH)
    matches = index.matches(text, min_length=1)
    lengths = [n for n in range(1, min(DEPTH, len(text)) + 1) if ending_places(docs, text, n)]
    assert matches.length == max(lengths, default=0)
    found = Counter(index.tokens[matches.places].tolist())
    assert found == (ending_places(docs, text, matches.length) if matches.length else Counter())


def test_a_shorter_match_than_asked_for_is_none():
    index = CorpusIndex.build([[1, 2, 3]], DEPTH)
    assert index.matches([9, 2], min_length=1).length == 1
    assert len(index.matches([9, 2], min_length=2).places) == 0


def test_followers_end_with_the_document():
    index = CorpusIndex.build([[1, 2], [3]], DEPTH)
    [[first, *rest]] = index.followers(index.matches([1], 1).places, 5).tolist()
    assert (first, rest) == (2, [-1, 3, -1, -1])


@pytest.mark.parametrize("docs", [[], [[]], [[5]], [[], [5], []]])
def test_a_corpus_without_any_context_matches_nothing(docs):
    assert len(CorpusIndex.build(docs, DEPTH).matches([5], 1).places) == 0


def test_a_search_reads_few_places():
    """The number of comparisons grows with the logarithm of the corpus."""
    rng = np.random.default_rng(0)
    reads = []
    for size in (1_000, 100_000):
        index = CorpusIndex.build([rng.integers(0, 50, size).tolist()], DEPTH)
        counted = Counting(index.places)
        CorpusIndex(index.tokens, counted, DEPTH).matches([1, 2, 3], 1)
        reads.append(counted.reads)
    assert reads[0] < 60
    assert reads[1] - reads[0] < 40


class Counting:
    """Places that count how many of them are looked at."""

    def __init__(self, places):
        self.places, self.reads = places, 0

    def __len__(self):
        return len(self.places)

    def __getitem__(self, which):
        self.reads += 1
        return self.places[which]
