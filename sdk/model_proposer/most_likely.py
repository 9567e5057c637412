"""The largest logits of each row, as token ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .vocabulary import DraftVocabulary


def most_likely(logits: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """Target ids [...] of the largest logits [..., D]."""
    return target_ids(largest(logits), vocabulary)


def target_ids(ids: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """Draft ids as the target's."""
    return ids if vocabulary is None else vocabulary.target_ids[ids]


def largest(logits: Tensor) -> Tensor:
    """Places [...] of the largest logits [..., D]."""
    return ARGMAX.get(logits.device.type, _argmax)(logits)


def _argmax(values: Tensor) -> Tensor:
    return values.argmax(dim=-1)


def _argmax_on_cpu(values: Tensor) -> Tensor:
    """Compare by NumPy, many values at once: a row of 152k in bfloat16 took 23 us instead of 550."""
    return torch.as_tensor(values.detach().float().numpy().argmax(-1))


ARGMAX: dict[str, Callable[[Tensor], Tensor]] = {"cpu": _argmax_on_cpu}
"""Places [...] of the largest values [..., D] of each row, for types of device that torch's own way does not suit."""
