"""Rules that do NOT keep the target's distribution. Nothing chooses them but a caller who names them.

They use no draft distribution: the token of the stop is drawn from p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.philox import Stream, uniform
from .layout import Layout
from .torch_backend import draw_rows, greedy_requests
from .types import NO_PROPOSAL, PADDING_TOKEN_ID, DraftRows, SamplingRows, Uniforms, Verdict
from .uniforms import draw_uniforms


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
    bar = (delta * (-entropy).exp()).clamp(max=epsilon)[rows.layout.rows[:, :-1]]
    return rows.verdict(rows.prob > bar)


def verify_synthetic(
    logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, rates: Tensor
) -> Verdict:
    """Accept draft i with probability rates[i], whatever it is; rates float [K] or []. Lossy, for benchmarks.

    A greedy request accepts its argmax only. An id outside the vocabulary is never accepted, nor one that is barred, as
    by a grammar: its logit is -inf.
    """
    rows = _Rows(logits, cu_rows, drafts, sampling)
    positions = sampling.position.unsqueeze(1) + torch.arange(drafts.token_ids.shape[1], device=logits.device)
    uniforms = uniform(sampling.seed.unsqueeze(1), positions, Stream.TYPICAL)
    known = (drafts.token_ids >= 0) & (drafts.token_ids < logits.shape[1])
    possible = logits[rows.layout.rows[:, :-1], drafts.token_ids.where(known, 0)] > -torch.inf
    return rows.verdict((uniforms < rates.double()) & known & possible)


class _Rows:
    """What both rules need: a token of p for every row, and p of every draft."""

    def __init__(self, logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows) -> None:
        uniforms: Uniforms = draw_uniforms(drafts, sampling)
        self.drafts = drafts
        self.layout = Layout.of(len(logits), cu_rows, drafts)
        self.greedy = greedy_requests(sampling)
        self.distribution, drawn = draw_rows(logits, cu_rows, sampling, uniforms, self.greedy)
        self.tokens = drawn[self.layout.rows]  # [B, K + 1]
        self.prob = self.distribution.prob_of(self.layout.rows[:, :-1], drafts.token_ids)

    def verdict(self, accept: Tensor) -> Verdict:
        """The verdict of a rule that accepts [B, K]; greedy requests always take their argmax."""
        proposed = self.drafts.token_ids != NO_PROPOSAL
        if self.greedy is not None:
            accept = torch.where(self.greedy.unsqueeze(1), self.tokens[:, :-1] == self.drafts.token_ids, accept)
        accept = self.layout.legal(accept & proposed, self.distribution.bad)
        num_accepted = accept.cumprod(1).sum(1)
        emitted = self.layout.emitted(num_accepted)
        before = self.layout.offsets[:-1] < num_accepted.unsqueeze(1)
        tokens = self.tokens.clone()
        tokens[:, :-1] = torch.where(before, self.drafts.token_ids, tokens[:, :-1])
        return Verdict(
            output_ids=torch.where(emitted, tokens, PADDING_TOKEN_ID),
            num_accepted=num_accepted,
            status=self.layout.status(emitted, self.distribution.bad),
        )
