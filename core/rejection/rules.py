"""How drafts are verified, by the names that a user chooses from."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .lossy import verify_synthetic, verify_typical
from .sampler import verify, verify_block
from .types import DraftRows, SamplingRows, Verdict
from .workspace import Workspace


class VerificationRule(Protocol):
    """Verifies one batch with the random numbers of the request seeds; arguments as of `verify`."""

    def __call__(
        self,
        logits: Tensor,
        cu_rows: Tensor,
        drafts: DraftRows,
        sampling: SamplingRows,
        *,
        workspace: Workspace | None = None,
    ) -> Verdict: ...


LOSSY = frozenset({"typical", "synthetic"})
"""The rules under which what is generated does not follow the target's distribution."""


def rule_of(name: str, rate: float | None = None) -> VerificationRule:
    """The rule of a name: "standard", "block", or one of LOSSY. `rate` is what "synthetic" accepts."""
    match name:
        case "standard":
            return verify
        case "block":
            return verify_block
        case "typical":
            return _typical
        case "synthetic" if rate is not None:
            return partial(_synthetic, rate)
    raise ValueError(f"there is no rule {name!r} with rate {rate}")


def _typical(
    logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, *, workspace: Workspace | None = None
) -> Verdict:
    if not len(logits):  # prompt chunks only
        return verify(logits, cu_rows, drafts, sampling, workspace=workspace)
    return verify_typical(logits, cu_rows, drafts, sampling)


def _synthetic(
    rate: float,
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    *,
    workspace: Workspace | None = None,
) -> Verdict:
    if not len(logits):
        return verify(logits, cu_rows, drafts, sampling, workspace=workspace)
    rates = torch.full((drafts.token_ids.shape[1],), rate, device=logits.device)
    return verify_synthetic(logits, cu_rows, drafts, sampling, rates)
