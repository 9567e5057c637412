"""Drafts as long as a request's own acceptance makes worth while."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..config import StrictModel
from ..services import Services
from ..types import Draft, StepView, TargetInfo
from .combinator import Combinator
from .merge import Piece, merged_draft

_MOST_RATE = 1 - 2.0**-53
"""The largest float64 below 1."""


class LengthPolicy(StrictModel, ABC):
    """Chooses the length of the next drafts from the outcome of earlier ones. Its fields are options of the user."""

    memory: float = Field(
        default=0.8, ge=0, lt=1, description="the weight of a verification, relative to the one after it"
    )

    @abstractmethod
    def lengths(self, num_accepted: Tensor, num_tested: Tensor, num_draft_tokens: int) -> Tensor:
        """The lengths [B] int64 of the next drafts. A length below 1 counts as 1.

        num_accepted: the row's accepted draft tokens, [B] float32.
        num_tested: the row's draft tokens that were accepted or the first to be rejected, [B] float32. Each
            verification counts `memory` times as much as the one after it.
        num_draft_tokens: the most drafts of a row.
        """


class AcceptanceThreshold(LengthPolicy):
    """Drafts the most tokens that are all accepted with a probability of at least `threshold`."""

    threshold: float = Field(
        default=0.3, gt=0, lt=1, description="the least probability that a draft's last token is accepted"
    )
    expected_rate: float = Field(default=0.8, gt=0, lt=1, description="the acceptance rate of a new row")
    expected_weight: float = Field(
        default=4.0, gt=0, le=1e6, description="how many tested tokens the expected rate counts for"
    )

    def lengths(self, num_accepted: Tensor, num_tested: Tensor, num_draft_tokens: int) -> Tensor:
        """The largest n with rate ** n >= threshold."""
        weight = self.expected_weight
        rate = (num_accepted.double() + weight * self.expected_rate) / (num_tested.double() + weight)
        longest = math.log(self.threshold) / rate.clamp(max=_MOST_RATE).log()  # the rate is below 1 until it is rounded
        return longest.clamp(max=num_draft_tokens).long()


class Adaptive(Combinator):
    """Cuts the budget of its one part, row by row, to the length that its `Policy` chooses.

    The outcome of earlier steps decides a length before anything is drawn. So the rule for reported distributions
    holds: a length depends on the prefix, never on the drawn token. No time goes into drafts that would be cut off.
    Every row drafts at least one token, or its acceptance would never be measured again. A request that is preempted
    starts anew. Where all rows must draft the same number, the longest length counts.
    """

    Policy: ClassVar[type[LengthPolicy]] = AcceptanceThreshold

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if len(cls.parts) > 1:
            raise TypeError(f"{cls.__name__} has {len(cls.parts)} parts and adapts exactly one; that may be a chain")
        super().__init_subclass__(**kwargs)

    @classmethod
    def own_options(cls) -> dict[str, Any]:
        """`policy`: the fields of `Policy`."""
        return {"policy": (cls.Policy, Field(default_factory=cls.Policy))}

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Construct and bind the part."""
        super().bind(target, services)
        device = services.device if self.merged.placement == "device" else torch.device("cpu")
        self._policy: LengthPolicy = dict(self.config.options or self.Options())["policy"]
        self._accepted, self._tested = torch.zeros(2, target.max_num_seqs, dtype=torch.float32, device=device)  # by row
        self._generation = torch.full((target.max_num_seqs,), -1, device=device)

    def observe(self, step: StepView) -> None:
        """Count what was accepted, and show the part the step."""
        self._count(step)
        self._each(lambda part: part.observe(step, self._budget(step)))

    def propose(self, step: StepView) -> Draft:
        """The part's draft within the policy's lengths."""
        (part,) = self.members
        draft = part.propose(step, self._budget(step))
        whole = Piece(draft, torch.ones_like(draft.lengths, dtype=torch.bool))
        return merged_draft([whole], len(step), self.merged, step.width, step.budget.device)

    def _count(self, step: StepView) -> None:
        rows = step.slots
        known = self._generation[rows] == step.generation
        tested = step.num_accepted + (step.num_accepted < step.num_drafted)
        weight = torch.where(step.num_drafted > 0, self._policy.memory, torch.ones_like(self._accepted[rows]))
        for total, new in ((self._accepted, step.num_accepted), (self._tested, tested)):
            total[rows] = torch.where(known, total[rows], 0.0) * weight + new
        self._generation[rows] = step.generation

    def _budget(self, step: StepView) -> Tensor:
        (part,) = self.members
        rows = step.slots
        lengths = _checked(self._policy, self._accepted[rows], self._tested[rows], part.num_draft_tokens)
        lengths = lengths.clamp(min=max(part.needs.min_draft_tokens, 1))
        return torch.minimum(step.budget, lengths)


def _checked(policy: LengthPolicy, num_accepted: Tensor, num_tested: Tensor, num_draft_tokens: int) -> Tensor:
    """What the policy's `lengths` returns. Raises TypeError, which names the policy, for anything but [B] int64."""
    lengths: object = policy.lengths(num_accepted, num_tested, num_draft_tokens)
    if isinstance(lengths, Tensor) and lengths.dtype == torch.int64 and lengths.shape == num_accepted.shape:
        return lengths
    found = f"{list(lengths.shape)} {lengths.dtype}" if isinstance(lengths, Tensor) else f"{lengths!r:.80}"
    expected = f"a tensor {list(num_accepted.shape)} torch.int64"
    raise TypeError(f"its policy {type(policy).__name__} returned {found} from lengths, expected {expected}")
