"""Lossless verification of drafts: `verify` and `sample`, their types, the specification and its proof."""

from .sampler import sample, verify
from .types import (
    IMPOSSIBLE,
    NO_PROPOSAL,
    PADDING_TOKEN_ID,
    STATUS_BAD_ROW,
    STATUS_EMPTY_RESIDUAL,
    Coins,
    DraftLaws,
    DraftRows,
    LawKind,
    SamplingRows,
    Verdict,
)

__all__ = [
    "IMPOSSIBLE",
    "NO_PROPOSAL",
    "PADDING_TOKEN_ID",
    "STATUS_BAD_ROW",
    "STATUS_EMPTY_RESIDUAL",
    "Coins",
    "DraftLaws",
    "DraftRows",
    "LawKind",
    "SamplingRows",
    "Verdict",
    "sample",
    "verify",
]
