"""A decoding step's kept tokens as a rectangle: the pass over them has one of two shapes, and can be captured."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import StepView


def width_of(step: StepView) -> int | None:
    """1 or K + 1: the entries per request that hold the step's kept tokens.

    None means that they do not fit, or that a pass may not be padded.
    """
    most = step.kept.most_tokens
    if most is None or most > step.width + 1:
        return None
    return 1 if most == 1 else step.width + 1


def per_request(step: StepView, width: int, *columns: Tensor) -> list[Tensor]:
    """Each column [N, ...] of the kept tokens as [B, width, ...].

    Entries behind a request's own have any content. Do not use them, as in rejected rows.
    """
    kept, count = step.kept, len(step)
    if len(kept.positions) == count * width:
        return [column.view(count, width, *column.shape[1:]) for column in columns]
    offsets = torch.arange(width, device=kept.token_offsets.device)
    entries = (kept.token_offsets[:-1, None] + offsets).clamp(max=len(kept.positions) - 1)
    return [column[entries] for column in columns]
