"""How drafts are verified, by the names that a user chooses from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .lossy import verify_synthetic, verify_typical
from .sampler import verify, verify_block
from .types import DraftRows, SamplingRows, Verdict
from .workspace import Workspace


class Judge(Protocol):
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


@dataclass(frozen=True)
class Rule:
    """A way to verify drafts, and whether what is generated then follows the target's law."""

    judge: Judge
    lossless: bool


def rule_of(name: str, rate: float | None = None) -> Rule:
    """ "standard" and "block" are lossless, "typical" and "synthetic" are not; `rate` is what "synthetic" accepts."""
    match name:
        case "standard":
            return Rule(verify, lossless=True)
        case "block":
            return Rule(verify_block, lossless=True)
        case "typical":
            return Rule(_typical, lossless=False)
        case "synthetic" if rate is not None:
            return Rule(partial(_synthetic, rate), lossless=False)
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
