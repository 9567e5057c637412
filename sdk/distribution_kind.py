"""What verification shares with the contract: it imports this, and no more of it."""

from __future__ import annotations

from enum import IntEnum


class DistributionKind(IntEnum):
    """The form in which a row's draft distribution is reported. The values are part of the contract."""

    ONE_HOT = 0
    DENSE_PROBS = 1
    DENSE_LOGITS = 2
    SPARSE = 3
