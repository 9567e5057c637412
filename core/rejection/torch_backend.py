"""Verification in batched torch: the CPU path, and the path of any device that has no kernel of its own.

Every row draws its token y from p by inverse CDF. One-hot and greedy rows accept a draft iff it equals y (the
coupled rule); rows with a reported law accept by ratio and, where they reject, draw from the residual instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.filters import FilterRows
from ..kernels.pick import first_argmax, pick
from ..kernels.row_law import RowLaw, compute_dtype, mend, row_law, scale_of
from .coins import draw_coins
from .layout import Layout
from .ratio import ratio_test, recover, with_recovered
from .types import NO_PROPOSAL, PADDING_TOKEN_ID, Coins, DraftRows, SamplingRows, Verdict
from .workspace import Workspace


def verify(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    coins: Coins | None,
    workspace: Workspace | None = None,
) -> Verdict:
    """See `verify` in `sampler.py`. Allocates what it needs; the workspace is for kernels."""
    if not len(logits):
        return _no_rows(drafts, sampling)
    layout = Layout.of(len(logits), cu_rows, drafts)
    if sampling.all_greedy:
        return _verify_greedy(logits, drafts, layout)
    return _verify_sampled(logits, cu_rows, drafts, sampling, coins or draw_coins(drafts, sampling), layout)


def _no_rows(drafts: DraftRows, sampling: SamplingRows) -> Verdict:
    num_requests, num_positions = drafts.token_ids.shape
    nothing_examined = torch.full_like(drafts.token_ids, torch.nan, dtype=torch.float32)
    return Verdict(
        output_ids=drafts.token_ids.new_full((num_requests, num_positions + 1), PADDING_TOKEN_ID),
        num_accepted=torch.zeros_like(drafts.lengths),
        accept_prob=None if sampling.all_greedy else nothing_examined,
        status=torch.zeros_like(drafts.lengths),
        logprobs=None
        if sampling.all_greedy
        else nothing_examined.new_full((num_requests, num_positions + 1), torch.nan),
    )


def _verify_greedy(logits: Tensor, drafts: DraftRows, layout: Layout) -> Verdict:
    logits = logits.to(compute_dtype(logits))
    maxima, best = first_argmax(logits)
    bad = None
    if logits.device.type != "cpu" or not math.isfinite(maxima.sum().item()):
        logits, _, bad = mend(logits)
        best = first_argmax(logits)[1]
    tokens = best[layout.rows]  # [B, K + 1]
    accept = layout.legal(tokens[:, :-1] == drafts.token_ids, bad)
    num_accepted = accept.cumprod(1).sum(1)
    emitted = layout.emitted(num_accepted)
    return Verdict(
        output_ids=torch.where(emitted, tokens, PADDING_TOKEN_ID),
        num_accepted=num_accepted,
        accept_prob=None,
        status=layout.status(emitted, bad),
    )


def _verify_sampled(
    logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, coins: Coins, layout: Layout
) -> Verdict:
    greedy = greedy_requests(sampling)
    law, drawn = draw_rows(logits, cu_rows, sampling, coins, greedy)
    tokens = drawn[layout.rows]  # [B, K + 1]
    accept = tokens[:, :-1] == drafts.token_ids
    prob = prob_of_drafts(law, drafts, layout)
    if greedy is not None:
        prob = torch.where(greedy.unsqueeze(1), (accept & (prob > 0)).double(), prob)
    test = None
    if drafts.laws is not None and drafts.token_ids.shape[1]:
        test = ratio_test(prob, law.vocab_size, drafts, drafts.laws, greedy, coins)
        accept = torch.where(test.applies, test.accept, accept)
        prob = torch.where(test.applies, test.prob, prob)
    accept = layout.legal(accept, law.bad)
    num_accepted = accept.cumprod(1).sum(1)
    emitted = layout.emitted(num_accepted)
    status = layout.status(emitted, law.bad)
    if test is not None:
        tokens[:, :-1] = torch.where(accept, drafts.token_ids, tokens[:, :-1])
        with_recovered(tokens, status, num_accepted, recover(test, law, drafts, coins, layout, num_accepted))
    examined = emitted[:, :-1] & layout.has_draft & (drafts.token_ids != NO_PROPOSAL)
    return Verdict(
        output_ids=torch.where(emitted, tokens, PADDING_TOKEN_ID),
        num_accepted=num_accepted,
        accept_prob=torch.where(examined, prob.float(), torch.nan),
        status=status,
        logprobs=torch.where(emitted, logprobs_of(law, tokens, layout, greedy), torch.nan),
    )


def greedy_requests(sampling: SamplingRows) -> Tensor | None:
    """The requests that take the maximum, bool [B]; None where the host can tell that there is none."""
    greedy = sampling.temperature <= 0
    return greedy if greedy.device.type != "cpu" or bool(greedy.any()) else None


def draw_rows(
    logits: Tensor, cu_rows: Tensor, sampling: SamplingRows, coins: Coins, greedy: Tensor | None
) -> tuple[RowLaw, Tensor]:
    """The law of every row, and the token that the row's output coin draws from it, int64 [R]."""
    rows = torch.arange(len(logits), dtype=cu_rows.dtype, device=cu_rows.device)
    owner = (torch.searchsorted(cu_rows, rows, right=True) - 1).clamp_(0, len(cu_rows) - 2)
    place = (rows - cu_rows[owner]).clamp_(max=coins.output.shape[1] - 1)
    uniforms = coins.output[owner, place]
    greedy_rows = None
    if greedy is not None:
        greedy_rows = greedy[owner]
        uniforms = torch.where(greedy_rows, 0.0, uniforms)
    filters = None
    if sampling.any_filter:
        filters = FilterRows(sampling.top_k[owner], sampling.top_p[owner], sampling.min_p[owner])
    law = row_law(logits, scale_of(sampling.temperature)[owner], filters, greedy_rows)
    return law, pick(law.weights, law.cdf, uniforms).clamp_(max=law.vocab_size - 1)


def prob_of_drafts(law: RowLaw, drafts: DraftRows, layout: Layout) -> Tensor:
    """p of each draft, float64 [B, K]; 0 for an id outside the vocabulary and on a bad row."""
    rows = layout.rows[:, :-1]
    token_ids = drafts.token_ids
    known = (token_ids >= 0) & (token_ids < law.vocab_size)
    if law.bad is not None:
        known &= ~law.bad[rows]
    weights = law.weights.flatten(1)[rows, token_ids.clamp(0, law.vocab_size - 1)]
    return torch.where(known, weights.double() / law.mass.squeeze(1)[rows], 0.0)


def logprobs_of(law: RowLaw, tokens: Tensor, layout: Layout, greedy: Tensor | None) -> Tensor:
    """log p of a token at each place, float32 [B, K + 1]; 0 for a greedy request, whose law gives one token."""
    weights = law.weights.flatten(1)[layout.rows, tokens.clamp(0, law.vocab_size - 1)]
    logprobs = weights.double().log() - law.mass.squeeze(1)[layout.rows].log()
    return (logprobs if greedy is None else logprobs.masked_fill(greedy.unsqueeze(1), 0.0)).float()
