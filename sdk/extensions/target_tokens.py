"""The target's most likely tokens, and what it computed after drafts that were rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from ..config import Extension

if TYPE_CHECKING:
    from torch import Tensor


class TargetTokens(Extension):
    """The target's most likely tokens: `KeptTokens.top_ids` and `top_logprobs`, `StepView.rejected`."""

    name: ClassVar[str] = "target_tokens"
    version: ClassVar[int] = 1

    top_k: int = Field(ge=1, description="how many of them are shown after each position")
    rejected: bool = Field(default=False, description="shows rejected drafts too, with what the target computed there")

    def united(self, other: Self) -> Self:
        """Show as many tokens as the greater of the two reads."""
        return self.replace(top_k=max(self.top_k, other.top_k), rejected=self.rejected or other.rejected)


@dataclass(frozen=True, kw_only=True)
class RejectedTokens:
    """Drafts that verification rejected, and what the target computed after each of them.

    Of a tree they are the nodes beside the accepted path, those at its end first. Positions follow the depth.

    Request b of the step owns `num_rejected[b]` entries from `start[b]` on. In the host form these are all entries. The
    device form has the tensors of `KeptTokens`, where rejected entries follow the kept ones.
    """

    start: Tensor  # [B] int64
    num_rejected: Tensor  # [B] int64
    positions: Tensor  # [N] int64
    token_ids: Tensor  # [N] int64
    top_ids: Tensor  # [N, m] int64, see `KeptTokens.top_ids`
    top_logprobs: Tensor  # [N, m] float32
