"""Random batches of every kind of request, and the pieces to cut, shuffle and compare them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.core.rejection import (
    IMPOSSIBLE,
    NO_PROPOSAL,
    DistributionKind,
    DraftDistributions,
    DraftRows,
    SamplingRows,
    Uniforms,
    Verdict,
    verify,
)
from specdec.core.rejection.uniforms import draw_tree_uniforms

ALL_KINDS = tuple(DistributionKind)


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of `verify`."""

    logits: Tensor
    cu_rows: Tensor
    drafts: DraftRows
    sampling: SamplingRows
    backend: Callable[..., Verdict] = verify

    @property
    def num_requests(self) -> int:
        return len(self.drafts.lengths)

    def verify(self, uniforms: Uniforms | None = None) -> Verdict:
        return self.backend(self.logits, self.cu_rows, self.drafts, self.sampling, uniforms)

    def rows(self, request: int) -> Tensor:
        return self.logits[int(self.cu_rows[request]) : int(self.cu_rows[request + 1])]


@dataclass(frozen=True)
class Shape:
    """What kind of batch to make."""

    num_requests: int = 6
    num_drafts: int = 3
    vocab_size: int = 11
    kinds: tuple[DistributionKind, ...] = ALL_KINDS
    filters: bool = True
    greedy: float = 0.2  # share of greedy requests
    idle: float = 0.1  # share of requests without rows
    holes: bool = True  # sentinels within the drafts
    mapped: bool = False
    dtype: torch.dtype = torch.float32


def random_batch(seed: int, shape: Shape) -> Batch:
    """Half of the drafts are the target's likeliest token, so that prefixes of every length are accepted."""
    g = torch.Generator().manual_seed(seed)
    num, width, vocab = shape.num_requests, shape.num_drafts, shape.vocab_size
    idle = torch.rand(num, generator=g) < shape.idle
    lengths = torch.randint(0, width + 1, (num,), generator=g).masked_fill(idle, 0)
    num_rows = torch.where(idle, 0, lengths + 1)
    cu_rows = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0))
    logits = (2.5 * torch.randn(int(cu_rows[-1]), vocab, generator=g)).to(shape.dtype)
    logits[:, 1:] = logits[:, 1:].masked_fill(torch.rand(len(logits), vocab - 1, generator=g) < 0.1, -math.inf)
    token_ids = torch.randint(0, vocab, (num, width), generator=g)
    places = (cu_rows[:-1].unsqueeze(1) + torch.arange(width)).clamp(max=max(0, len(logits) - 1))
    if len(logits):
        likely = torch.rand(num, width, generator=g) < 0.5
        token_ids = torch.where(likely, logits.argmax(-1)[places], token_ids)
    if shape.holes:
        token_ids[torch.rand(num, width, generator=g) < 0.05] = NO_PROPOSAL
        token_ids[torch.rand(num, width, generator=g) < 0.05] = IMPOSSIBLE
    token_ids = token_ids.masked_fill(torch.arange(width) >= lengths.unsqueeze(1), -1)
    distributions = _random_distributions(g, shape) if shape.kinds != (DistributionKind.ONE_HOT,) else None
    return Batch(logits, cu_rows, DraftRows(token_ids, lengths, distributions), _random_sampling(g, shape))


def _random_distributions(g: torch.Generator, shape: Shape) -> DraftDistributions:
    num, width, vocab = shape.num_requests, shape.num_drafts, shape.vocab_size
    kinds = torch.tensor(shape.kinds)[torch.randint(0, len(shape.kinds), (num,), generator=g)]
    t2d, draft_vocab = None, vocab
    if shape.mapped:
        draft_vocab = max(1, vocab // 2)
        d2t = torch.randperm(vocab, generator=g)[:draft_vocab]
        t2d = torch.full((vocab,), -1).scatter(0, d2t, torch.arange(draft_vocab))
    top_m = min(3, vocab)
    ids = torch.rand(num, width, vocab, generator=g).topk(top_m).indices
    probs = torch.rand(num, width, top_m, generator=g)
    return DraftDistributions(
        kind=kinds.to(torch.uint8),
        draft_probs=torch.randn(num, width, draft_vocab, generator=g).softmax(-1),
        draft_logits=2 * torch.randn(num, width, draft_vocab, generator=g),
        sparse_ids=torch.nn.functional.pad(ids, (0, 1), value=-1),
        sparse_probs=torch.nn.functional.pad(probs / probs.sum(-1, keepdim=True), (0, 1), value=0.7),
        t2d=t2d,
    )


def _random_sampling(g: torch.Generator, shape: Shape) -> SamplingRows:
    num = shape.num_requests

    def some(values: Tensor, off: float) -> Tensor:
        use = (torch.rand(num, generator=g) < 0.5) & torch.tensor(shape.filters)
        return torch.where(use, values, off)

    greedy = torch.rand(num, generator=g) < shape.greedy
    temperature = (0.4 + 1.2 * torch.rand(num, generator=g)).masked_fill(greedy, 0.0)
    return SamplingRows(
        temperature=temperature,
        top_k=some(torch.randint(1, shape.vocab_size + 2, (num,), generator=g), 0).long(),
        top_p=some(torch.rand(num, generator=g), 1.0),
        min_p=some(0.3 * torch.rand(num, generator=g), 0.0),
        seed=torch.randint(-(2**62), 2**62, (num,), generator=g),
        position=torch.randint(0, 2**40, (num,), generator=g),
        all_greedy=bool(greedy.all()),
        any_filter=shape.filters,
    )


def select(batch: Batch, requests: Tensor) -> Batch:
    """The batch of these requests only, in this order."""
    rows = [batch.rows(int(b)) for b in requests]
    cu_rows = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    drafts, distributions = batch.drafts, batch.drafts.distributions
    if distributions is not None:
        tensors = ("kind", "draft_probs", "draft_logits", "sparse_ids", "sparse_probs")
        distributions = replace(distributions, **{name: getattr(distributions, name)[requests] for name in tensors})
    sampling = batch.sampling
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    return Batch(
        torch.cat(rows),
        cu_rows,
        DraftRows(drafts.token_ids[requests], drafts.lengths[requests], distributions),
        replace(sampling, **{name: getattr(sampling, name)[requests] for name in names}),
        batch.backend,
    )


def block_uniforms(drafts: DraftRows, sampling: SamplingRows) -> Uniforms:
    """What verifies chains together: on a chain place i has i drafts before it."""
    depths = torch.arange(drafts.token_ids.shape[1] + 1).expand(len(drafts.lengths), -1)
    return draw_tree_uniforms(drafts, sampling, depths, together=True)


def equal(left: Verdict, right: Verdict) -> bool:
    """Whether two verdicts say the same."""
    names = ("output_ids", "num_accepted", "status")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Every tensor that a call is given."""
    distributions = batch.drafts.distributions
    values = [batch.logits, batch.cu_rows, *vars(batch.drafts).values(), *vars(batch.sampling).values()]
    return [v for v in [*values, *(vars(distributions).values() if distributions else [])] if isinstance(v, Tensor)]
