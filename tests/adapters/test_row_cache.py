"""Rows of one rectangle for texts of different lengths: what a row holds stays where it was among its own tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from specdec.adapters.transformers.row_cache import RowCache, filled_layers

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
