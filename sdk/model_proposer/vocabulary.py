"""A draft vocabulary that is a part of the target's, and the likeliest of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError


@dataclass(frozen=True)
class DraftVocabulary:
    """The target token of each draft token. A proposer with the target's vocabulary has none of these."""

    target_ids: Tensor  # [D] int64

    @classmethod
    def from_offsets(cls, d2t: Tensor, vocab_size: int) -> DraftVocabulary | None:
        """Read published `d2t` offsets: draft id i is target id i + d2t[i]. None means every token in order.

        Raises CheckpointError SD-E173 if an id lies outside the target's vocabulary or two are the same.
        """
        return cls.from_ids(torch.arange(len(d2t), device=d2t.device) + d2t.to(torch.int64), vocab_size)

    @classmethod
    def from_ids(cls, target_ids: Tensor, vocab_size: int) -> DraftVocabulary | None:
        """Read absolute target ids. None means every token in order. Raises CheckpointError SD-E173."""
        ids = target_ids.to(torch.int64)
        lowest, highest, num_different = int(ids.min()), int(ids.max()), len(set(ids.tolist()))
        if lowest < 0 or highest >= vocab_size or num_different != len(ids):
            facts = {
                "expected": f"{len(ids)} different target ids in 0 .. {vocab_size - 1}",
                "found": f"{num_different} different ids in {lowest} .. {highest}",
                "fix": "use a checkpoint made for this target's vocabulary",
            }
            raise CheckpointError("SD-E173", "the draft checkpoint's vocabulary map does not fit the target", facts)
        if len(ids) == vocab_size and bool((ids == torch.arange(vocab_size, device=ids.device)).all()):
            return None
        return cls(ids)


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
