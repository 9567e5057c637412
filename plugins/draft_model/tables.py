"""Target ids as a draft model reads them, and its logits as the target's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .vocabularies import Vocabularies, draft_ids_of_target


class PaddedTable:
    """Ids are the same, and the models may be padded to different sizes."""

    def __init__(self, own_size: int, target_size: int) -> None:
        self._num_rows, self._size = own_size, min(own_size, target_size)
        self._missing = target_size - self._size

    def inputs(self, token_ids: Tensor) -> Tensor:
        """The draft model's ids [M] of target ids [M]. A mask may be an id that the target lacks."""
        return token_ids.clamp(max=self._num_rows - 1)

    def logits(self, logits: Tensor) -> Tensor:
        """Logits [b, V] of [b, D]. Ids that only one of the two vocabularies is padded with are never drafted."""
        logits = logits[:, : self._size]
        return pad(logits, (0, self._missing), value=-torch.inf) if self._missing else logits


class SharedTable:
    """Tokens that both have. The draft distribution is the softmax over these alone."""

    def __init__(self, vocabularies: Vocabularies, own_size: int, target_size: int, device: torch.device) -> None:
        own, target = zip(*vocabularies.shared, strict=True)
        self._own, self._target = (torch.tensor(ids, device=device) for ids in (own, target))
        self._inputs = torch.tensor(draft_ids_of_target(vocabularies, own_size, target_size), device=device)
        self._target_size = target_size

    def inputs(self, token_ids: Tensor) -> Tensor:
        """The draft model's ids [M] of target ids [M]."""
        return self._inputs[token_ids]

    def logits(self, logits: Tensor) -> Tensor:
        """Logits [b, V] of [b, D]: -inf where the draft model has no such token."""
        nothing = logits.new_full((logits.shape[0], self._target_size), -torch.inf)
        return nothing.index_copy(1, self._target, logits[:, self._own])
