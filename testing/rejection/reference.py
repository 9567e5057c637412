"""The specification: verification one request at a time, in float64, written to be read.

Letters as in arXiv 2211.17192: p is the target's distribution, q the distribution a draft x was drawn from. The
batched backends must return what this file returns for the same uniforms, except where a uniform lies within 1e-6 of
a boundary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.kernels.pick import LARGEST_UNIFORM
from specdec.core.rejection import (
    NO_PROPOSAL,
    PADDING_TOKEN_ID,
    STATUS_BAD_ROW,
    STATUS_EMPTY_RESIDUAL,
    DistributionKind,
    DraftDistributions,
    DraftRows,
    SamplingRows,
    Uniforms,
    Verdict,
)
from specdec.core.rejection.uniforms import draw_uniforms


@dataclass(frozen=True)
class Params:
    """Sampling parameters of one request."""

    temperature: float = 1.0  # <= 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off


def target_distribution(logits: Tensor, params: Params) -> Tensor:
    """p of one row of logits [V], float64 [V].

    Temperature, then min-p, top-k and top-p in this order, each a threshold that keeps ties. A greedy row and a
    bad row always give their argmax, the lowest index winning; a NaN is never given.
    """
    if params.temperature <= 0 or is_bad(logits):
        best = torch.where(logits.isnan(), -math.inf, logits).argmax()
        return torch.nn.functional.one_hot(best, len(logits)).double()
    z = logits.double() * (math.log2(math.e) / params.temperature)
    z = z - z.max()
    if params.min_p > 0:
        z = z.masked_fill(z < math.log2(params.min_p), -math.inf)
    if 0 < params.top_k < len(z):
        kth = z.sort(descending=True).values[params.top_k - 1]
        z = z.masked_fill(z < kth, -math.inf)
    if params.top_p < 1:
        descending = z.sort(descending=True).values
        mass = descending.exp2().cumsum(0)
        too_little = int((mass < params.top_p * mass[-1]).sum())
        z = z.masked_fill(z < descending[too_little], -math.inf)
    return z.exp2() / z.exp2().sum()


def is_bad(logits: Tensor) -> bool:
    """A row with a NaN, or without a finite maximum."""
    return not math.isfinite(float(logits.max()))


def draft_distribution(
    distributions: DraftDistributions, request: int, position: int, vocab_size: int
) -> Tensor | None:
    """q of one draft over the target's vocabulary, float64 [V]; None: one-hot, or no tensor given for its kind.

    Logits with a NaN or without a finite maximum are no distribution; q is NaN then, which accepts nothing and
    empties the residual. A sparse id that occurs twice has the sum of its probabilities; one outside the vocabulary
    is left out.
    """
    kind = DistributionKind(int(distributions.kind[request]))
    if (
        kind == DistributionKind.SPARSE
        and distributions.sparse_ids is not None
        and distributions.sparse_probs is not None
    ):
        ids, probs = distributions.sparse_ids[request, position], distributions.sparse_probs[request, position].double()
        known = (ids >= 0) & (ids < vocab_size)
        return torch.zeros(vocab_size, dtype=torch.float64).index_add(0, ids[known], probs[known])
    if kind == DistributionKind.DENSE_PROBS and distributions.draft_probs is not None:
        q = distributions.draft_probs[request, position].double()
    elif kind == DistributionKind.DENSE_LOGITS and distributions.draft_logits is not None:
        row = distributions.draft_logits[request, position]
        q = torch.full_like(row, math.nan).double() if is_bad(row) else target_distribution(row, Params())
    else:
        return None
    if distributions.t2d is not None:
        return torch.where(distributions.t2d >= 0, q[distributions.t2d.clamp(min=0)], 0.0)
    return torch.nn.functional.pad(q, (0, max(0, vocab_size - len(q))))[:vocab_size]


def draw(weights: Tensor, uniform: float) -> int:
    """Inverse CDF in index order: the smallest id whose cumulative weight exceeds uniform * mass."""
    cumulative = weights.cumsum(0)
    return int((cumulative <= min(uniform, LARGEST_UNIFORM) * cumulative[-1]).sum())


@dataclass(frozen=True)
class Step:
    """One logits row, and what is needed to verify the draft after it or to emit a token there."""

    p: Tensor  # [V]
    bad: bool  # the row's logits are bad: nothing is accepted on it
    q: Tensor | None  # [V]; None: the draft is one-hot, or the request greedy
    accept_uniform: float
    output_uniform: float  # 0 for a greedy request

    def target_token(self) -> int:
        return draw(self.p, self.output_uniform)

    def accepts(self, x: int) -> bool:
        """Never a draft outside the vocabulary, or outside the support of p or of q."""
        if self.bad or not 0 <= x < len(self.p) or self.p[x] == 0 or (self.q is not None and self.q[x] == 0):
            return False
        if self.q is None:
            return self.target_token() == x
        return bool(self.p[x] >= self.q[x] or self.accept_uniform * self.q[x] < self.p[x])

    def residual(self, weight: float = 1.0) -> Tensor:
        """(weight p - q)+ over the vocabulary."""
        assert self.q is not None
        return (weight * self.p - self.q).clamp(min=0)

    def continued(self) -> tuple[int, int]:
        """The token emitted where there is no draft, and status bits."""
        return self.target_token(), STATUS_BAD_ROW if self.bad else 0

    def recovered(self) -> tuple[int, int]:
        """The token emitted in place of a rejected draft, and status bits."""
        if self.bad:
            return self.target_token(), STATUS_BAD_ROW
        if self.q is None:
            return self.target_token(), 0
        if not self.residual().sum() > 0:
            return self.target_token(), STATUS_EMPTY_RESIDUAL
        return draw(self.residual(), self.output_uniform), 0


@dataclass(frozen=True)
class Outcome:
    """The verdict on one request."""

    output_ids: list[int]
    status: int


def verify_request(steps: list[Step], drafts: list[int]) -> Outcome:
    """Verify one request: a step for each draft, and one more for the bonus token. Without a step nothing
    is emitted.
    """
    accepted: list[int] = []
    for step, x in zip(steps, [*drafts, NO_PROPOSAL], strict=True):
        if x != NO_PROPOSAL and step.accepts(x):
            accepted.append(x)
            continue
        token, status = step.recovered() if x != NO_PROPOSAL else step.continued()
        return Outcome([*accepted, token], status)
    raise AssertionError("the bonus step always emits")


def verify(
    logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms | None = None
) -> Verdict:
    """Do what `verify` in `sampler.py` does, with the same signature, on the CPU."""
    uniforms = uniforms or draw_uniforms(drafts, sampling)
    bounds = cu_rows.tolist()
    outcomes = []
    for b, length in enumerate(drafts.lengths.tolist()):
        rows = logits[bounds[b] : bounds[b + 1]]
        if len(rows):
            steps = [_step(row, b, i, drafts, sampling, uniforms) for i, row in enumerate(rows)]
            outcomes.append(verify_request(steps, drafts.token_ids[b, :length].tolist()))
        else:
            outcomes.append(Outcome([], 0))
    width = drafts.token_ids.shape[1]
    output_ids = [outcome.output_ids + [PADDING_TOKEN_ID] * (width + 1) for outcome in outcomes]
    return Verdict(
        output_ids=torch.tensor([ids[: width + 1] for ids in output_ids]),
        num_accepted=torch.tensor([max(0, len(outcome.output_ids) - 1) for outcome in outcomes]),
        status=torch.tensor([outcome.status for outcome in outcomes]),
    )


def _step(row: Tensor, b: int, i: int, drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms) -> Step:
    params = Params(
        temperature=float(sampling.temperature[b]),
        top_k=int(sampling.top_k[b]),
        top_p=float(sampling.top_p[b]),
        min_p=float(sampling.min_p[b]),
    )
    greedy = params.temperature <= 0
    q = None
    if drafts.distributions is not None and i < int(drafts.lengths[b]) and not greedy:
        q = draft_distribution(drafts.distributions, b, i, len(row))
    return Step(
        p=target_distribution(row, params),
        bad=is_bad(row),
        q=q,
        accept_uniform=float(uniforms.accept[b, i]) if uniforms.accept is not None and q is not None else 0.5,
        output_uniform=0.0 if greedy else float(uniforms.output[b, i]),
    )
