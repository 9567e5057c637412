"""Verification of a batch in which every request takes the maximum: a comparison of a few numbers per request.

It is done where the numbers are few and cheap to look at, in Python on the host: the same as some forty operations on
tensors of this size takes several times as long.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.pick import first_argmax
from ..kernels.row_distribution import compute_dtype, mend
from .types import NO_PROPOSAL, PADDING_TOKEN_ID, STATUS_BAD_ROW, DraftRows, StopReason, Verdict


def verify_greedy(logits: Tensor, cu_rows: Tensor, drafts: DraftRows) -> Verdict:
    """See `verify` in `sampler.py`. Waits for a device."""
    best, bad = _best_tokens(logits)
    bounds = cu_rows.tolist()
    ends = [
        _end_of(best[first:stop], bad[first:stop], token_ids[:length])
        for first, stop, token_ids, length in zip(
            bounds, bounds[1:], drafts.token_ids.tolist(), drafts.lengths.tolist(), strict=False
        )
    ]
    width = drafts.token_ids.shape[1] + 1
    rows = [[*end.facts, *end.output_ids, *[PADDING_TOKEN_ID] * (width - len(end.output_ids))] for end in ends]
    table = torch.tensor(rows, device=logits.device)
    stop_reason = torch.tensor([end.stop_reason for end in ends], dtype=torch.uint8, device=logits.device)
    return Verdict(table[:, 2:], table[:, 0], table[:, 1], stop_reason, on_host=rows)


class _End(NamedTuple):
    output_ids: list[int]
    status: int
    stop_reason: StopReason

    @property
    def facts(self) -> tuple[int, int]:
        """num_accepted, status."""
        return max(len(self.output_ids) - 1, 0), self.status


def _end_of(best: list[int], bad: list[bool], drafts: list[int]) -> _End:
    """Where one request stops: `best` and `bad` of its rows."""
    if not best:
        return _End([], 0, StopReason.NO_ROWS)
    matches = zip(best, bad, drafts, strict=False)
    stop = next((i for i, (token, is_bad, draft) in enumerate(matches) if token != draft or is_bad), len(drafts))
    reason = StopReason.BONUS
    if stop < len(drafts):
        reason = StopReason.NO_PROPOSAL if drafts[stop] == NO_PROPOSAL else StopReason.REJECTED
    return _End(best[: stop + 1], STATUS_BAD_ROW * any(bad[: stop + 1]), reason)


def _best_tokens(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Of each row: its first maximum, and whether it has none because of NaN or +inf."""
    values = logits.to(compute_dtype(logits))
    maxima, best = first_argmax(values)
    if math.isfinite(maxima.sum().item()):
        return best.tolist(), [False] * len(best)
    values, _, bad = mend(values)
    best = first_argmax(values)[1]
    return best.tolist(), [False] * len(best) if bad is None else bad.tolist()
