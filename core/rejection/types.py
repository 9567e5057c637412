"""What verification takes and gives: drafts and their distributions, sampling parameters, uniforms, the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.sdk.distribution_kind import DistributionKind as DistributionKind

PADDING_TOKEN_ID = -1
NO_PROPOSAL = -1
IMPOSSIBLE = -2

STATUS_BAD_ROW = 1
STATUS_EMPTY_RESIDUAL = 4


@dataclass(frozen=True)
class DraftDistributions:
    """The distributions that drafts were drawn from. Only the tensors whose kind occurs are present.

    A reported distribution must be the distribution of the draw: after the drafter's own temperature, filters,
    rounding and vocabulary map. Where it holds a NaN it is no distribution: the draft is rejected and the token
    follows p, with STATUS_EMPTY_RESIDUAL. A draft whose distribution gives it probability 0 was not drawn from it and
    is never accepted. A sparse id that occurs twice has the sum of its probabilities. Entries of rows with another
    kind, and of positions beyond a row's length, are never used.
    """

    kind: Tensor  # [B] uint8, DistributionKind
    draft_probs: Tensor | None = None  # [B, K, Vq]
    draft_logits: Tensor | None = None  # [B, K, Vq]; softmax gives the distribution: temperature and filters are in it
    sparse_ids: Tensor | None = None  # [B, K, M] int64 target ids, -1 padded
    sparse_probs: Tensor | None = None  # [B, K, M]
    t2d: Tensor | None = None  # [V] int64, target id -> draft id or -1; None: draft id d is target id d
    replacement: Tensor | None = None
    """[B] bool: siblings in a tree are drawn from the whole distribution, and may be equal. None: in no row."""


@dataclass(frozen=True)
class DraftRows:
    """Drafts of a batch, as target ids.

    Two sentinels may stand at a position within `lengths`, and they mean different distributions for the token emitted
    there: NO_PROPOSAL, nothing was drawn (the token follows p), and IMPOSSIBLE, something was drawn that can
    never be accepted (the token follows the residual of p and q).
    """

    token_ids: Tensor  # [B, K] int64, padded with -1
    lengths: Tensor  # [B] int64, 0..K
    distributions: DraftDistributions | None = None  # None: every row is one-hot
    parents: Tensor | None = None
    """[B, K] int64, the earlier node that each node hangs from, or -1 for the newest token. Distributions are then by
    place: row j is what the tokens after place j were drawn from. None: chains."""


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters per request."""

    temperature: Tensor  # [B] float32; <= 0: greedy
    top_k: Tensor  # [B] int64; 0: off
    top_p: Tensor  # [B] float32; 1: off
    min_p: Tensor  # [B] float32; 0: off
    seed: Tensor  # [B] int64
    position: Tensor  # [B] int64, absolute index of the token that the request's first logits row emits
    all_greedy: bool  # host facts: they skip work and never change a result
    any_filter: bool


@dataclass(frozen=True)
class Uniforms:
    """Explicit uniforms in (0, 1) instead of those of the request seeds, for proofs and for streams of one's own."""

    output: Tensor  # [B, K + 1] float64: draws the token of row i where the request stops there
    accept: Tensor | None = None  # [B, K] float64: verifies draft i against its distribution; None: no row needs it


@dataclass(frozen=True)
class Verdict:
    """The outcome of one step."""

    output_ids: Tensor  # [B, K + 1] int64, -1 padded: accepted drafts, then one recovered or bonus token
    num_accepted: Tensor  # [B] int64, 0..lengths
    status: Tensor  # [B] int64, bits STATUS_BAD_ROW and STATUS_EMPTY_RESIDUAL
    on_host: Sequence[list[int]] | None = None  # the same: num_accepted, status, *output_ids of each request
    path: Tensor | None = None  # [B, K + 1] int64, the places that emitted, -1 padded. None: of chains, 0, 1, ...
