"""Drafts that were made on a device and that the host has not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.core.host import TakenDrafts, rejection


@dataclass(frozen=True)
class UnreadDrafts:
    """Drafts that stay on the device, of P of a step's requests: those that may have drafts."""

    request_ids: Sequence[str]  # [P]
    places: Tensor  # [P] int64, where in the step's batch each request stands
    token_ids: Tensor  # [P, K] int64, negative where there is no draft that can be verified
    numbers: Tensor  # [P, 3 + K] int64, what the host reads of them with its next read
    distributions: rejection.DraftDistributions | None  # of the P requests. None: every draft is one-hot
    taken: TakenDrafts
