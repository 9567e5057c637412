"""Draws draft tokens, and reports the distribution that each was drawn from.

Any q is lossless if the drafts are really drawn from it (arXiv 2211.17192, 2302.01318). The samplers draw inside the
support that the request's own temperature, top-k, top-p and min-p leave, because only these drafts can be accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..needs import DistributionForm
from ..types import PADDING_TOKEN_ID, DistributionKind, Draft, DraftDistribution, SamplingView, StepView
from .draft_masks import DraftMasks
from .vocabulary import DraftVocabulary, largest, target_ids


class DraftSampler:
    """Draws the drafts of one step from left to right and makes the `Draft` of them.

    step: the step to draft for.
    chosen: places in the step that want drafts, [b]. None means all.
    form: "one_hot" takes the most likely token and reports no distribution. With the other forms, rows at temperature 0
        do the same.
    sparse_top_m: M, the entries of a sparse distribution.
    vocabulary: the draft vocabulary. None means the target's.
    masks: of the grammars that are followed. None means that there are none.
    """

    def __init__(
        self,
        step: StepView,
        chosen: Tensor | None,
        form: DistributionForm,
        *,
        sparse_top_m: int = 0,
        vocabulary: DraftVocabulary | None = None,
        masks: DraftMasks | None = None,
    ) -> None:
        self._step = step
        self._chosen = chosen
        sampling = None if form == "one_hot" or step.sampling is None or step.sampling.all_greedy else step.sampling
        self._sampling = {} if sampling is None else _columns_of(sampling, chosen)
        form = "one_hot" if sampling is None else form
        self.rule: DrawRule = DrawRule(form, tuple(self._sampling), sparse_top_m, vocabulary, masks)
        self._drawing: Drawing | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its most likely token and no distribution is reported."""
        return self.rule.form == "one_hot"

    @property
    def budgets(self) -> Tensor:
        """The most tokens of every row that wants drafts, [b]."""
        return of_chosen(self._step.budget, self._chosen)

    def draw(self, logits: Tensor) -> Tensor:
        """The next draft token of every row, as target ids [b], from its logits [b, D]."""
        if self._drawing is None:
            width = self._step.width
            self._drawing = self.rule.drawing(self.numbers(width), width)
        return self._drawing.draw(logits)

    def numbers(self, num_tokens: int) -> tuple[Tensor, ...]:
        """All that `DrawRule.drawing` needs, in one tensor of a row per request; nothing if greedy."""
        if self.is_greedy:
            return ()
        uniforms = [of_chosen(self._step.random.uniform(index), self._chosen) for index in range(num_tokens)]
        return (torch.stack([*uniforms, *self._sampling.values()], dim=1),)  # float64, which holds all of them

    def draft(self) -> Draft:
        """All drawn tokens, each row cut to its budget."""
        if self._drawing is None:
            return Draft.from_lists([[]] * len(self._step), self._step.width)
        return self.draft_of(*self._drawing.result())

    def draft_of(self, drawn: Tensor, *parts: Tensor) -> Draft:
        """A draft of target ids [b, n], each row cut to its budget, and of what they were drawn from (`DrawRule`)."""
        step = self._step
        token_ids = self._placed(drawn, PADDING_TOKEN_ID)
        lengths = step.budget.clamp(max=drawn.shape[1])
        if self._chosen is not None:
            lengths = torch.zeros_like(lengths).index_copy(0, self._chosen, lengths[self._chosen])
        beyond = torch.arange(step.width, device=lengths.device) >= lengths[:, None]
        token_ids = token_ids.masked_fill(beyond, PADDING_TOKEN_ID)
        return Draft(token_ids, lengths, distribution=None if self.is_greedy else self._reported(parts))

    def draft_of_trees(self, drawn: Tensor, parents: Tensor, *parts: Tensor) -> Draft:
        """A draft of nodes: target ids and parents [b, n], each row cut to its budget; an id of -1 ends a row.

        parts: the distributions of places [b, n, ...], see `DraftDistribution`.
        """
        draft = self.draft_of(drawn, *parts)
        lengths = (draft.token_ids != PADDING_TOKEN_ID).sum(dim=1)
        return replace(draft, lengths=lengths, parents=self._placed(parents, -1))

    def _reported(self, parts: Sequence[Tensor]) -> DraftDistribution:
        form = FORMS[self.rule.form]
        sampled = self._sampling["temperature"] > 0
        kind = sampled.to(torch.uint8).mul_(int(form.kind))  # greedy rows are one-hot, which is 0
        if self._chosen is not None:
            kind = kind.new_zeros(len(self._step)).index_copy(0, self._chosen, kind)
        tables: dict[str, Any] = {
            name: self._placed(part, PADDING_TOKEN_ID if name == "sparse_ids" else 0)
            for name, part in zip(form.parts, parts, strict=True)
        }
        return DraftDistribution(kind=kind, **tables)

    def _placed(self, part: Tensor, padding: float) -> Tensor:
        """[b, drawn, ...] at its places in [B, K, ...]."""
        step = self._step
        if self._chosen is None and part.shape[1] == step.width:
            return part
        whole = part.new_full((len(step), step.width, *part.shape[2:]), padding)
        rows = slice(None) if self._chosen is None else self._chosen
        whole[rows, : part.shape[1]] = part
        return whole


@dataclass(frozen=True)
class DrawRule:
    """How tokens are drawn, without the tensors that change with every step: what captured work is made with.

    A result is target ids [b, n], then what they were drawn from: nothing for "one_hot", sparse_ids and sparse_probs
    [b, n, M] for "sparse", logits [b, n, D] for "dense".
    """

    form: DistributionForm
    columns: tuple[str, ...]  # the sampling parameters that are known of each row
    sparse_top_m: int
    vocabulary: DraftVocabulary | None
    masks: DraftMasks | None = None  # with any, the drawing asks the host after each token, and is not captured

    def drawing(self, numbers: Sequence[Tensor], num_tokens: int) -> Drawing:
        """A new drawing of so many tokens, from what `DraftSampler.numbers` gave. It may be captured."""
        columns = [column for packed in numbers for column in packed.unbind(1)]
        given = zip(self.columns, columns[num_tokens:], strict=True)
        sampling = {name: column.to(COLUMN_DTYPES[name]) for name, column in given}
        return FORMS[self.form](self, sampling, columns[:num_tokens])


class Drawing:
    """Draws the most likely tokens.

    rule: what is drawn.
    sampling: the declared sampling parameters by name, each [b]; the greedy form reads none.
    uniforms: numbers in (0, 1) [b] by the index of the drawn token; the greedy form reads none.
    """

    kind: ClassVar[DistributionKind] = DistributionKind.ONE_HOT
    parts: ClassVar[tuple[str, ...]] = ()  # fields of `DraftDistribution`

    def __init__(self, rule: DrawRule, sampling: Mapping[str, Tensor], uniforms: Sequence[Tensor]) -> None:
        self._rule, self._uniforms = rule, uniforms
        self._drawn: list[tuple[Tensor, ...]] = []

    def draw(self, logits: Tensor) -> Tensor:
        """The next token of every row, as target ids [b], from its logits [b, D]."""
        masks, vocabulary = self._rule.masks, self._rule.vocabulary
        if masks is not None:
            logits = masks.masked(logits, [ids for ids, *_ in self._drawn], vocabulary)
        ids, *parts = self._draw(logits)
        ids = target_ids(ids, vocabulary)
        self._drawn.append((ids, *parts))
        return ids

    def draw_each(self, logits: Tensor) -> None:
        """The next n tokens of every row, from logits [b, n, D] that are known together."""
        if self._rule.form == "one_hot" and self._rule.masks is None:
            self._drawn += [(each,) for each in self.most_likely(logits).unbind(dim=1)]
            return
        for each in logits.unbind(dim=1):
            self.draw(each)

    def most_likely(self, logits: Tensor) -> Tensor:
        """Target ids [...] of the largest logits [..., D], which are not drawn by this."""
        return target_ids(largest(logits), self._rule.vocabulary)

    def result(self) -> tuple[Tensor, ...]:
        """The tensors that the loop returns, as `DrawRule` describes them."""
        drawn, *parts = (torch.stack(each, dim=1) for each in zip(*self._drawn, strict=True))
        return drawn, *self.reported(*parts)

    def reported(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The parts of a distribution [..., M] as they are reported: in target ids, M entries wide."""
        return parts

    def _draw(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Draft ids [b], and the entries of the parts."""
        return (largest(logits),)


class FilteredDrawing(Drawing, ABC):
    """Draws from what temperature and filters leave, and remembers it."""

    def __init__(self, rule: DrawRule, sampling: Mapping[str, Tensor], uniforms: Sequence[Tensor]) -> None:
        super().__init__(rule, sampling, uniforms)
        assert "temperature" in sampling, "a proposer that reports a distribution declares it"
        self.sampled: Tensor = sampling["temperature"] > 0  # [b] bool; the others are greedy
        self.temperature: Tensor = sampling["temperature"].masked_fill(~self.sampled, 1.0).clamp(min=COLDEST)[:, None]
        self.top_k: Tensor | None = sampling.get("top_k")
        self.top_p: Tensor | None = sampling.get("top_p")
        self.min_p: Tensor | None = sampling.get("min_p")

    @abstractmethod
    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Draft ids and probabilities [b, M], the most likely first, and the entries of the parts."""

    def _draw(self, logits: Tensor) -> tuple[Tensor, ...]:
        ids, probs, parts = self.distribution(logits)
        choice = _inverse_cdf(probs, self._uniforms[len(self._drawn)]).masked_fill(~self.sampled, 0)
        return ids.gather(1, choice[:, None])[:, 0], *parts

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


class _SparseDrawing(FilteredDrawing):
    """The M most likely tokens, renormalised: nothing of vocabulary size is kept."""

    kind = DistributionKind.SPARSE
    parts = ("sparse_ids", "sparse_probs")

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        top, ids = logits.topk(min(self._rule.sparse_top_m, logits.shape[-1]))
        scaled = top.float() / self.temperature
        log_mass = (logits.float() / self.temperature).logsumexp(dim=-1, keepdim=True)
        inside = self._inside(scaled, log_mass)
        probs = scaled.masked_fill(~inside, -torch.inf).softmax(dim=-1)
        return ids, probs, (ids.masked_fill(~inside, PADDING_TOKEN_ID), probs)

    def reported(self, *parts: Tensor) -> tuple[Tensor, ...]:
        ids, probs = parts
        vocabulary = self._rule.vocabulary
        if vocabulary is not None:
            ids = vocabulary.target_ids[ids.clamp(min=0)].masked_fill(ids < 0, PADDING_TOKEN_ID)
        missing = self._rule.sparse_top_m - ids.shape[-1]
        if missing > 0:  # a draft vocabulary smaller than M
            ids = torch.nn.functional.pad(ids, (0, missing), value=PADDING_TOKEN_ID)
            probs = torch.nn.functional.pad(probs, (0, missing))
        return ids, probs


class _DenseDrawing(FilteredDrawing):
    """The whole draft vocabulary, as logits with temperature and filters in them."""

    kind = DistributionKind.DENSE_LOGITS
    parts = ("logits",)

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        scaled, order = (logits.float() / self.temperature).sort(dim=-1, descending=True)
        inside = self._inside(scaled, scaled.logsumexp(dim=-1, keepdim=True))
        scaled = scaled.masked_fill(~inside, -torch.inf)
        return order, scaled.softmax(dim=-1), (torch.empty_like(scaled).scatter_(1, order, scaled),)


FORMS: dict[DistributionForm, type[Drawing]] = {"one_hot": Drawing, "sparse": _SparseDrawing, "dense": _DenseDrawing}
COLDEST = 1e-30  # colder ones are taken as this, as in verification: logits divided by it are finite
COLUMN_DTYPES = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}


def of_chosen(rows: Tensor, chosen: Tensor | None) -> Tensor:
    """Choose rows [b, ...] of [B, ...] by their places. None means all."""
    return rows if chosen is None else rows[chosen]


def _inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first entry at which the cumulated probability exceeds `uniform` [b]: [b] for probs [b, M]."""
    cumulated = probs.double().cumsum(dim=-1)
    return (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(dim=-1).clamp(max=probs.shape[1] - 1)


def _columns_of(sampling: SamplingView, chosen: Tensor | None) -> dict[str, Tensor]:
    """The declared sampling parameters of the chosen rows by name, each [b]."""
    known = {name: getattr(sampling, name) for name in COLUMN_DTYPES}
    return {name: of_chosen(each, chosen) for name, each in known.items() if isinstance(each, Tensor)}
