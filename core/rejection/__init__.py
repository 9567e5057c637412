"""Lossless verification of drafts: `verify`, `verify_block`, `sample`; and their types."""

from .sampler import VerificationRule, plan, sample, verify, verify_block
from .types import (
    IMPOSSIBLE,
    NO_PROPOSAL,
    PADDING_TOKEN_ID,
    STATUS_BAD_ROW,
    STATUS_EMPTY_RESIDUAL,
    DistributionKind,
    DraftDistributions,
    DraftRows,
    SamplingRows,
    StopReason,
    Uniforms,
    Verdict,
)

__all__ = [
    "IMPOSSIBLE",
    "NO_PROPOSAL",
    "PADDING_TOKEN_ID",
    "STATUS_BAD_ROW",
    "STATUS_EMPTY_RESIDUAL",
    "DistributionKind",
    "DraftDistributions",
    "DraftRows",
    "SamplingRows",
    "StopReason",
    "Uniforms",
    "Verdict",
    "VerificationRule",
    "plan",
    "sample",
    "verify",
    "verify_block",
]
