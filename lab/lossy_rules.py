"""Verification rules that do NOT keep the target's distribution, for comparisons and benchmarks.

They are offered by name, and nothing chooses them but a user who writes it down. They use no draft distribution: the
token of the stop is drawn from p.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.kernels.philox import Stream, uniform
from specdec.core.rejection.layout import Chunk, Layout
from specdec.core.rejection.sampler import VerificationRule, verify
from specdec.core.rejection.torch_backend import draw_rows, greedy_requests
from specdec.core.rejection.types import (
    NO_PROPOSAL,
    PADDING_TOKEN_ID,
    STATUS_BAD_ROW,
    DraftRows,
    SamplingRows,
    Verdict,
)
from specdec.core.rejection.uniforms import draw_uniforms


def typical(config: SpeculativeConfig) -> VerificationRule:
    """The rule "typical": see `verify_typical`."""
    return partial(_of_chains, verify_typical)


def synthetic(config: SpeculativeConfig) -> VerificationRule:
    """The rule "synthetic", which accepts drafts at the configuration's rate: see `verify_synthetic`."""
    return partial(_of_chains, partial(verify_synthetic, rates=torch.tensor(config.synthetic_acceptance_rate)))


def _of_chains(
    rule: Callable[..., Verdict],
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    *,
    workspace: object | None = None,
) -> Verdict:
    """A rule for chains alone. A step of prompt chunks only has no row for it."""
    if drafts.parents is not None:
        raise ValueError("a lossy rule verifies no trees")
    if not len(logits):
        return verify(logits, cu_rows, drafts, sampling, workspace=workspace)
    return rule(logits, cu_rows, drafts, sampling)


def verify_typical(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Verdict:
    """Accept a draft that is likely enough: p(x) > min(epsilon, delta exp(-H(p))). Lossy.

    Typical acceptance, Cai et al., arXiv 2401.10774. A greedy request accepts its argmax only.
    """
    rows = _Rows(logits, cu_rows, drafts, sampling)
    p = (rows.distribution.weights.flatten(1).double() / rows.distribution.mass)[:, : rows.distribution.vocab_size]
    entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(1)
    of_drafts = rows.places.rows[:, :-1]
    bar = (delta * (-entropy).exp()).clamp(max=epsilon)[of_drafts]
    return rows.verdict(rows.distribution.prob_of(of_drafts, drafts.token_ids) > bar)


def verify_synthetic(
    logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, rates: Tensor
) -> Verdict:
    """Accept draft i with probability rates[i], whatever it is; rates float [K] or []. Lossy.

    A greedy request accepts its argmax only. An id outside the vocabulary is never accepted, nor one that is barred, as
    by a grammar: its logit is -inf.
    """
    rows = _Rows(logits, cu_rows, drafts, sampling)
    positions = sampling.position.unsqueeze(1) + torch.arange(drafts.token_ids.shape[1], device=logits.device)
    uniforms = uniform(sampling.seed.unsqueeze(1), positions, Stream.TYPICAL)
    known = (drafts.token_ids >= 0) & (drafts.token_ids < logits.shape[1])
    possible = logits[rows.places.rows[:, :-1], drafts.token_ids.where(known, 0)] > -torch.inf
    return rows.verdict((uniforms < rates.double()) & known & possible)


class _Rows:
    """What both rules need: p, and a token of it for every row."""

    def __init__(self, logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows) -> None:
        layout = Layout.of(len(logits), cu_rows, drafts)
        self.places = Chunk.of(layout, drafts, 0, len(layout.offsets), layout.last.squeeze(1) == 0)
        self.greedy = greedy_requests(sampling)
        self.distribution, drawn = draw_rows(logits, cu_rows, sampling, draw_uniforms(drafts, sampling), self.greedy)
        self.tokens = drawn[self.places.rows]  # [B, K + 1]

    def verdict(self, accept: Tensor) -> Verdict:
        """The verdict of a rule that accepts [B, K]; greedy requests always take their argmax."""
        drafted, accept = self.places.token_ids, pad(accept, (0, 1))
        if self.greedy is not None:
            accept = torch.where(self.greedy.unsqueeze(1), self.tokens == drafted, accept)
        bad = torch.zeros_like(accept) if self.distribution.bad is None else self.distribution.bad[self.places.rows]
        accept = self.places.legal(accept & (drafted != NO_PROPOSAL), bad)
        num_accepted = accept.cumprod(1).sum(1)
        emitted = self.places.emitted(num_accepted)
        return Verdict(
            output_ids=torch.where(emitted, torch.where(accept, drafted, self.tokens), PADDING_TOKEN_ID),
            num_accepted=num_accepted,
            status=(bad & emitted).any(1) * STATUS_BAD_ROW,
        )
