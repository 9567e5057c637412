"""The one function that turns logits into a row's distribution, for plain sampling and for verification alike.

p(x) = exp2((x - max) * scale) / mass for logits x >= cutoff, else 0. Maximum and mass are kept apart: folding them
into one logarithm costs a rounding of the size of that logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .filters import FilterRows, apply_filters, drop_below
from .pick import empty_tiles, tile_masses

LOG2_E = math.log2(math.e)
COLDEST, HOTTEST = 1e-30, 1e30
LOGITS_IN_CACHE = 1 << 17


@dataclass(frozen=True)
class RowDistribution:
    """Distributions of R rows: the weight of each token, and the mass of all."""

    cdf: Tensor  # [R, tiles] float64, cumulative tile masses; the last column is the mass
    weights: Tensor  # [R, tiles, width], p times mass
    vocab_size: int
    bad: Tensor | None  # [R] bool, NaN or no finite maximum: the distribution is one-hot; None: no such row

    @property
    def mass(self) -> Tensor:  # [R, 1] float64
        return self.cdf[:, -1:]

    def probs(self, rows: Tensor) -> Tensor:
        """p of the given rows, int64 [M], as new weights [M, tiles, width] of mass 1."""
        return self.weights[rows].div_(self.mass[rows].to(self.weights.dtype).unsqueeze(2))

    def prob_of(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """p of token_ids [B, W] on rows [B, W], float64; 0 for an id outside the vocabulary and on a bad row."""
        known = (token_ids >= 0) & (token_ids < self.vocab_size)
        if self.bad is not None:
            known &= ~self.bad[rows]
        weights = self.weights.flatten(1)[rows, token_ids.clamp(0, self.vocab_size - 1)]
        return torch.where(known, weights.double() / self.mass.squeeze(1)[rows], 0.0)


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


def row_distribution(
    logits: Tensor,
    scale: Tensor,
    filters: FilterRows | None = None,
    greedy: Tensor | None = None,
    rows: Tensor | None = None,
) -> RowDistribution:
    """The distribution of each of N rows of logits [R, V], a few rows at a time while they are in cache.

    rows int64 [N] says which, rising; None: all of them. scale [N] is `scale_of` the row's temperature; greedy [N]
    marks rows whose distribution is the maximum whatever the filters say (ties share it, and a uniform of 0 picks the
    lowest index).
    """
    num_rows, vocab_size = len(scale), logits.shape[1]
    weights = empty_tiles(
        num_rows, vocab_size, logits.new_empty(0, dtype=torch.promote_types(logits.dtype, torch.float32))
    )
    step = rows_in_cache(vocab_size, logits)
    masses: list[Tensor] = []
    bad: Tensor | None = None
    for first in range(0, max(1, num_rows), step):
        part = slice(first, min(first + step, num_rows))
        of_part = None if filters is None else filters.part(part)
        top = None if greedy is None else greedy[part]
        mass, found = _fill(weights[part], _take(logits, rows, part), scale[part], of_part, top)
        masses.append(mass)
        if found is not None:
            bad = torch.zeros(num_rows, dtype=torch.bool, device=scale.device) if bad is None else bad
            bad[part] = found
    cdf = torch.cat(masses).cumsum(-1, dtype=torch.float64)
    return RowDistribution(cdf, weights, vocab_size, bad)


def rows_in_cache(vocab_size: int, rows: Tensor) -> int:
    """How many rows to work on at a time; all of them on a device, where cutting costs launches."""
    return max(1, LOGITS_IN_CACHE // max(1, vocab_size)) if rows.device.type == "cpu" else max(1, len(rows))


def _take(logits: Tensor, rows: Tensor | None, part: slice) -> Tensor:
    """Part of the wanted rows, without a copy where they are neighbours."""
    if rows is None:
        return logits[part]
    wanted = rows[part]
    if not len(wanted):
        return logits[:0]
    first, last = int(wanted[0]), int(wanted[-1])
    return logits[first : last + 1] if last - first == len(wanted) - 1 else logits[wanted]


def _fill(
    weights: Tensor, logits: Tensor, scale: Tensor, filters: FilterRows | None, greedy: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Write the weights [n, tiles, width] of the distributions of logits [n, V]; (tile masses, bad rows)."""
    logits, maxima, bad = mend(logits.to(weights.dtype))
    scale = scale.to(weights.dtype).unsqueeze(1)
    torch.sub(logits, maxima, out=weights.flatten(1)[:, : logits.shape[1]]).mul_(scale).exp2_()
    if filters is not None:
        apply_filters(logits, maxima, scale, filters, weights)
    if greedy is not None:
        drop_below(torch.where(greedy.unsqueeze(1), maxima, -torch.inf), logits, weights)
    return tile_masses(weights), bad
