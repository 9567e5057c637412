"""Draws draft tokens, and reports the distribution that each was drawn from.

Any q is lossless if the drafts are really drawn from it (arXiv 2211.17192, 2302.01318). The samplers draw inside the
support that the request's own temperature, top-k, top-p and min-p leave, because only these drafts can be accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..needs import DistributionForm
from ..types import PADDING_TOKEN_ID, DistributionKind, Draft, DraftDistribution, SamplingView, StepView
from .vocabulary import DraftVocabulary


class DraftSampler:
    """Draws the drafts of one step from left to right and makes the `Draft` of them.

    step: the step to draft for.
    chosen: places in the step that want drafts, [b]. None means all.
    form: "one_hot" takes the most likely token and reports no distribution. With the other forms, rows at temperature 0
        do the same.
    sparse_top_m: M, the entries of a sparse distribution.
    vocabulary: the draft vocabulary. None means the target's.
    """

    def __init__(
        self,
        step: StepView,
        chosen: Tensor | None,
        form: DistributionForm,
        *,
        sparse_top_m: int = 0,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._step = step
        self._chosen = chosen
        self._vocabulary = vocabulary
        self._drawn: list[Tensor] = []
        self._distribution: _Distribution | None = None
        if form != "one_hot" and step.sampling is not None and not step.sampling.all_greedy:
            sampling = _rows_of(step.sampling, chosen)
            self._distribution = (
                _SparseDistribution(sampling, sparse_top_m) if form == "sparse" else _DenseDistribution(sampling)
            )

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its most likely token and no distribution is reported."""
        return self._distribution is None

    def draw(self, logits: Tensor) -> Tensor:
        """The next draft token of every row, as target ids [b], from its logits [b, D]."""
        index = len(self._drawn)
        if self._distribution is None:
            ids = most_likely(logits, self._vocabulary)
        else:
            uniform = self._step.random.uniform(index)
            drawn = self._distribution.draw(logits, uniform if self._chosen is None else uniform[self._chosen])
            ids = target_ids(drawn, self._vocabulary)
        self._drawn.append(ids)
        return ids

    def draft(self) -> Draft:
        """All drawn tokens, each row cut to its budget."""
        if not self._drawn:
            return Draft.from_lists([[]] * len(self._step), self._step.num_draft_tokens)
        return self.draft_of(torch.stack(self._drawn, dim=1))

    def draft_of(self, drawn: Tensor) -> Draft:
        """A draft of target ids [b, n], each row cut to its budget."""
        step = self._step
        token_ids = self._placed(drawn, PADDING_TOKEN_ID)
        lengths = step.budget.clamp(max=drawn.shape[1])
        if self._chosen is not None:
            lengths = torch.zeros_like(lengths).index_copy(0, self._chosen, lengths[self._chosen])
        beyond = torch.arange(step.num_draft_tokens, device=lengths.device) >= lengths[:, None]
        token_ids = token_ids.masked_fill(beyond, PADDING_TOKEN_ID)
        return Draft(token_ids, lengths, None if self._distribution is None else self._reported(self._distribution))

    def _reported(self, distribution: _Distribution) -> DraftDistribution:
        parts = distribution.parts(self._vocabulary)
        kind = torch.full(
            (len(self._step),), DistributionKind.ONE_HOT, dtype=torch.uint8, device=distribution.sampled.device
        )
        kinds = torch.full_like(kind, int(distribution.kind))[: len(distribution.sampled)].masked_fill(
            ~distribution.sampled, DistributionKind.ONE_HOT
        )
        kind = kinds if self._chosen is None else kind.index_copy(0, self._chosen, kinds)
        return DraftDistribution(
            kind=kind,
            **{
                name: self._placed(part, PADDING_TOKEN_ID if name == "sparse_ids" else 0)
                for name, part in parts.items()
            },
        )

    def _placed(self, part: Tensor, padding: float) -> Tensor:
        """[b, drawn, ...] at its places in [B, K, ...]."""
        step = self._step
        if self._chosen is None and part.shape[1] == step.num_draft_tokens:
            return part
        whole = part.new_full((len(step), step.num_draft_tokens, *part.shape[2:]), padding)
        rows = slice(None) if self._chosen is None else self._chosen
        whole[rows, : part.shape[1]] = part
        return whole


class _Distribution(ABC):
    """Draws from a form of distribution and remembers what it drew from."""

    kind: DistributionKind

    def __init__(self, sampling: SamplingView) -> None:
        assert sampling.temperature is not None, "a proposer that reports a distribution declares it"
        self.sampled = sampling.temperature > 0  # [b] bool; the others are greedy
        self.temperature = sampling.temperature.masked_fill(~self.sampled, 1.0)[:, None]
        self.top_k, self.top_p, self.min_p = sampling.top_k, sampling.top_p, sampling.min_p

    @abstractmethod
    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draft ids [b] for logits [b, D] and one number in (0, 1) per row [b]."""

    @abstractmethod
    def parts(self, vocabulary: DraftVocabulary | None) -> dict[str, Tensor]:
        """The fields of `DraftDistribution` for every token drawn so far, [b, drawn, ...]."""

    def _inside(self, scaled: Tensor, log_mass: Tensor) -> Tensor:
        """Which entries the filters leave, a prefix of each row: `scaled` [b, M] is sorted, the largest first.

        `log_mass` [b, 1] is the log of the sum of exp(scaled) over the whole vocabulary.
        """
        ranks = torch.arange(scaled.shape[1], device=scaled.device)
        inside = torch.ones_like(scaled, dtype=torch.bool)
        if self.top_k is not None:
            k = self.top_k.masked_fill(self.top_k <= 0, scaled.shape[1])[:, None]
            inside &= ranks < k
            of_k = scaled.masked_fill(~inside, -torch.inf).logsumexp(dim=-1, keepdim=True)
            log_mass = torch.where((self.top_k > 0)[:, None], of_k, log_mass)
        if self.min_p is not None:
            inside &= scaled >= scaled[:, :1] + self.min_p[:, None].log()
        if self.top_p is not None:
            mass = (scaled - log_mass).exp()
            inside &= mass.cumsum(dim=-1) - mass < self.top_p[:, None]
        inside[:, 0] = True
        return inside


class _SparseDistribution(_Distribution):
    """The M most likely tokens, renormalised: nothing of vocabulary size is kept."""

    kind = DistributionKind.SPARSE

    def __init__(self, sampling: SamplingView, top_m: int) -> None:
        super().__init__(sampling)
        self._top_m = top_m
        self._ids: list[Tensor] = []  # [b, M] draft ids
        self._probs: list[Tensor] = []  # [b, M]

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        top, ids = logits.topk(min(self._top_m, logits.shape[-1]))
        scaled = top.float() / self.temperature
        log_mass = (logits.float() / self.temperature).logsumexp(dim=-1, keepdim=True)
        inside = self._inside(scaled, log_mass)
        probs = scaled.masked_fill(~inside, -torch.inf).softmax(dim=-1)
        choice = _inverse_cdf(probs, uniform).masked_fill(~self.sampled, 0)
        self._ids.append(ids.masked_fill(~inside, PADDING_TOKEN_ID))
        self._probs.append(probs)
        return ids.gather(1, choice[:, None])[:, 0]

    def parts(self, vocabulary: DraftVocabulary | None) -> dict[str, Tensor]:
        ids, probs = torch.stack(self._ids, dim=1), torch.stack(self._probs, dim=1)
        if vocabulary is not None:
            ids = vocabulary.target_ids[ids.clamp(min=0)].masked_fill(ids < 0, PADDING_TOKEN_ID)
        missing = self._top_m - ids.shape[-1]
        if missing > 0:  # a draft vocabulary smaller than M
            ids = torch.nn.functional.pad(ids, (0, missing), value=PADDING_TOKEN_ID)
            probs = torch.nn.functional.pad(probs, (0, missing))
        return {"sparse_ids": ids, "sparse_probs": probs}


class _DenseDistribution(_Distribution):
    """The whole draft vocabulary, as logits with temperature and filters in them."""

    kind = DistributionKind.DENSE_LOGITS

    def __init__(self, sampling: SamplingView) -> None:
        super().__init__(sampling)
        self._logits: list[Tensor] = []  # [b, D]

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        scaled, order = (logits.float() / self.temperature).sort(dim=-1, descending=True)
        inside = self._inside(scaled, scaled.logsumexp(dim=-1, keepdim=True))
        scaled = scaled.masked_fill(~inside, -torch.inf)
        choice = _inverse_cdf(scaled.softmax(dim=-1), uniform).masked_fill(~self.sampled, 0)
        self._logits.append(torch.empty_like(scaled).scatter_(1, order, scaled))
        return order.gather(1, choice[:, None])[:, 0]

    def parts(self, vocabulary: DraftVocabulary | None) -> dict[str, Tensor]:
        return {"draft_logits": torch.stack(self._logits, dim=1)}


def most_likely(logits: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """Target ids [...] of the largest logits [..., D]."""
    argmax = ARGMAX.get(logits.device.type, _argmax)
    return target_ids(argmax(logits), vocabulary)


def _argmax(values: Tensor) -> Tensor:
    return values.argmax(dim=-1)


def _argmax_on_cpu(values: Tensor) -> Tensor:
    """By NumPy, which compares many values at once: a row of 152k in bfloat16 took 23 us instead of 550."""
    return torch.as_tensor(values.detach().float().numpy().argmax(-1))


ARGMAX: dict[str, Callable[[Tensor], Tensor]] = {"cpu": _argmax_on_cpu}
"""Places [...] of the largest values [..., D] of each row, for types of device that torch's own way does not suit."""


def target_ids(ids: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """Draft ids as the target's."""
    return ids if vocabulary is None else vocabulary.target_ids[ids]


def _inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first entry at which the cumulated probability exceeds `uniform` [b]: [b] for probs [b, M]."""
    cumulated = probs.double().cumsum(dim=-1)
    return (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(dim=-1).clamp(max=probs.shape[1] - 1)


def _rows_of(sampling: SamplingView, chosen: Tensor | None) -> SamplingView:
    if chosen is None:
        return sampling
    fields = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    temperature, top_k, top_p, min_p = (None if each is None else each[chosen] for each in fields)
    return SamplingView(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, all_greedy=sampling.all_greedy)
