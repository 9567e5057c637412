"""What the grammars of requests allow at each place of their drafts, for networks that draw under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..extensions import GrammarServices
from ..types import StepView
from .vocabulary import DraftVocabulary


@dataclass(frozen=True)
class DraftMasks:
    """The grammars of the requests that are drafted for. They are asked on the host, once for each drawn token."""

    services: GrammarServices
    request_ids: Sequence[str]  # [b]

    @classmethod
    def of(cls, services: GrammarServices, step: StepView, chosen: Tensor | None) -> DraftMasks | None:
        """Take those of the places `chosen` [b] of a step. Returns None where none of the requests has a grammar.

        chosen: None means all places.
        """
        names = step.request_ids if chosen is None else [step.request_ids[place] for place in chosen.tolist()]
        return cls(services, names) if any(services.allowed(each) is not None for each in names) else None

    def masked(self, logits: Tensor, drawn: Sequence[Tensor], vocabulary: DraftVocabulary | None) -> Tensor:
        """Logits [b, D] with -inf for what may not follow. A row stays if nothing that it can draw may.

        drawn: the tokens drawn before, each [b].
        """
        suffixes = torch.stack([*drawn], dim=1).tolist() if drawn else [()] * len(logits)
        barred = torch.zeros(logits.shape, dtype=torch.bool)
        columns = slice(None) if vocabulary is None else vocabulary.target_ids.cpu()
        for row, request_id, suffix in zip(barred, self.request_ids, suffixes, strict=True):
            allowed = self.services.allowed(request_id, suffix)
            if allowed is not None:
                torch.logical_not(allowed[columns], out=row)
        left = logits.masked_fill(barred.to(logits.device), -torch.inf)
        return torch.where((left == -torch.inf).all(-1, keepdim=True), logits, left)
