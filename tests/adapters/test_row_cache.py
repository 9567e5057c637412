"""Rows of one rectangle for texts of different lengths: what a row holds stays where it was among its own tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, EncoderNoRepeatNGramLogitsProcessor, GenerationConfig
from transformers.cache_utils import DynamicLayer

from specdec.adapters.transformers.call import Call
from specdec.adapters.transformers.refusals import refuse_arguments
from specdec.adapters.transformers.row_cache import RowCache, filled_layers, without_windows
from specdec.adapters.transformers.states import is_filled
from specdec.sdk.errors import RequestError

LENGTHS, WIDTH = [5, 3], 5


def cache_of(lengths, width) -> RowCache:
    """Keys are row * 100 + the token's place in its text, and -1 where nobody's token is."""
    stored = torch.full((len(lengths), 1, width, 1), -1.0)
    for row, length in enumerate(lengths):
        stored[row, 0, width - length :, 0] = row * 100 + torch.arange(float(length))
    cache = DynamicCache()
    cache.update(stored.expand(-1, 2, -1, 4).clone(), stored.expand(-1, 2, -1, 4) + 1000, 0)
    return RowCache(cache, lengths, width)


def texts(rows: RowCache, firsts, lengths):
    """What each row holds of its text."""
    (layer,) = filled_layers(rows.cache)
    assert layer.keys.shape[2] == layer.values.shape[2] == rows.width
    assert torch.equal(layer.keys + 1000, layer.values)
    pairs = zip(firsts, lengths, strict=True)
    return [layer.keys[row, 1, first : first + length, 3].tolist() for row, (first, length) in enumerate(pairs)]


def whole(lengths):
    return [[row * 100.0 + place for place in range(length)] for row, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("firsts", "width"),
    [([0, 2], 5), ([2, 4], 7), ([0, 2], 8), ([0, 0], 5), ([3, 1], 9), ([1, 3], 6)],
    ids=["as they lie", "all later", "more behind", "one shifted", "both ways", "one later"],
)
def test_rows_may_begin_at_any_slot(firsts, width):
    rows = cache_of(LENGTHS, WIDTH)
    rows.lay_out(firsts, width)
    assert rows.width == width
    assert texts(rows, firsts, LENGTHS) == whole(LENGTHS)


@pytest.mark.parametrize("kept", [[5, 3], [4, 2], [3, 3], [1, 3], [2, 1]], ids=str)
def test_what_is_kept_ends_together(kept):
    rows = cache_of(LENGTHS, WIDTH)
    rows.keep(kept)
    assert rows.width == max(kept)
    assert texts(rows, [rows.width - each for each in kept], kept) == whole(kept)
    rows.grow(2, [0, 1])
    assert rows.width == max(kept) + 2


@pytest.mark.parametrize(("firsts", "width"), [([0, 2], 4), ([0, 1], 4)], ids=["its end", "its beginning"])
def test_what_is_cut_off_all_rows_alike_is_not_copied(firsts, width):
    rows = cache_of([5, 3], 5) if firsts == [0, 2] else cache_of([4, 3], 5)
    (layer,) = filled_layers(rows.cache)
    stored = layer.keys.untyped_storage().data_ptr()
    rows.lay_out(firsts, width)
    (layer,) = filled_layers(rows.cache)
    assert layer.keys.untyped_storage().data_ptr() == stored
    assert texts(rows, firsts, [4, 2] if firsts == [0, 2] else [4, 3]) == whole([4, 2] if firsts == [0, 2] else [4, 3])


class Odd(DynamicLayer):
    """Of somebody who may forget."""


def test_one_layer_of_another_kind_is_enough_for_a_cache_to_be_computed_anew():
    (plain,) = filled_layers(cache_of(LENGTHS, WIDTH).cache)
    cache = DynamicCache()
    cache.layers = [plain, Odd()]
    assert without_windows(cache) is None
    cache.layers = [plain]
    found = without_windows(cache)
    assert found is not None
    assert torch.equal(found.layers[0].keys, plain.keys)


def test_a_cache_is_filled_where_one_layer_is():
    (plain,) = filled_layers(cache_of(LENGTHS, WIDTH).cache)
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), plain]
    assert is_filled(cache)
    cache.layers = [DynamicLayer(), DynamicLayer()]
    assert not is_filled(cache)


NAMES = ("temperature", "top_k", "top_p", "min_p")


def sampling_of(settings):
    call = Call(torch.zeros(2, 5), 3, [], None, None, settings, None)
    return call.sampling(NAMES, 2, torch.device("cpu"))


def test_settings_that_are_whole_numbers_are_shown_in_the_types_of_the_contract():
    shown = sampling_of(GenerationConfig(do_sample=True, temperature=2, top_k=5, top_p=1, min_p=0))
    assert [getattr(shown, name).dtype for name in NAMES] == [torch.float32, torch.int64, torch.float32, torch.float32]
    assert shown.temperature.tolist() == [2.0, 2.0]


def test_settings_that_a_call_leaves_out_change_nothing_of_the_distribution():
    settings = GenerationConfig(do_sample=True, temperature=None, top_k=None, top_p=None, min_p=None)
    shown = sampling_of(settings)
    found = [getattr(shown, name).tolist() for name in NAMES]
    assert found == [[1.0, 1.0], [0, 0], [1.0, 1.0], [0.0, 0.0]]
    assert not shown.all_greedy


@pytest.mark.parametrize(("texts", "expected"), [([(3, True), (5, False), (5, False)], 5), ([(3, True), (5, True)], 5)])
def test_a_call_has_the_tokens_of_its_running_rows_or_else_of_the_longest(texts, expected):
    rows = [SimpleNamespace(num_output_tokens=count, ended=ended) for count, ended in texts]
    assert Call(torch.zeros(3, 9), 3, rows, None, None, None, None).num_output_tokens == expected


def test_two_rows_are_too_many_for_a_processor_that_counts_them():
    counting = [EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2, 3]]))]
    refuse_arguments(torch.ones(1, 3, dtype=torch.int64), {}, counting, 2)
    with pytest.raises(RequestError, match="counts the rows"):
        refuse_arguments(torch.ones(2, 3, dtype=torch.int64), {}, counting, 2)
