"""Maximum and mass of every tile of the logits rows: the one pass over the vocabulary that verification needs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TileStats:
    """What is known of each row after one pass, by the place of the row in the padded batch."""

    maxima: Tensor  # [B, places, tiles] float32, NaN not counting
    sums: Tensor  # [B, places, tiles] float32, of exp2((logit - tile maximum) * scale); NaN for NaN or +inf
    tile: int  # tokens per tile, a power of two
