"""Several proposers in order of preference."""

from __future__ import annotations

import torch
from torch import Tensor

from ..services import Services
from ..types import Draft, DraftDistribution, StepView, TargetInfo
from .combinator import Combinator
from .merge import Piece, merged_draft

NOBODY = -1


class Chain(Combinator):
    """Asks its parts in order. The first part with a draft for a row drafts that row, with its own distribution.

    A chain is lossless with reported distributions if its parts are. The choice of a part depends on the prefix and on
    its distribution, never on a drawn token. All parts observe every step. `num_drafted` and `num_accepted` show each
    part its own drafts only. At `observe` a part sees the budget that it has if no earlier part drafts.
    """

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Construct and bind the parts."""
        super().bind(target, services)
        device = services.device if self.merged.placement == "device" else torch.device("cpu")
        self._drafted_by = torch.full((target.max_num_seqs,), NOBODY, device=device)  # by row: index of the part

    def observe(self, step: StepView) -> None:
        """Show every part the step."""
        author = self._drafted_by[step.slots]
        self._each(lambda part: part.observe(step, step.budget, author))

    def propose(self, step: StepView) -> Draft:
        """Ask each part for the rows that are still without a draft."""
        author = self._drafted_by[step.slots]
        drafted_by = torch.full_like(author, NOBODY)
        missing = step.budget
        pieces: list[Piece] = []
        for part in self.members:
            draft = _moved(part.propose(step, missing, author), step.budget.device)
            used = (draft.lengths > 0) & (missing > 0)
            if used.is_cpu and not bool(used.any()):
                continue
            pieces.append(Piece(draft, used))
            missing = torch.where(used, 0, missing)
            drafted_by = torch.where(used, part.index, drafted_by)
            if missing.is_cpu and not bool(missing.any()):
                break
        self._drafted_by[step.slots] = drafted_by
        return merged_draft(pieces, len(step), self.merged, step.width, step.budget.device)


def _moved(draft: Draft, device: torch.device) -> Draft:
    """A draft of a part on the host, where the others are."""
    if draft.token_ids.device == device:
        return draft
    distribution = draft.distribution
    if distribution is not None:
        moved = {name: value.to(device) for name, value in vars(distribution).items() if isinstance(value, Tensor)}
        distribution = DraftDistribution(**moved, replacement=distribution.replacement)
    return Draft(draft.token_ids.to(device), draft.lengths.to(device), distribution=distribution)
