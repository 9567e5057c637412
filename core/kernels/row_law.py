"""The one function that turns logits into a row's law, for plain sampling and for verification alike.

p(x) = exp2((x - max) * scale) / mass for logits x >= cutoff, else 0. Maximum and mass are kept apart: folding them
into one logarithm costs a rounding of the size of that logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .filters import FilterRows, cutoffs
from .pick import empty_tiles, tile_masses

LOG2_E = math.log2(math.e)
COLDEST, HOTTEST = 1e-30, 1e30
LOGITS_IN_CACHE = 1 << 17


@dataclass(frozen=True)
class RowLaw:
    """Laws of R rows as scalars per row, and the weights that this backend keeps beside them."""

    scale: Tensor  # [R, 1] log2(e) / temperature
    cutoff: Tensor | None  # [R, 1] logits below it have probability 0; None: every token survives in every row
    max: Tensor  # [R, 1]
    cdf: Tensor  # [R, tiles] float64, cumulative tile masses; the last column is the mass
    weights: Tensor  # [R, tiles, width], p times mass
    vocab_size: int
    bad: Tensor | None  # [R] bool, NaN or no finite maximum: the law is one-hot; None: no such row

    @property
    def mass(self) -> Tensor:  # [R, 1] float64
        return self.cdf[:, -1:]

    def probs(self, rows: Tensor) -> Tensor:
        """p of the given rows, int64 [M], as new weights [M, tiles, width] of mass 1."""
        return self.weights[rows] / self.mass[rows].to(self.weights.dtype).unsqueeze(2)


def compute_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, float32 for all others."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def scale_of(temperature: Tensor) -> Tensor:
    """log2(e) / temperature as float64, finite for every temperature."""
    return LOG2_E / temperature.double().clamp(COLDEST, HOTTEST)


def mend(logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(logits, maxima [R, 1], bad [R] or None), every bad row replaced by one that is 0 at its argmax, else -inf.

    Bad is a row with a NaN or without a finite maximum. Its argmax is over what is not NaN, the lowest index
    winning. The input is not modified. On the CPU one scalar is read to skip the repair; on other devices the
    repair always runs, because reading would stall them.
    """
    maxima = logits.amax(-1, keepdim=True)
    if logits.device.type == "cpu" and math.isfinite(maxima.sum().item()):
        return logits, maxima, None
    bad = ~maxima.isfinite()  # [R, 1]
    best = torch.where(logits.isnan(), -torch.inf, logits).max(-1, keepdim=True).indices
    one_hot = torch.full_like(logits, -torch.inf).scatter_(1, best, 0.0)
    return torch.where(bad, one_hot, logits), torch.where(bad, 0.0, maxima), bad.squeeze(1)


def row_law(logits: Tensor, scale: Tensor, filters: FilterRows | None = None, greedy: Tensor | None = None) -> RowLaw:
    """The law of each row of logits [R, V].

    scale [R] is `scale_of` the row's temperature; greedy [R] marks rows whose law is the maximum whatever the
    filters say (ties share it, and a uniform of 0 picks the lowest index).
    """
    logits, maxima, bad, weights, masses = _weigh(logits, scale)
    scale = scale.to(weights.dtype).unsqueeze(1)
    flat = weights.flatten(1)[:, : logits.shape[1]]
    cutoff = None
    if filters is not None:
        cutoff = cutoffs(logits, maxima, scale, filters)
    if greedy is not None:
        everything = torch.full_like(maxima, -torch.inf) if cutoff is None else cutoff
        cutoff = torch.where(greedy.unsqueeze(1), maxima, everything)
    if cutoff is not None:
        flat.masked_fill_(logits < cutoff, 0.0)
        masses = tile_masses(weights)
    return RowLaw(scale, cutoff, maxima, masses.cumsum(-1, dtype=torch.float64), weights, logits.shape[1], bad)


def rows_in_cache(vocab_size: int, rows: Tensor) -> int:
    """How many rows to work on at a time; all of them on a device, where cutting costs launches."""
    return max(1, LOGITS_IN_CACHE // max(1, vocab_size)) if rows.device.type == "cpu" else max(1, len(rows))


def _weigh(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """(mended logits, maxima, bad, weights, tile masses) of all rows, a few at a time while they are in cache."""
    weights = empty_tiles(len(logits), logits.shape[1], logits.new_empty(0, dtype=compute_dtype(logits)))
    step = rows_in_cache(logits.shape[1], logits)
    starts = range(0, max(1, len(logits)), step)
    parts = [_weigh_part(logits[i : i + step], scale[i : i + step], weights[i : i + step]) for i in starts]
    if len(parts) == 1:
        logits, maxima, bad, masses = parts[0]
        return logits, maxima, bad, weights, masses
    maxima, masses = torch.cat([part[1] for part in parts]), torch.cat([part[3] for part in parts])
    if all(part[2] is None for part in parts):
        return logits, maxima, None, weights, masses
    flags = [maxima.new_zeros(len(part[1]), dtype=torch.bool) if part[2] is None else part[2] for part in parts]
    return torch.cat([part[0] for part in parts]), maxima, torch.cat(flags), weights, masses


def _weigh_part(logits: Tensor, scale: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`mend` some rows, and write the weights of their tokens."""
    logits, maxima, bad = mend(logits.to(weights.dtype))
    flat = weights.flatten(1)[:, : logits.shape[1]]
    torch.sub(logits, maxima, out=flat).mul_(scale.to(weights.dtype).unsqueeze(1)).exp2_()
    return logits, maxima, bad, tile_masses(weights)
