"""Verification in batched torch: the CPU path, and the path of any device that has no kernel of its own.

Every row draws its token y from p by inverse CDF. One-hot and greedy rows accept a draft iff it equals y (the
coupled rule); rows with a reported distribution accept by ratio and, where they reject, draw from the residual instead.
A batch that is greedy throughout is compared on the host.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.filters import FilterRows
from ..kernels.pick import pick
from ..kernels.row_distribution import RowDistribution, mend, row_distribution, scale_of
from .layout import Chunk, Layout, places_at_once
from .ratio import ratio_test, recover
from .types import (
    PADDING_TOKEN_ID,
    STATUS_BAD_ROW,
    STATUS_EMPTY_RESIDUAL,
    DraftRows,
    SamplingRows,
    Uniforms,
    Verdict,
)
from .uniforms import draw_uniforms


def verify(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    uniforms: Uniforms | None,
) -> Verdict:
    """Verify as `verify` in `sampler.py` says. Allocates what it needs.

    Chunk after chunk of places, each for the requests that accepted every draft before it.
    """
    if not len(logits):
        return no_rows(drafts)
    if sampling.all_greedy:
        return verify_greedy(logits, cu_rows, drafts)
    uniforms = uniforms or draw_uniforms(drafts, sampling)
    layout, greedy = Layout.of(len(logits), cu_rows, drafts), greedy_requests(sampling)
    num_places = drafts.token_ids.shape[1] + 1
    step = places_at_once(logits, len(drafts.lengths), num_places)
    going = layout.last.squeeze(1) == 0
    parts: list[Verdict] = []
    for first in range(0, num_places, step):
        chunk = Chunk.of(layout, drafts, first, min(first + step, num_places), going)
        parts.append(_verify(logits, cu_rows, drafts, sampling, uniforms, greedy, chunk))
        going = parts[-1].num_accepted == len(chunk.places)
        if going.device.type == "cpu" and not going.any():
            break
    return parts[0] if step >= num_places else _joined(parts, num_places)


def no_rows(drafts: DraftRows) -> Verdict:
    """The verdict of a batch without a row."""
    num_requests, num_positions = drafts.token_ids.shape
    return Verdict(
        output_ids=drafts.token_ids.new_full((num_requests, num_positions + 1), PADDING_TOKEN_ID),
        num_accepted=torch.zeros_like(drafts.lengths),
        status=torch.zeros_like(drafts.lengths),
    )


def _verify(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    uniforms: Uniforms,
    greedy: Tensor | None,
    chunk: Chunk,
) -> Verdict:
    """The outcome at the chunk's places."""
    distribution, drawn = draw_rows(logits, cu_rows, sampling, uniforms, greedy, chunk.logits_rows)
    tokens = drawn[chunk.rows]  # [B, W]
    accept = tokens == chunk.token_ids
    test = None
    if drafts.distributions is not None and drafts.token_ids.shape[1]:
        prob = distribution.prob_of(chunk.rows, chunk.token_ids)
        test = ratio_test(prob, distribution.vocab_size, chunk, drafts.distributions, greedy, uniforms)
        accept = torch.where(test.applies, test.accept, accept)
    bad = None if distribution.bad is None else distribution.bad[chunk.rows]
    accept = chunk.legal(accept, bad)
    num_accepted = accept.cumprod(1).sum(1)
    emitted = chunk.emitted(num_accepted)
    status = torch.zeros_like(num_accepted) if bad is None else (bad & emitted).any(1) * STATUS_BAD_ROW
    if test is not None:
        recovered = recover(test, distribution, chunk, uniforms, num_accepted)
        tokens = torch.where(accept, chunk.token_ids, tokens)
        at_stop = chunk.stops_at(num_accepted) & recovered.found.unsqueeze(1)
        tokens = torch.where(at_stop, recovered.token_ids.unsqueeze(1), tokens)
        status = status | recovered.empty * STATUS_EMPTY_RESIDUAL
    return Verdict(torch.where(emitted, tokens, PADDING_TOKEN_ID), num_accepted, status)


def _joined(parts: list[Verdict], num_places: int) -> Verdict:
    """Parts side by side, then padding; a request stops in one of them at most."""
    output_ids = torch.cat([part.output_ids for part in parts], 1)
    return Verdict(
        output_ids=pad(output_ids, (0, num_places - output_ids.shape[1]), value=PADDING_TOKEN_ID),
        num_accepted=torch.stack([part.num_accepted for part in parts]).sum(0),
        status=torch.stack([part.status for part in parts]).sum(0),
    )


def greedy_requests(sampling: SamplingRows) -> Tensor | None:
    """The requests that take the maximum, bool [B]; None where the host can tell that there is none."""
    greedy = sampling.temperature <= 0
    return greedy if greedy.device.type != "cpu" or bool(greedy.any()) else None


def draw_rows(
    logits: Tensor,
    cu_rows: Tensor,
    sampling: SamplingRows,
    uniforms: Uniforms,
    greedy: Tensor | None,
    rows: Tensor | None = None,
) -> tuple[RowDistribution, Tensor]:
    """The distribution of each of N rows, and the token that the row's output uniform draws from it, int64 [N]; None:
    all rows.
    """
    numbers = torch.arange(len(logits), device=cu_rows.device) if rows is None else rows
    owner = (torch.searchsorted(cu_rows, numbers, right=True) - 1).clamp_(0, len(cu_rows) - 2)
    place = (numbers - cu_rows[owner]).clamp_(max=uniforms.output.shape[1] - 1)
    drawn_at = uniforms.output[owner, place]
    greedy_rows = None
    if greedy is not None:
        greedy_rows = greedy[owner]
        drawn_at = torch.where(greedy_rows, 0.0, drawn_at)
    filters = None
    if sampling.any_filter:
        filters = FilterRows(sampling.top_k[owner], sampling.top_p[owner], sampling.min_p[owner])
    distribution = row_distribution(logits, scale_of(sampling.temperature)[owner], filters, greedy_rows, rows)
    return distribution, pick(distribution.weights, distribution.cdf, drawn_at).clamp_(max=distribution.vocab_size - 1)


def verify_greedy(logits: Tensor, cu_rows: Tensor, drafts: DraftRows) -> Verdict:
    """A batch in which every request takes the maximum: a comparison of a few numbers per request. Waits for a device.

    In Python on the host some forty operations on tensors of this size are saved, which take several times as long.
    """
    best, bad = best_tokens(logits)
    bounds, num_positions = cu_rows.tolist(), drafts.token_ids.shape[1]
    rows: list[list[int]] = []
    requests = zip(bounds, bounds[1:], drafts.token_ids.tolist(), drafts.lengths.tolist(), strict=False)
    for first, stop, token_ids, length in requests:
        output_ids, status = _greedy_end(best[first:stop], bad[first:stop], token_ids[:length])
        padding = [PADDING_TOKEN_ID] * (num_positions + 1 - len(output_ids))
        rows.append([max(len(output_ids) - 1, 0), status, *output_ids, *padding])
    table = torch.tensor(rows, device=logits.device)
    return Verdict(table[:, 2:], table[:, 0], table[:, 1], on_host=rows)


def _greedy_end(best: list[int], bad: list[bool], drafts: list[int]) -> tuple[list[int], int]:
    """What one request emits, and its status: `best` and `bad` of its rows."""
    stop = 0
    while best and stop < len(drafts) and drafts[stop] == best[stop] and not bad[stop]:
        stop += 1
    return best[: stop + 1], STATUS_BAD_ROW * any(bad[: stop + 1])


def best_tokens(logits: Tensor) -> tuple[list[int], list[bool]]:
    """The first maximum of each row, and whether the row has none because of NaN or +inf."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    maxima, best = first_argmax(values)
    if math.isfinite(maxima.sum().item()):
        return best.tolist(), [False] * len(best)
    values, _, bad = mend(values)
    best = first_argmax(values)[1]
    return best.tolist(), [False] * len(best) if bad is None else bad.tolist()


def first_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """Row maxima [R] of float32 or float64 values and the lowest index that attains each, int64 [R].

    A row with NaN gives NaN. On a CPU by NumPy, which compares many values at once where torch compares one: six rows
    of 4096 took 6 us instead of 16, one of 152k 12 us instead of 92.
    """
    if values.device.type != "cpu":
        maxima, ids = values.max(-1)
        return maxima, ids
    rows = values.numpy()
    best = rows.argmax(-1)
    return torch.from_numpy(rows[np.arange(len(best)), best]), torch.from_numpy(best)
