"""Which logits row belongs to which place of the padded batch, and what follows from that alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .types import NO_PROPOSAL, STATUS_BAD_ROW, DraftRows, StopReason


@dataclass(frozen=True)
class Layout:
    """Places [B, K + 1] of a batch. Place i of a request is the logits row after its first i drafts."""

    rows: Tensor  # [B, K + 1] logits row of each place, clamped where a request has fewer rows
    offsets: Tensor  # [K + 1] 0..K
    has_draft: Tensor  # [B, K] bool, the place is within the request's draft length
    last: Tensor  # [B, 1] 0 where the request has rows, -1 where it has none

    @classmethod
    def of(cls, num_rows: int, cu_rows: Tensor, drafts: DraftRows) -> Layout:
        offsets = torch.arange(drafts.token_ids.shape[1] + 1, device=cu_rows.device)
        starts = cu_rows[:-1].unsqueeze(1)
        return cls(
            rows=(starts + offsets).clamp_(max=num_rows - 1),
            offsets=offsets,
            has_draft=offsets[:-1] < drafts.lengths.unsqueeze(1),
            last=(cu_rows[1:].unsqueeze(1) > starts).long() - 1,
        )

    def legal(self, accept: Tensor, bad: Tensor | None) -> Tensor:
        """accept [B, K] without the places that hold no draft or whose row is bad."""
        accept = accept & self.has_draft
        return accept if bad is None else accept & ~bad[self.rows[:, :-1]]

    def emitted(self, num_accepted: Tensor) -> Tensor:
        """The places that emit a token, bool [B, K + 1]: up to the stop, none for a request without rows."""
        return self.offsets <= num_accepted.unsqueeze(1) + self.last

    def status(self, emitted: Tensor, bad: Tensor | None) -> Tensor:
        """STATUS_BAD_ROW for each request that emits a token of a bad row, int64 [B]."""
        if bad is None:
            return self.last.new_zeros(len(self.last))
        return (bad[self.rows] & emitted).any(1) * STATUS_BAD_ROW

    def stop_reason(self, drafts: DraftRows, num_accepted: Tensor) -> Tensor:
        """Why each request stops where it does, uint8 [B]."""
        at_stop = pad(drafts.token_ids, (0, 1)).gather(1, num_accepted.unsqueeze(1))
        reason = torch.where(at_stop == NO_PROPOSAL, StopReason.NO_PROPOSAL, StopReason.REJECTED).to(torch.uint8)
        reason.masked_fill_((num_accepted == drafts.lengths).unsqueeze(1), StopReason.BONUS)
        return reason.masked_fill_(self.last < 0, StopReason.NO_ROWS).squeeze(1)
