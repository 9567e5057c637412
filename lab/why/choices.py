"""What a proposer thought of each draft position, read from the distributions that it reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.rejection.types import DistributionKind, DraftDistributions, DraftRows

from ..recording import RecordedRequest
from .trace import Choices

NUM_CHOICES = 3
PROBE_TEMPERATURES = (1.0, 0.25, 0.0625)
"""At which a drafter that reports distributions is asked what it would draw from.

At 1 it says all of it, and often drafts something else than its likeliest tokens, so that its next steps begin
elsewhere. Near 0 it drafts almost as a greedy one, and says little of what it did not draft.
"""


class ChoicesListener:
    """Keeps the likeliest tokens of every reported distribution that verification reached, by where it stands.

    All drafts before a place that is reached were accepted. So the place says what was drafted before it, and another
    run with a step that begins there finds what it would have been told.
    """

    def __init__(self, temperature: float | None) -> None:
        """`temperature`: of the probe. None means that the distributions are those of the run itself."""
        self._exact = temperature in (None, 1.0)
        self.found: dict[tuple[str, int, int], Choices] = {}  # by request, output length at the step, draft position

    def __call__(self, drafts: DraftRows, rows: Sequence[tuple[RecordedRequest, int]], reached: Sequence[int]) -> None:
        """Keep what one step reports. rows: each request, and its number of output tokens."""
        if drafts.distributions is None:
            return
        for index, ((request, start), length) in enumerate(zip(rows, drafts.lengths.tolist(), strict=True)):
            for place in range(min(length, reached[index])):
                choices = _choices(drafts.distributions, index, place, exact=self._exact)
                if choices is not None:
                    self.found[request.request_id, start, place] = choices


def _choices(found: DraftDistributions, index: int, place: int, *, exact: bool) -> Choices | None:
    """The likeliest tokens of the draft distribution at a place. None for a one-hot row."""
    kind = int(found.kind[index])
    if kind == DistributionKind.SPARSE and found.sparse_ids is not None and found.sparse_probs is not None:
        probs, ids = found.sparse_probs[index, place], found.sparse_ids[index, place]
        return _likeliest(probs.masked_fill(ids < 0, 0), ids, exact)
    if kind == DistributionKind.DENSE_LOGITS and found.draft_logits is not None:
        probs = found.draft_logits[index, place].double().softmax(-1)
    elif kind == DistributionKind.DENSE_PROBS and found.draft_probs is not None:
        probs = found.draft_probs[index, place]
    else:
        return None
    return _likeliest(probs, _target_ids(found.t2d, len(probs), probs.device), exact)


def _target_ids(t2d: Tensor | None, width: int, device: torch.device) -> Tensor:
    """The target id of each draft id."""
    ids = torch.arange(width, device=device)
    if t2d is None:
        return ids
    known = (t2d >= 0).nonzero()[:, 0]
    return ids.index_copy(0, t2d[known], known)


def _likeliest(probs: Tensor, ids: Tensor, exact: bool) -> Choices:
    top = probs.topk(min(NUM_CHOICES, len(probs)))
    kept = {int(ids[place]): float(value) for value, place in zip(*top, strict=True) if value > 0}
    return Choices(tuple(kept), tuple(kept.values()) if exact else None)
