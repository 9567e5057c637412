"""Block verification: the drafts of a request verified together, which accepts at least as many as one at a time.

Block Verification Accelerates Speculative Decoding, Sun et al., ICLR 2025, arXiv 2403.10444. With P_0 = 1 and
P_i = min(1, P_{i-1} p(x_i) / q(x_i)), the step stops at the last place i whose own uniform is below h_i; there
h_i = M_i / (M_i + 1 - P_i) with M_i = sum (P_i p_i - q_i)+, and h_i = P_i where the drafts end. The token follows
(P_i p_i - q_i)+, or p where the drafts end.

Requests without a distribution gain nothing from it (for them one at a time is already optimal), so they and greedy
requests take the rules of `verify`. As h_i <= P_i, a place whose uniform is not below P_i needs no pass over the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.pick import cumulate, pick, rows_where
from ..kernels.row_distribution import RowDistribution
from .layout import Layout
from .ratio import DistributionTable, distribution_tables
from .torch_backend import draw_rows, greedy_requests, prob_of, verify
from .types import (
    NO_PROPOSAL,
    PADDING_TOKEN_ID,
    STATUS_EMPTY_RESIDUAL,
    DistributionKind,
    DraftRows,
    SamplingRows,
    Uniforms,
    Verdict,
)
from .uniforms import draw_block_uniforms


def verify_block(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    uniforms: Uniforms | None = None,
) -> Verdict:
    """Verify as `verify_block` in `sampler.py` says, in batched torch."""
    one_at_a_time = verify(logits, cu_rows, drafts, sampling, uniforms)
    if drafts.distributions is None or sampling.all_greedy or not len(logits) or not drafts.token_ids.shape[1]:
        return one_at_a_time
    together, applies = _Block.of(logits, cu_rows, drafts, sampling, uniforms).verify()
    chosen: dict[str, Any] = {
        name: torch.where(applies.view(-1, *[1] * (each.dim() - 1)), vars(together)[name], each)
        for name, each in vars(one_at_a_time).items()
        if isinstance(each, Tensor)
    }
    return replace(one_at_a_time, **chosen)


@dataclass(frozen=True)
class _Block:
    """A batch of drafts in the terms of the rule."""

    distribution: RowDistribution
    drawn: Tensor  # [R] a token of p for each row
    layout: Layout
    uniforms: Uniforms
    tables: dict[DistributionKind, DistributionTable]
    kinds: Tensor  # [B]
    applies: Tensor  # [B] bool
    drafts: DraftRows
    length: Tensor  # [B] places before the drafts, or what can be verified of them, end
    ratio: Tensor  # [B, K] float64, p/q; 0 where p or q is 0
    survival: Tensor  # [B, K + 1] float64, P_0..P_K

    @classmethod
    def of(
        cls, logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms | None
    ) -> _Block:
        assert drafts.distributions is not None
        uniforms = uniforms or draw_block_uniforms(drafts, sampling)
        layout = Layout.of(len(logits), cu_rows, drafts)
        greedy = greedy_requests(sampling)
        distribution, drawn = draw_rows(logits, cu_rows, sampling, uniforms, greedy)
        tables = distribution_tables(drafts.distributions, layout.has_draft)
        places = layout.offsets[:-1]
        known = torch.zeros_like(drafts.distributions.kind, dtype=torch.bool)
        q = torch.zeros_like(drafts.token_ids, dtype=torch.float64)
        for kind, table in tables.items():
            of_kind = drafts.distributions.kind == kind
            known |= of_kind
            token_ids = drafts.token_ids.clamp(0, distribution.vocab_size - 1)
            q = torch.where(of_kind.unsqueeze(1), table.prob_of(token_ids, places), q)
        p = prob_of(distribution, layout.rows[:, :-1], drafts.token_ids)
        verified = layout.legal(drafts.token_ids != NO_PROPOSAL, distribution.bad)
        length = verified.cumprod(1).sum(1)
        ratio = torch.where((p > 0) & (q != 0), p / q, 0.0)
        ratio = ratio.nan_to_num(nan=0.0).masked_fill(torch.arange(q.shape[1], device=q.device) >= length[:, None], 0.0)
        survival = [torch.ones_like(ratio[:, 0])]
        for place in range(ratio.shape[1]):
            survival.append((survival[-1] * ratio[:, place]).clamp(max=1.0))
        applies = known & (layout.last.squeeze(1) == 0)
        applies = applies if greedy is None else applies & ~greedy
        return cls(
            distribution,
            drawn,
            layout,
            uniforms,
            tables,
            drafts.distributions.kind,
            applies,
            drafts,
            length,
            ratio,
            torch.stack(survival, 1),
        )

    def verify(self) -> tuple[Verdict, Tensor]:
        """(verdict, requests for which it holds [B])."""
        stop = self._stop()
        tokens = self.drawn[self.layout.rows].clone()  # [B, K + 1]
        emitted = self.layout.emitted(stop)
        status = self.layout.status(emitted, self.distribution.bad)
        before = self.layout.offsets[:-1] < stop.unsqueeze(1)
        tokens[:, :-1] = torch.where(before, self.drafts.token_ids, tokens[:, :-1])
        for requests, kind in self._at(self.applies & (stop < self.length)):
            cdf, residual = self._residual(requests, stop[requests], kind)
            uniforms = self.uniforms.output.gather(1, stop.unsqueeze(1)).squeeze(1)[requests]
            drawn = pick(residual, cdf, uniforms)
            wanted = (self.applies & (stop < self.length) & (self.kinds == kind))[requests]
            empty = ~(cdf[:, -1] > 0)
            current = tokens[requests, stop[requests]]
            tokens[requests, stop[requests]] = torch.where(wanted & ~empty, drawn, current)
            status[requests] |= (wanted & empty) * STATUS_EMPTY_RESIDUAL
        verdict = Verdict(
            output_ids=torch.where(emitted, tokens, PADDING_TOKEN_ID),
            num_accepted=stop,
            status=status,
        )
        return verdict, self.applies

    def _stop(self) -> Tensor:
        """The last place whose uniform accepts, found from the end, int64 [B]."""
        assert self.uniforms.accept is not None, "rows with a reported distribution need accept uniforms"
        stop = torch.zeros_like(self.length)
        for place in range(self.drafts.token_ids.shape[1], 0, -1):
            uniform, survival = self.uniforms.accept[:, place - 1], self.survival[:, place]
            open_here = self.applies & (stop == 0) & (uniform < survival)
            stop = torch.where(open_here & (self.length == place), place, stop)
            for requests, kind in self._at(open_here & (self.length > place)):
                mass = self._residual(requests, torch.full_like(requests, place), kind)[0][:, -1]
                left = mass + 1 - survival[requests]
                accepts = (uniform[requests] * left < mass) & (open_here & (self.length > place))[requests]
                accepts &= self.kinds[requests] == kind
                stop[requests] = torch.where(accepts, place, stop[requests])
        return stop

    def _at(self, wanted: Tensor) -> list[tuple[Tensor, DistributionKind]]:
        """The wanted requests by kind of distribution; all of them where counting would stall a device."""
        found = [(rows_where(wanted & (self.kinds == kind)), kind) for kind in self.tables]
        return [(requests, kind) for requests, kind in found if requests.numel()]

    def _residual(self, requests: Tensor, places: Tensor, kind: DistributionKind) -> tuple[Tensor, Tensor]:
        """(cumulative tile masses, weights) of (P_i p_i - q_i)+ for some requests at one place each."""
        rows = self.layout.rows[requests, places]
        residual = self.distribution.probs(rows)
        residual *= self.survival[requests, places].to(residual.dtype).view(-1, 1, 1)
        last = self.drafts.token_ids.shape[1] - 1
        self.tables[kind].subtract(
            residual.flatten(1)[:, : self.distribution.vocab_size], requests, places.clamp(max=last)
        )
        residual.clamp_(min=0.0)
        return cumulate(residual), residual
