"""Several proposers in order of preference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..services import Services
from ..types import Draft, DraftDistribution, StepView, TargetInfo
from .combinator import Combinator
from .merge import Piece, merged_draft
from .part import Part

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
        num_slots, device = target.max_num_seqs, services.device
        waits = self.merged.placement == "host" or device.type == "cpu"
        self._authors = _HostAuthors(num_slots) if waits else _DeviceAuthors(num_slots, device)

    def observe(self, step: StepView) -> None:
        """Show every part the step."""
        author = self._authors.of(step)
        self._each(lambda part: part.observe(step, step.budget, author))

    def propose(self, step: StepView) -> Draft:
        """Ask each part for the rows that are still without a draft."""
        pieces = self._authors.ask(self.members, step)
        return merged_draft(pieces, len(step), self.merged, step.width, step.budget.device)


class _HostAuthors:
    """Which part drafted each slot's last draft, as lists: small tensors cost a host more than most parts do."""

    def __init__(self, num_slots: int) -> None:
        self._by_slot = [NOBODY] * num_slots

    def of(self, step: StepView) -> Sequence[int]:
        """[B], the index of a part, or NOBODY."""
        return [self._by_slot[slot] for slot in step.slots.tolist()]

    def ask(self, parts: Sequence[Part], step: StepView) -> list[Piece]:
        """Each part's draft for the rows that those before it left, until none is left."""
        budget, missing, pieces = step.budget, step.budget.tolist(), []
        before, slots = self.of(step), step.slots.tolist()
        for slot in slots:
            self._by_slot[slot] = NOBODY
        for part in parts:
            draft = part.propose(step, budget, before)
            used = [n > 0 and most > 0 for n, most in zip(draft.lengths.tolist(), missing, strict=True)]
            if any(used) or part is parts[-1]:
                pieces.append(Piece(draft, used))
            for place, slot in enumerate(slots):
                if used[place]:
                    self._by_slot[slot], missing[place] = part.index, 0
            if not any(missing):
                break
            if any(used):
                budget = torch.tensor(missing)
        return pieces


class _DeviceAuthors:
    """The same on a device, where nobody waits for what was drafted."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._by_slot = torch.full((num_slots,), NOBODY, device=device)

    def of(self, step: StepView) -> Tensor:
        """[B], the index of a part, or NOBODY."""
        return self._by_slot[step.slots]

    def ask(self, parts: Sequence[Part], step: StepView) -> list[Piece]:
        """Each part's draft for the rows that those before it left."""
        budget, before, pieces = step.budget, self.of(step), []
        author = torch.full_like(before, NOBODY)
        for part in parts:
            draft = _moved(part.propose(step, budget, before), budget.device)
            used = (draft.lengths > 0) & (budget > 0)
            pieces.append(Piece(draft, used))
            budget, author = torch.where(used, 0, budget), torch.where(used, part.index, author)
        self._by_slot[step.slots] = author
        return pieces


def _moved(draft: Draft, device: torch.device) -> Draft:
    """A draft of a part on the host, where the others are."""
    if draft.token_ids.device == device:
        return draft
    distribution = draft.distribution
    if distribution is not None:
        moved = {name: value.to(device) for name, value in vars(distribution).items() if isinstance(value, Tensor)}
        distribution = DraftDistribution(**moved, replacement=distribution.replacement)
    return Draft(draft.token_ids.to(device), draft.lengths.to(device), distribution=distribution)
