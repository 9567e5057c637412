"""Which logits row belongs to which place of the padded batch, of all places or of some neighbouring ones.

Some are verified at once: what is read before it is known which requests go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .types import NO_PROPOSAL, DraftRows

LOGITS_AT_ONCE = 1 << 19  # to read fewer saves less than the calls cost


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


def places_at_once(logits: Tensor, num_requests: int, num_places: int) -> int:
    """How many places to read before looking who stopped; all of them on a device, which looking would stall."""
    if logits.device.type != "cpu":
        return num_places
    return max(1, LOGITS_AT_ONCE // max(1, num_requests * logits.shape[1]))


@dataclass(frozen=True)
class Chunk:
    """W places of the requests that are still going, and the logits rows that they need."""

    places: Tensor  # [W] first, first + 1, ...
    going: Tensor  # [B] bool
    token_ids: Tensor  # [B, W] drafts, NO_PROPOSAL where there is none
    has_draft: Tensor  # [B, W] bool, the place is within the request's draft length
    logits_rows: Tensor | None  # [N] the rows to read, rising; None: all of them
    rows: Tensor  # [B, W] the position of each place among the rows to read; any where there is none

    @classmethod
    def of(cls, layout: Layout, drafts: DraftRows, first: int, end: int, going: Tensor) -> Chunk:
        places = layout.offsets[first:end]
        has_draft = pad(layout.has_draft, (0, 1))[:, first:end]
        token_ids = pad(drafts.token_ids, (0, 1), value=NO_PROPOSAL)[:, first:end]
        logits_rows, rows = None, layout.rows[:, first:end]
        if len(places) < layout.rows.shape[1]:
            needed = going.unsqueeze(1) & (places <= drafts.lengths.unsqueeze(1))
            logits_rows = rows[needed]
            rows = (needed.flatten().cumsum(0) - 1).clamp_(min=0).view(needed.shape)
        return cls(places, going, token_ids.where(has_draft, NO_PROPOSAL), has_draft, logits_rows, rows)

    def drafts_to_verify(self, num_drafts: int) -> Tensor:
        """Which of all drafts, bool [B, K], are verified in this chunk."""
        verified = torch.zeros(len(self.going), num_drafts + 1, dtype=torch.bool, device=self.going.device)
        verified[:, self.places] = self.has_draft & self.going.unsqueeze(1)
        return verified[:, :num_drafts]

    def legal(self, accept: Tensor, bad: Tensor | None) -> Tensor:
        """accept [B, W] without the places that hold no draft, or whose row is bad, bool [B, W]."""
        accept = accept & self.has_draft & self.going.unsqueeze(1)
        return accept if bad is None else accept & ~bad

    def emitted(self, num_accepted: Tensor) -> Tensor:
        """The places that emit a token, bool [B, W], where the first num_accepted [B] drafts of each are accepted."""
        return self.going.unsqueeze(1) & (self._steps() <= num_accepted.unsqueeze(1))

    def stops_at(self, num_accepted: Tensor) -> Tensor:
        """The place where each request stops, bool [B, W]; none of a request that goes on beyond the chunk."""
        return self.going.unsqueeze(1) & (self._steps() == num_accepted.unsqueeze(1))

    def _steps(self) -> Tensor:
        return self.places - self.places[0]
