"""transformers' cache, whose rows are one rectangle, for texts of different lengths.

Between two passes the tokens of all rows end together: what lies before a shorter row is nobody's, as padding on the
left is. So a mask of two dimensions says what each row sees, and a window counts what it should.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

_FORGETS_NOTHING_BEHIND = (DynamicLayer, DynamicSlidingWindowLayer)


class RowCache:
    """Keys and values of a call's rows."""

    def __init__(self, cache: DynamicCache, lengths: Sequence[int], width: int) -> None:
        """lengths: tokens of each row that it holds. width: slots of every row."""
        self.cache = cache
        self.width = width
        self._firsts = [width - length for length in lengths]

    def keep(self, lengths: Sequence[int]) -> None:
        """Drop what lies behind the first `lengths` tokens of each row, and let all rows end together."""
        width = max(lengths)
        self.lay_out([width - length for length in lengths], width)

    def lay_out(self, firsts: Sequence[int], width: int) -> None:
        """Let each row begin at a slot of its own, among so many."""
        shifts = [source - first for source, first in zip(self._firsts, firsts, strict=True)]
        if not any(shifts) and width == self.width:
            return
        if len(set(shifts)) == 1 and 0 <= shifts[0] <= self.width - width:
            self._take(slice(shifts[0], shifts[0] + width))
        else:  # nobody reads what comes from beyond a row
            slots = torch.arange(width) + torch.tensor(shifts)[:, None]
            self._take(slots.clamp_(0, self.width - 1))
        self.width, self._firsts = width, list(firsts)

    def grow(self, width: int, padding: Sequence[int]) -> None:
        """A pass has put so many tokens behind every row, of which the first are padding."""
        self._firsts = [first + each for first, each in zip(self._firsts, padding, strict=True)]
        self.width += width

    def _take(self, slots: slice | Tensor) -> None:
        for layer in filled_layers(self.cache):
            layer.keys, layer.values = _taken(layer.keys, slots), _taken(layer.values, slots)


def _taken(stored: Tensor, slots: slice | Tensor) -> Tensor:
    """Read slots of [B, heads, slots, D]. slots: the same ones of every row, or [B, width]."""
    if isinstance(slots, slice):
        return stored[:, :, slots]
    num_rows, num_heads, length, size = stored.shape
    lanes = torch.arange(num_rows * num_heads, device=stored.device).view(num_rows, num_heads, 1) * length
    places = (lanes + slots.to(stored.device)[:, None]).view(-1)
    return stored.reshape(-1, size).index_select(0, places).view(num_rows, num_heads, -1, size)


def filled_layers(cache: DynamicCache) -> Iterator[DynamicLayer]:
    """The layers that hold keys and values."""
    return (layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.get_seq_length() > 0)


def held_length(cache: Any) -> int:
    """Tokens of a text that a cache of transformers holds, padding included."""
    attending = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    return max((int(layer.get_seq_length()) for layer in attending), default=0)


def without_windows(cache: DynamicCache) -> DynamicCache | None:
    """A cache with the same keys and values, which forgets none from now on. None: it may hold something else.

    What has left a window is zero: nothing that follows sees it.
    """
    if any(type(layer) not in _FORGETS_NOTHING_BEHIND for layer in cache.layers):
        return None
    whole = DynamicCache()
    for number, layer in enumerate(cache.layers):
        if layer.get_seq_length() > 0:
            missing = layer.get_seq_length() - layer.keys.shape[2]
            padded = [torch.nn.functional.pad(each, (0, 0, missing, 0)) for each in (layer.keys, layer.values)]
            whole.update(*padded, number)
    return whole
