"""Tiny models with every form of draft distribution, and an oracle for filtered distributions that shares no code
with the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.core.rejection import DistributionKind, DraftDistributions, DraftRows, SamplingRows
from specdec.core.rejection.exact_distribution import Problem
from specdec.core.rejection.reference import Params

NO_FILTER = Params()
SAMPLING = {
    "unit": NO_FILTER,
    "temperature": Params(temperature=0.7),
    "top_k": Params(temperature=1.3, top_k=2),
    "top_p": Params(top_p=0.8),
    "min_p": Params(min_p=0.15),
    "all": Params(temperature=0.9, top_k=3, top_p=0.9, min_p=0.05),
}


def sampling_rows(params: list[Params], seed: int = 7, position: int = 100) -> SamplingRows:
    """One request for each of params, with different seeds and positions."""
    num = len(params)
    return SamplingRows(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seed=seed + torch.arange(num),
        position=position + 10 * torch.arange(num),
        all_greedy=all(p.temperature <= 0 for p in params),
        any_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
    )


def filtered_distribution(logits: Tensor, params: Params) -> Tensor:
    """p of one row, from the definition of each filter as a set of survivors, in Python floats."""
    values = [float(x) for x in logits]
    top = max(values)
    if params.temperature <= 0:
        best = values.index(top)
        return torch.tensor([float(i == best) for i in range(len(values))], dtype=torch.float64)
    temperature, top_p, min_p = (single(x) for x in (params.temperature, params.top_p, params.min_p))
    weights = [math.exp((x - top) / temperature) for x in values]
    weights = [w if w >= min_p else 0.0 for w in weights]
    if params.top_k:
        weights = [w if sum(v > w for v in weights) < params.top_k else 0.0 for w in weights]
    if top_p < 1:
        wanted = top_p * math.fsum(weights)
        weights = [w if math.fsum(v for v in weights if v > w) < wanted else 0.0 for w in weights]
    total = math.fsum(weights)
    return torch.tensor([w / total for w in weights], dtype=torch.float64)


def single(value: float) -> float:
    """value as a float32 holds it."""
    return float(torch.tensor(value, dtype=torch.float32))


def filtered_table(table: Tensor, params: Params) -> Tensor:
    rows = [filtered_distribution(row, params) for row in table.reshape(-1, table.shape[-1])]
    return torch.stack(rows).view(table.shape)


@dataclass(frozen=True)
class Model:
    """Logits of a target and of a drafter for every prefix."""

    target: list[Tensor]  # K + 1 tables [V, ..., V]
    draft: list[Tensor]  # K tables [V, ..., V]

    @property
    def vocab_size(self) -> int:
        return self.target[0].shape[-1]

    @property
    def num_drafts(self) -> int:
        return len(self.draft)

    def to(self, dtype: torch.dtype) -> Model:
        return Model([t.to(dtype) for t in self.target], [t.to(dtype) for t in self.draft])


def random_model(seed: int, vocab_size: int = 4, num_drafts: int = 2, structure: str = "dense") -> Model:
    """A model of the given structure: dense, zeros_p, zeros_q, equal, disjoint, single or ties."""
    generator = torch.Generator().manual_seed(seed)

    def tables(count: int) -> list[Tensor]:
        shapes = [[vocab_size] * (i + 1) for i in range(count)]
        return [1.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    target, draft = tables(num_drafts + 1), tables(num_drafts)
    even = torch.arange(vocab_size) % 2 == 0
    masked = {"zeros_p": [target], "zeros_q": [draft], "zeros": [target, draft], "single": [draft]}
    for side in masked.get(structure, []):
        for table in side:
            hole = torch.rand(table.shape, generator=generator) < (1.0 if structure == "single" else 0.4)
            hole.scatter_(-1, table.argmax(-1, keepdim=True), False)
            table.masked_fill_(hole, -math.inf)
    if structure == "equal":
        draft = [table.clone() for table in target[:-1]]
    if structure == "disjoint":
        target = [table.masked_fill(even, -math.inf) for table in target]
        draft = [table.masked_fill(~even, -math.inf) for table in draft]
    if structure == "ties":
        target, draft = [t.round() for t in target], [t.round() for t in draft]
    return Model(target, draft)


Report = Callable[[Tensor], DraftRows]


@dataclass(frozen=True)
class Drafter:
    """The distributions drafts are drawn from, on target ids, and how they are reported."""

    distributions: list[Tensor]  # K tables float64 [V, ..., V]
    report: Report
    coupled: bool = False


def at_prefix(tables: list[Tensor], drafts: Tensor) -> Tensor:
    """The rows of K tables after each prefix of drafts [T, K]: [T, K, ...]."""
    rows = [table[tuple(drafts[:, :i].T)] for i, table in enumerate(tables)]
    return torch.stack([row.expand(len(drafts), -1) for row in rows], 1)


def tagged(drafts: Tensor, kind: DistributionKind, **tensors: Tensor) -> DraftRows:
    """Drafts [T, K] of full length, every row with a distribution of one kind."""
    distributions = DraftDistributions(kind=torch.full((len(drafts),), kind, dtype=torch.uint8), **tensors)
    return DraftRows(drafts, torch.full((len(drafts),), drafts.shape[1]), distributions)


def one_hot(model: Model, dtype: torch.dtype) -> Drafter:
    """Drafts sampled from the model, verified as one-hot: lossless whatever drew them."""
    distributions = [table.softmax(-1) for table in model.draft]
    return Drafter(distributions, lambda x: DraftRows(x, torch.full((len(x),), x.shape[1])), coupled=True)


def one_hot_probs(model: Model, dtype: torch.dtype) -> Drafter:
    """The same drafts by standard rejection: each is reported with a distribution that gives it alone."""
    vocab = model.vocab_size
    return replace(
        one_hot(model, dtype),
        report=lambda x: tagged(
            x, DistributionKind.DENSE_PROBS, draft_probs=torch.nn.functional.one_hot(x, vocab).to(dtype)
        ),
        coupled=False,
    )


def dense_probs(model: Model, dtype: torch.dtype) -> Drafter:
    distributions = [table.softmax(-1) for table in model.draft]
    return Drafter(
        distributions,
        lambda x: tagged(x, DistributionKind.DENSE_PROBS, draft_probs=at_prefix(distributions, x).to(dtype)),
    )


def dense_logits(model: Model, dtype: torch.dtype) -> Drafter:
    logits = [table.to(dtype) for table in model.draft]
    distributions = [table.double().softmax(-1) for table in logits]
    return Drafter(distributions, lambda x: tagged(x, DistributionKind.DENSE_LOGITS, draft_logits=at_prefix(logits, x)))


def sparse(model: Model, dtype: torch.dtype, top_m: int = 2) -> Drafter:
    """Drafts drawn from the renormalised top-M of the model; one padded entry."""
    best = [table.softmax(-1).topk(top_m) for table in model.draft]
    probs = [b.values / b.values.sum(-1, keepdim=True) for b in best]
    distributions = [
        torch.zeros_like(t).scatter(-1, b.indices, p) for t, b, p in zip(model.draft, best, probs, strict=True)
    ]

    def report(x: Tensor) -> DraftRows:
        ids = torch.nn.functional.pad(at_prefix([b.indices for b in best], x), (0, 1), value=-1)
        values = torch.nn.functional.pad(at_prefix(probs, x), (0, 1), value=0.5)
        return tagged(x, DistributionKind.SPARSE, sparse_ids=ids, sparse_probs=values.to(dtype))

    return Drafter(distributions, report)


def mapped_probs(model: Model, dtype: torch.dtype) -> Drafter:
    """A draft vocabulary of all target ids but the first, in reverse order."""
    d2t = torch.arange(model.vocab_size - 1, 0, -1)
    t2d = torch.full((model.vocab_size,), -1).scatter(0, d2t, torch.arange(len(d2t)))
    small = [table[..., d2t].softmax(-1) for table in model.draft]
    distributions = [torch.zeros_like(t).index_copy(-1, d2t, s) for t, s in zip(model.draft, small, strict=True)]
    return Drafter(
        distributions,
        lambda x: tagged(x, DistributionKind.DENSE_PROBS, draft_probs=at_prefix(small, x).to(dtype), t2d=t2d),
    )


def mapped_logits(model: Model, dtype: torch.dtype) -> Drafter:
    d2t = torch.arange(model.vocab_size - 1, 0, -1)
    t2d = torch.full((model.vocab_size,), -1).scatter(0, d2t, torch.arange(len(d2t)))
    small = [table[..., d2t].to(dtype) for table in model.draft]
    distributions = [
        torch.zeros_like(t).index_copy(-1, d2t, s.double().softmax(-1)) for t, s in zip(model.draft, small, strict=True)
    ]
    return Drafter(
        distributions, lambda x: tagged(x, DistributionKind.DENSE_LOGITS, draft_logits=at_prefix(small, x), t2d=t2d)
    )


DRAFTERS: dict[str, Callable[[Model, torch.dtype], Drafter]] = {
    "one_hot": one_hot,
    "one_hot_probs": one_hot_probs,
    "dense_probs": dense_probs,
    "dense_logits": dense_logits,
    "sparse": sparse,
    "mapped_probs": mapped_probs,
    "mapped_logits": mapped_logits,
}


def problem_of(model: Model, drafter: Drafter, params: Params, dtype: torch.dtype) -> Problem:
    """The proof obligation: whatever the drafter does, the output follows the oracle's filtered target distribution."""
    logits = [table.to(dtype) for table in model.target]
    return Problem(
        target_logits=logits,
        target_distributions=[filtered_table(table, params) for table in logits],
        draft_distributions=drafter.distributions,
        report=drafter.report,
        sampling=sampling_rows([params]),
        coupled=drafter.coupled or params.temperature <= 0,
    )


def with_lengths(drafter: Drafter, length_of: Callable[[Tensor], Tensor]) -> Drafter:
    """The drafter, reporting length_of(drafts [T, K]) [T] drafts; the rest of token_ids is padding."""

    def report(x: Tensor) -> DraftRows:
        rows = drafter.report(x)
        lengths = length_of(x)
        beyond = torch.arange(x.shape[1]) >= lengths.unsqueeze(1)
        return replace(rows, token_ids=rows.token_ids.masked_fill(beyond, -1), lengths=lengths)

    return replace(drafter, report=report)
